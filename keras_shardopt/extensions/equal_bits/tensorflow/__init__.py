"""The TensorFlow step of `CrossShard(virtual_replicas=...)`."""

from keras_shardopt.extensions.equal_bits.tensorflow import step

__all__ = ["step"]
