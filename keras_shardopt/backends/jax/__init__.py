"""The replicas of a `keras.distribution`, or of a mapped axis."""
