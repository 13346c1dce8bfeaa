"""The optimizers, one class family per file."""

from keras_shardopt.optimizers.cross_shard import CrossShard
from keras_shardopt.optimizers.gradient_clipping import GradientClipping
from keras_shardopt.optimizers.larc import LARC
from keras_shardopt.optimizers.loss_scaler import AutomaticLossScaler
from keras_shardopt.optimizers.loss_scaling import LossScaling
from keras_shardopt.optimizers.mixed_precision import MixedPrecision, bfloat16_scope
from keras_shardopt.optimizers.novograd import NovoGrad
from keras_shardopt.optimizers.tower import Tower, replicate
from keras_shardopt.optimizers.variable_clipping import VariableClipping

__all__ = [
    "LARC",
    "AutomaticLossScaler",
    "CrossShard",
    "GradientClipping",
    "LossScaling",
    "MixedPrecision",
    "NovoGrad",
    "Tower",
    "VariableClipping",
    "bfloat16_scope",
    "replicate",
]
