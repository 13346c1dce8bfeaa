"""Steps in parts on TensorFlow."""

from keras_shardopt.extensions.equal_bits.tensorflow import step

__all__ = ["step"]
