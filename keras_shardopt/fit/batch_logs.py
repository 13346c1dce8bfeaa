"""Decides for which batches the logs cover all replicas: only if a callback or the progress bar reads them."""

from __future__ import annotations

import time
from typing import Any

import keras
from keras.callbacks import Callback

from keras_shardopt.fit.callbacks import ORBAX, running_callbacks

BAR_SECONDS = 0.05
"""The time between two refreshes of Keras's progress bar, in seconds."""

_QUIET_SECONDS = 0.5
"""The time in seconds for which logs of batches are not needed, if neither a progress bar nor a callback reads them."""

_NO_BATCH_LOGS = (keras.callbacks.BackupAndRestore, keras.callbacks.History, keras.callbacks.ProgbarLogger)
"""Classes of callbacks that do not need the logs of every batch. (The progress bar shows logs only sometimes.)"""


class BatchLogs:
    """Decides for which batches logs are aggregated over replicas. This happens only if a callback reads the logs.

    Between two refreshes, the progress bar gets the last logs again, because aggregation takes time.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.is_fitting = False
        """Whether a `fit` of the model is running."""
        self._shown: dict[bool, dict[str, Any]] = {}
        self._shown_at = 0.0

    def are_read(self, trains: bool) -> bool:
        """Whether a callback reads the logs of the next training batch (`trains`) or test batch."""
        if self._always(trains):
            return True
        if not self._has_bar() or (self.is_fitting and not trains):
            return False
        # Also True if `_shown` has no metrics to repeat: before the first `show`, or if a custom step returns others.
        return trains not in self._shown or time.monotonic() - self._shown_at > BAR_SECONDS

    def seconds_without_readers(self, trains: bool) -> float:
        """Return for how many seconds no callback or progress bar needs logs of training (`trains`) or test batches."""
        if self._always(trains):
            return 0.0
        return 2 * BAR_SECONDS if self._has_bar() else _QUIET_SECONDS

    def _always(self, trains: bool) -> bool:
        return any(_reads_batch_logs(callback, *_HOOKS[trains]) for callback in running_callbacks(self._model))

    def _has_bar(self) -> bool:
        bars = [each for each in running_callbacks(self._model) if isinstance(each, keras.callbacks.ProgbarLogger)]
        return any(bar.verbose == 1 for bar in bars)

    def last(self, trains: bool, logs: Any) -> Any:
        """Return the metrics that `show` stored last for training or test batches; `logs` before the first `show`."""
        return self._shown.get(trains, logs)

    def show(self, trains: bool, metrics: dict[str, Any]) -> None:
        """Store metrics that cover all replicas, for `last`."""
        self._shown[trains], self._shown_at = metrics, time.monotonic()

    def forget(self) -> None:
        """Drop the stored metrics. Called when metrics are reset, because the stored values are then out of date."""
        self._shown.clear()


_HOOKS = {True: ("on_batch_end", "on_train_batch_end"), False: ("on_test_batch_end",)}
"""The methods of callbacks that receive the logs of a batch: in training (True) and in evaluation (False)."""


def _reads_batch_logs(callback: Any, *hooks: str) -> bool:
    """Whether a callback reads the logs of each batch, for example because it overrides a method named in `hooks`."""
    if isinstance(callback, (keras.callbacks.ModelCheckpoint, ORBAX)):
        return bool(callback.save_freq != "epoch")
    if isinstance(callback, keras.callbacks.TensorBoard):
        return bool(callback.update_freq != "epoch")
    if isinstance(callback, _NO_BATCH_LOGS) or type(callback).__module__.startswith("keras_shardopt."):
        return False
    return any(hook in vars(callback) or getattr(type(callback), hook) is not getattr(Callback, hook) for hook in hooks)
