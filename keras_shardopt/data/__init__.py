"""`shard_data`: selects this process's part of a training set."""

from keras_shardopt.data.dispatch import shard_data

__all__ = ["shard_data"]
