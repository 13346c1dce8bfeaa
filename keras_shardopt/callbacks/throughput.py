"""A callback that adds rows per second to the progress bar."""

from __future__ import annotations

import time
from typing import Any

import keras

from keras_shardopt import arguments as check


class Throughput(keras.callbacks.Callback):
    """Adds the rows per second of all replicas to the logs, as `rows_per_s`.

    The progress bar, the lines of `verbose=2`, `History` and `TensorBoard` show it, if they are after this callback in
    the list. The value is the mean since the first batch of the epoch, which may compile, and excludes validation. The
    last batch counts as full. Each process measures its own time.

    Args:
        batch_size: int >= 1. The number of rows in a batch of all replicas: the `batch_size` of `fit`, or its product
            with the number of processes if each process feeds its own rows.

    Raises:
        TypeError, ValueError: if `batch_size` is not as above.

    Example:
        >>> import keras, numpy as np, keras_shardopt as ks
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(ks.CrossShard("sgd"), "mse")
        >>> x, y, throughput = np.ones((8, 4)), np.ones((8, 1)), ks.callbacks.Throughput(2)
        >>> history = model.fit(x, y, batch_size=2, callbacks=[throughput], verbose=0)
        >>> history.history["rows_per_s"][0] > 0
        True

    References:
        `TimeHistory` of the TensorFlow Model Garden (`official/utils/misc/keras_utils.py`) also takes the global batch
        size.
    """

    async_safe = True  # Keras may call the callback in a thread while the next step runs

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = check.integer("batch_size", batch_size, fix="Pass the number of rows in a global batch.")

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Forgets the rate of the last epoch."""
        self._first: tuple[int, float] | None = None
        self._rate: float | None = None

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the mean rate of the epoch so far to `logs`."""
        now = time.perf_counter()
        if self._first is None:
            self._first = batch, now
        elif batch > self._first[0]:
            self._rate = self.batch_size * (batch - self._first[0]) / (now - self._first[1])
        self._add(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the mean rate of the epoch to `logs`."""
        self._add(logs)

    def _add(self, logs: dict[str, Any] | None) -> None:
        if logs is not None and self._rate is not None:
            logs["rows_per_s"] = self._rate
