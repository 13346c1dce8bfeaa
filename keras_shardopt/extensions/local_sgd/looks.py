"""Local SGD: put the mean weights into a model before its weights are read."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras

from keras_shardopt.backends.models import methods_inside
from keras_shardopt.extensions.local_sgd.stage import LocalUpdates
from keras_shardopt.fit.calls import before_look, reducers_in

_LOOKING = (
    *("_get_metrics_result_or_logs", "evaluate", "predict", "test_on_batch", "predict_on_batch"),
    *("get_weights", "set_weights", "load_weights", "save", "save_weights", "export"),
)
"""The methods of a model that read or set weights."""

_LOOKED = "_keras_shardopt_looked"
"""Attribute of a model: weights may have been read or set since the last training step."""


def local_updates_in(optimizers: Iterable[Any]) -> list[LocalUpdates]:
    """Return the `LocalUpdates` stages of these optimizers."""
    return [
        each
        for optimizer in optimizers
        for each in getattr(optimizer, "extension_stages", ())
        if isinstance(each, LocalUpdates)
    ]


def resume_apart(reducers: Sequence[Any], begins_epoch: bool = False) -> None:
    """With local SGD, resume from each replica's own weights. Call it before each training step."""
    for local in local_updates_in(reducers):
        local.resume(begins_epoch)


@contextlib.contextmanager
def _showing(model: Any) -> Iterator[None]:
    """Show the mean before a method that reads weights, or before readers at the end of an epoch."""
    before_look(reducers_in(model))
    object.__setattr__(model, _LOOKED, True)
    yield


ShowsMean = methods_inside(_showing, _LOOKING)
"""A model whose readers of weights show the mean, when one program runs all replicas."""


class TrainsApart(keras.Model):
    """A model whose training steps resume from each replica's copies."""

    train_function: Any

    def make_train_function(self, *args: Any, **kwargs: Any) -> None:
        """Make the function, which resumes before each step."""
        super().make_train_function(*args, **kwargs)
        object.__setattr__(self, _LOOKED, True)
        if getattr(self.train_function, "func", None) is not _resuming:
            self.train_function = functools.partial(_resuming, self, self.train_function)


def _resuming(model: Any, step: Callable[..., Any], *args: Any) -> Any:
    if vars(model).get(_LOOKED, False):
        resume_apart(reducers_in(model), begins_epoch=True)
        object.__setattr__(model, _LOOKED, False)
    return step(*args)
