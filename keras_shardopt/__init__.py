"""Data-parallel training for Keras 3 with the same result on TensorFlow, JAX and PyTorch.

Optimizers: `CrossShard` (averages gradients over replicas), `LossScaling`, `MixedPrecision`, `GradientClipping`,
`LARC`, `VariableClipping`, `Tower`. For `fit`: `data_parallel`, `prepare`, `shard_data`, `save_model`, `save_weights`,
`synchronize_batch_normalization`, and the modules `callbacks` and `schedules`. `build_optimizer` and
`optimize_loss` combine these in one call.
"""

try:
    import keras as _
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] not in ("tensorflow", "jax", "torch"):
        raise
    raise ModuleNotFoundError(
        f"Keras needs a framework as its backend, and `{error.name}` is not installed. "
        "Run `pip install jax` (or `tensorflow`, `torch`), and set the environment variable: `KERAS_BACKEND=jax`.",
        name=error.name,
    ) from None
else:
    del _

from keras_shardopt import callbacks, schedules
from keras_shardopt.callbacks.step_report_plot import plot_step_report
from keras_shardopt.checkpoint.saving import save_model, save_weights
from keras_shardopt.checkpoint.sharded import load_sharded, save_sharded
from keras_shardopt.checkpoint.sharded.consolidate import consolidate
from keras_shardopt.classic import LARC, NovoGrad, Tower, VariableClipping, replicate
from keras_shardopt.classic.build import build_optimizer
from keras_shardopt.classic.steps.optimize_loss import get_regularization_loss, optimize_loss
from keras_shardopt.data import shard_data
from keras_shardopt.extensions.coding import codecs as compression
from keras_shardopt.extensions.equal_bits import VirtualReplicas
from keras_shardopt.extensions.local_sgd import LocalSGD
from keras_shardopt.extensions.noise import GradientNoise
from keras_shardopt.extensions.sharded_weights import ShardedWeights
from keras_shardopt.fit.batch_normalization import synchronize_batch_normalization
from keras_shardopt.fit.prepare import prepare
from keras_shardopt.fit.scope import data_parallel
from keras_shardopt.launch.function import launch_processes
from keras_shardopt.optimizers import (
    AutomaticLossScaler,
    CrossShard,
    GradientClipping,
    LossScaling,
    MixedPrecision,
    bfloat16_scope,
)
from keras_shardopt.optimizers.gradient_clipping import clip_by_global_norm, clip_gradients_by_norm
from keras_shardopt.update.step import Stage
from keras_shardopt.update.torch_speed import TorchSpeed

__version__ = "0.2.0"

__all__ = [
    "LARC",
    "AutomaticLossScaler",
    "CrossShard",
    "GradientClipping",
    "GradientNoise",
    "LocalSGD",
    "LossScaling",
    "MixedPrecision",
    "NovoGrad",
    "ShardedWeights",
    "Stage",
    "TorchSpeed",
    "Tower",
    "VariableClipping",
    "VirtualReplicas",
    "bfloat16_scope",
    "build_optimizer",
    "callbacks",
    "clip_by_global_norm",
    "clip_gradients_by_norm",
    "compression",
    "consolidate",
    "data_parallel",
    "get_regularization_loss",
    "launch_processes",
    "load_sharded",
    "optimize_loss",
    "plot_step_report",
    "prepare",
    "replicate",
    "save_model",
    "save_sharded",
    "save_weights",
    "schedules",
    "shard_data",
    "synchronize_batch_normalization",
]


def __dir__() -> list[str]:
    return [*__all__, "__all__", "__doc__", "__version__"]
