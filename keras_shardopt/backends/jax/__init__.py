"""The JAX backend: replicas of a `keras.distribution`, or of a mapped axis (`shard_map`, `pmap`)."""

from keras_shardopt.backends.jax import placement, processes, runtime

__all__ = ["placement", "processes", "runtime"]
