"""Mixins of models with local SGD: methods that read weights get the mean over replicas; training steps do not."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from keras_shardopt.backends.models import methods_inside
from keras_shardopt.extensions.local_sgd.stage import LocalUpdates
from keras_shardopt.fit.calls import before_reading, cross_shards_in_step

_READERS = (
    *("_get_metrics_result_or_logs", "evaluate", "predict", "test_on_batch", "predict_on_batch"),
    *("get_weights", "set_weights", "load_weights", "save", "save_weights", "export"),
)
"""The methods of a model that read or set weights."""

_WAS_READ = "_keras_shardopt_looked"
"""Name of an attribute of models: whether a method has read or set weights since the last training step."""


def resume_local(cross_shards: Sequence[Any], begins_epoch: bool = False) -> None:
    """Restore each replica's weights before a training step. `begins_epoch`: other code may have set weights."""
    for local in LocalUpdates.found_in(cross_shards):
        local.resume(begins_epoch)


@contextlib.contextmanager
def _showing(model: Any) -> Iterator[None]:
    """Before this block, which runs a method that reads weights, assign the mean over replicas to the weights."""
    before_reading(cross_shards_in_step(model))
    object.__setattr__(model, _WAS_READ, True)
    yield


ShowsMean = methods_inside(_showing, _READERS)
"""Mixin: methods that read weights get the mean over replicas. For backends with one process for all replicas."""


class ResumesLocal(keras.Model):
    """Mixin: each training step resumes from the weights of each replica, not from the mean."""

    train_function: Any

    def make_train_function(self, *args: Any, **kwargs: Any) -> None:
        """Make the training function. Its next call first restores each replica's weights, if they are averaged."""
        super().make_train_function(*args, **kwargs)
        object.__setattr__(self, _WAS_READ, True)
        if getattr(self.train_function, "func", None) is not _resuming:
            self.train_function = functools.partial(_resuming, self, self.train_function)


def _resuming(model: Any, step: Callable[..., Any], *args: Any) -> Any:
    if vars(model).get(_WAS_READ, False):
        resume_local(cross_shards_in_step(model), begins_epoch=True)
        object.__setattr__(model, _WAS_READ, False)
    return step(*args)
