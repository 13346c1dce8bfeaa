"""Ending training where a gradient is not finite."""

from __future__ import annotations

from typing import Any

import keras

from keras_shardopt.backends.models import optimizers_of
from keras_shardopt.optimizers.cross_shard import CrossShard, cross_shards


class StopOnNonFinite(keras.callbacks.Callback):
    """Ends training right after the batch in which `CrossShard(..., on_nonfinite="raise")` found NaN or infinity.

    A compiled step cannot raise by itself everywhere: on JAX, and on TensorFlow with `jit_compile=True`, the update is
    left out at once, but without this callback the error comes when `fit` ends on JAX, and not at all on TensorFlow.
    Elsewhere it changes nothing. It looks at one number after each batch, which waits for the batch to be done.

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
        """What was left out before, and perhaps ended an earlier `fit`, is over."""
        for reducer in self._reducers():
            reducer.check_finite(from_now=True)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Raises, if the batch has left out an update."""
        for reducer in self._reducers():
            reducer.check_finite()

    def _reducers(self) -> list[CrossShard]:
        return reducers_in(self.model)


def reducers_in(model: Any) -> list[CrossShard]:
    """Every `CrossShard` in the optimizers that a model holds."""
    return [part for optimizer in optimizers_of(model) for part in cross_shards(optimizer)]
