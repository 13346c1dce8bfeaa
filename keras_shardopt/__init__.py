"""Data-parallel training for Keras 3 with one meaning on TensorFlow, JAX and PyTorch."""

from keras_shardopt import schedules
from keras_shardopt.optimizers import CrossShard
from keras_shardopt.parallel import data_parallel

__version__ = "0.1.0.dev0"

__all__ = ["CrossShard", "data_parallel", "schedules"]
