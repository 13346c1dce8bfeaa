"""Training with Keras's TensorFlow trainer on several replicas, in one process or in several workers."""

from keras_shardopt.fit.tensorflow.trainer import prepare

__all__ = ["prepare"]
