"""Training and evaluation steps of `VirtualReplicas` on TensorFlow."""

from keras_shardopt.extensions.equal_bits.tensorflow.step import PartsStep

__all__ = ["PartsStep"]
