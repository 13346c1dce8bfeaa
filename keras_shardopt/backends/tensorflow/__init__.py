"""The replicas of a `tf.distribute` strategy."""
