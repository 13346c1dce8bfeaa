"""A callback that ends training when a gradient is not finite."""

from __future__ import annotations

from typing import Any

import keras

from keras_shardopt.backends.models import optimizers_of
from keras_shardopt.optimizers.cross_shard import CrossShard, cross_shards


class StopOnNonFinite(keras.callbacks.Callback):
    """Ends training right after `CrossShard(..., on_nonfinite="raise")` finds NaN or infinity in a batch.

    Use it on JAX, and on TensorFlow with `jit_compile=True`, because their compiled steps cannot raise. They skip the
    update, but without this callback the error comes when `fit` ends (JAX) or never (TensorFlow). Otherwise the
    callback changes nothing. It waits for each batch to finish, because it reads one number after it.

    Raises:
        FloatingPointError: after such a batch, on every process, with the names of the replica and the variable.

    Example:
        >>> import keras, numpy as np, keras_shardopt as ks
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(ks.CrossShard("sgd", on_nonfinite="raise"), "mse")
        >>> stop = ks.callbacks.StopOnNonFinite()
        >>> history = model.fit(np.ones((8, 4)), np.ones((8, 1)), callbacks=[stop], verbose=0)
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Ignores updates that were skipped before this `fit`."""
        for cross_shard in cross_shards_in(self.model):
            cross_shard.check_finite(from_now=True)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Raises if the batch has skipped an update."""
        for cross_shard in cross_shards_in(self.model):
            cross_shard.check_finite()


def cross_shards_in(model: Any) -> list[CrossShard]:
    """Returns every `CrossShard` in the optimizers of a model."""
    return [part for optimizer in optimizers_of(model) for part in cross_shards(optimizer)]
