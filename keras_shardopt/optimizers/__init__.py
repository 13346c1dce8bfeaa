"""The optimizers, one class family per file."""

from keras_shardopt.optimizers.cross_shard import CrossShard

__all__ = ["CrossShard"]
