"""The methods that a model has after `prepare(model)` on every backend.

Private names of Keras touched here (a test checks that each exists):
    `Trainer._get_metrics_result_or_logs` - the logs of an epoch, before validation.
    `Trainer._aggregate_additional_loss` - reduces the value of a regularizer or an `add_loss` to a scalar.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from keras_shardopt.backends.models import Prepared
from keras_shardopt.backends.user_warnings import warn
from keras_shardopt.checkpoint.saving import save_prepared
from keras_shardopt.update.losses import additional_loss


class PreparedModel(Prepared, keras.Model):
    """The class that `prepare` mixes into a model. Each backend has a subclass.

    It saves state of all processes, makes `add_loss` values cover all replicas, and warns of epochs without batches.
    """

    def save(self, *args: Any, **kwargs: Any) -> None:
        save_prepared(self, "save", super().save, *args, **kwargs)

    def save_weights(self, *args: Any, **kwargs: Any) -> None:
        save_prepared(self, "save_weights", super().save_weights, *args, **kwargs)

    def _aggregate_additional_loss(self, loss: Any) -> Any:
        return additional_loss(self, super()._aggregate_additional_loss, loss)

    def _get_metrics_result_or_logs(self, logs: Any) -> Any:
        return super()._get_metrics_result_or_logs(logs_of_epoch(self, logs))


def logs_of_epoch(model: Any, logs: Any) -> Any:
    """Return `logs`, or `{}` after an epoch without batches, because Keras then passes the logs of an earlier epoch."""
    before = vars(model).get(_LAST_LOGS)
    if not (before and (logs is before or logs == {})):
        object.__setattr__(model, _LAST_LOGS, logs)
        return logs
    warn(
        "An epoch without batches logs no metrics. Received: no batch left for an epoch of `fit`. "
        "Repeat the data (`dataset.repeat()`), or leave out `steps_per_epoch`."
    )
    return {}


@contextlib.contextmanager
def separate_logs(model: Any) -> Iterator[None]:
    """In this block, which runs a validation, forget the logs of the last training step. Restore these at the end."""
    before = vars(model).get(_LAST_LOGS)
    object.__setattr__(model, _LAST_LOGS, None)
    try:
        yield
    finally:
        object.__setattr__(model, _LAST_LOGS, before)


_LAST_LOGS = "_keras_shardopt_last_logs"
"""The attribute of a model with the logs of its last training step."""
