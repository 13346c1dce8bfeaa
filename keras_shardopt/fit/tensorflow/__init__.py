"""Keras's TensorFlow trainer on several replicas, of one process or of several workers."""

from keras_shardopt.fit.tensorflow.trainer import prepare

__all__ = ["prepare"]
