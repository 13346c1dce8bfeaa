"""The TensorFlow backend: replicas of a `tf.distribute` strategy."""

from keras_shardopt.backends.tensorflow import placement, processes, runtime

__all__ = ["placement", "processes", "runtime"]
