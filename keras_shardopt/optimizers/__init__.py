"""The optimizers that wrap another optimizer, each class in its own file."""

from keras_shardopt.optimizers.cross_shard import CrossShard
from keras_shardopt.optimizers.gradient_clipping import GradientClipping
from keras_shardopt.optimizers.loss_scaler import AutomaticLossScaler
from keras_shardopt.optimizers.loss_scaling import LossScaling
from keras_shardopt.optimizers.mixed_precision import MixedPrecision, bfloat16_scope

__all__ = ["AutomaticLossScaler", "CrossShard", "GradientClipping", "LossScaling", "MixedPrecision", "bfloat16_scope"]
