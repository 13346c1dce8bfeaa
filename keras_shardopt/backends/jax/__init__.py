"""Replicas of a `keras.distribution`, or of a mapped axis."""

from keras_shardopt.backends.jax import placement, processes, runtime

__all__ = ["placement", "processes", "runtime"]
