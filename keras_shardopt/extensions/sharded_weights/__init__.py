"""Weights divided among ranks of PyTorch between uses (ZeRO stage 3)."""

from keras_shardopt.extensions.sharded_weights.settings import DividedWeights, ShardedWeights
from keras_shardopt.update.options import register_settings
from keras_shardopt.update.plugs import register_step

__all__ = ["ShardedWeights"]

register_settings(ShardedWeights)
register_step(DividedWeights.found_in, __name__, "ShardedStep")
