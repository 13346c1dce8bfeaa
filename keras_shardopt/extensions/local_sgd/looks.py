"""Local SGD: put the mean weights into a model before its weights are read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from keras_shardopt.backends.models import override_method
from keras_shardopt.extensions.local_sgd.stage import LocalUpdates
from keras_shardopt.fit.overrides import before_look, reducers_in

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
        for each in getattr(optimizer, "extensions", ())
        if isinstance(each, LocalUpdates)
    ]


def resume_apart(reducers: Sequence[Any], begins_epoch: bool = False) -> None:
    """With local SGD, resume from each replica's own weights. Call it before each training step."""
    for local in local_updates_in(reducers):
        local.resume(begins_epoch)


def watch_looks(model: Any) -> None:
    """Make a model's readers of weights show the mean, when one program runs all replicas. Idempotent."""
    for name in _LOOKING:
        override_method(model, name, _showing)


def watch_apart(model: Any) -> None:
    """Do `watch_looks`, and make training steps resume from each replica's copies."""
    watch_looks(model)
    override_method(model, "make_train_function", _make_train_function)


def _reducers(model: Any) -> list[Any]:
    return reducers_in(model, model._keras_shardopt_reducers_of)


def _showing(model: Any, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Show the mean before a method that reads weights, or before readers at the end of an epoch."""
    before_look(_reducers(model))
    object.__setattr__(model, _LOOKED, True)
    return real(*args, **kwargs)


def _make_train_function(model: Any, real: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    real(*args, **kwargs)
    object.__setattr__(model, _LOOKED, True)
    if getattr(model.train_function, "func", None) is not _resuming:
        model.train_function = functools.partial(_resuming, model, model.train_function)


def _resuming(model: Any, step: Callable[..., Any], *args: Any) -> Any:
    if vars(model).get(_LOOKED, False):
        resume_apart(_reducers(model), begins_epoch=True)
        object.__setattr__(model, _LOOKED, False)
    return step(*args)
