"""`ShardedWeights` for `CrossShard(extensions=[...])`, and the object that holds the divided weights."""

from __future__ import annotations

from typing import Any

import keras

from keras_shardopt import arguments as check
from keras_shardopt.backends import for_backend
from keras_shardopt.update.context import StageContext
from keras_shardopt.update.extension import Extension, ExtensionStage
from keras_shardopt.update.options import CrossShardOptions
from keras_shardopt.update.plugs import Place
from keras_shardopt.update.step import Stage


@keras.saving.register_keras_serializable(package="keras_shardopt")
class ShardedWeights(Extension):
    """PyTorch: each rank holds 1/N of the weights between steps (ZeRO stage 3). Requires `shard_state=True`.

    Weights are divided in buckets (groups). In `fit` and `evaluate`, a layer's first use of a weight gathers its bucket
    from all ranks. After its last use the bucket is released, and the backward pass gathers it again. Set the bucket
    size to that of a layer: `TorchSpeed(bucket_mib=...)`. See [sharded weights](../sharded_state.md#sharded-weights).

    Args:
        prefetch: int >= 0. Number of buckets to gather before they are needed, while layers compute. Default 1.

    Raises:
        TypeError: if `prefetch` is not an int.
        ValueError: if `prefetch` is negative; by `CrossShard`, without `shard_state=True`, with another extension or on
            another backend; in the first step, if the optimizer is not element-wise, or with `jit_compile=True`; in any
            step, if ranks use layers in different orders, or only some ranks read weights.

    Example:
        >>> import keras_shardopt as ks
        >>> sharded = ks.ShardedWeights(prefetch=2)
        >>> sharded
        ShardedWeights(prefetch=2)

    References:
        Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020. Unlike
        PyTorch's `fully_shard`, buckets are those of `shard_state`, and layers stay unchanged.
    """

    place = Place.UPDATE

    def __init__(self, prefetch: int = 1) -> None:
        fix = "Omit `prefetch` to gather one bucket ahead."
        self.prefetch = check.integer("prefetch", prefetch, at_least=0, fix=fix)

    def check(self, options: CrossShardOptions) -> None:
        """Raise ValueError if `options` do not divide the optimizer state, or have another extension."""
        if not options.shard_state:
            raise ValueError(
                "`ShardedWeights` divides weights as `shard_state=True` divides their optimizer state. Received: "
                f"shard_state={options.shard_state}. Use `CrossShard(..., shard_state=True)`."
            )
        if others := [each for each in options.extensions if each is not self]:
            raise ValueError(
                f"`ShardedWeights` cannot be combined with another extension. Received: {others}. Remove one of them."
            )
        if for_backend({"torch": f"{__package__}.torch"}) is None:
            raise ValueError(
                "`ShardedWeights` is for the PyTorch backend only. Received: another backend. Remove it; on JAX, "
                "`keras.distribution.ModelParallel` divides weights."
            )

    def from_options(self, options: CrossShardOptions, context: StageContext) -> list[Stage]:
        """Return the object that holds the divided weights, and makes them whole for other code."""
        return [DividedWeights(self, context)]


class DividedWeights(ExtensionStage):
    """Holds the divided weights of an optimizer, and makes them whole before they are read or saved."""

    divides_weights = True

    def __init__(self, settings: ShardedWeights, context: StageContext) -> None:
        self.settings = settings
        self.context = context
        self.weights: Any = None
        """The `WeightsOfOptimizer`; None before the first step, and with a single rank."""

    def before_reading(self) -> None:
        """Make the weights whole until the next training step."""
        if self.weights is not None:
            self.weights.make_whole()
