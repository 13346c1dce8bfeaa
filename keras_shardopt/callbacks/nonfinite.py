"""A callback that ends training when a gradient is NaN or infinite."""

from __future__ import annotations

from typing import Any

import keras

from keras_shardopt.checkpoint.training_state import cross_shards_of


class StopOnNonFinite(keras.callbacks.Callback):
    """Ends training right after a batch in which `CrossShard(..., on_nonfinite="raise")` finds NaN or infinity.

    Use this callback on JAX, and on TensorFlow with `jit_compile=True`. Their compiled steps cannot raise errors, so
    they skip the update. Without the callback, the error is raised when `fit` ends (JAX) or never (TensorFlow). In
    other cases, the callback has no effect. It reads one number after each step, so it waits for the end of the step.

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
        """Makes the callback ignore updates that were skipped before this `fit`."""
        for cross_shard in cross_shards_of(self.model):
            cross_shard.check_finite(from_now=True)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Raises FloatingPointError if an optimizer has skipped the update of this batch."""
        for cross_shard in cross_shards_of(self.model):
            cross_shard.check_finite()
