"""Show the mean weights of replicas that train apart whenever somebody reads the weights of a model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from keras_shardopt.backends.models import override_method
from keras_shardopt.extensions.local_sgd.stage import LocalUpdates
from keras_shardopt.fit.overrides import reducers_in

_LOOKING = (
    *("_get_metrics_result_or_logs", "evaluate", "predict", "test_on_batch", "predict_on_batch"),
    *("get_weights", "set_weights", "load_weights", "save", "save_weights", "export"),
)
"""The methods of a model that look at its weights, or set some."""

_LOOKED = "_keras_shardopt_looked"
"""On a model: weights may have been looked at, or set, since the last training step."""


def local_updates_in(optimizers: Iterable[Any]) -> list[LocalUpdates]:
    """The stages of these optimizers whose replicas train apart."""
    return [
        each
        for optimizer in optimizers
        for each in getattr(optimizer, "extensions", ())
        if isinstance(each, LocalUpdates)
    ]


def show_mean(reducers: Sequence[Any]) -> None:
    """Where replicas train apart, puts the mean of their weights where somebody looks. All call it together."""
    for local in local_updates_in(reducers):
        local.before_look()


def resume_apart(reducers: Sequence[Any], begins_epoch: bool = False) -> None:
    """Lets replicas that train apart go on from their own weights, which is to be called before each training step."""
    for local in local_updates_in(reducers):
        local.resume(begins_epoch)


def begin_anew(reducers: Sequence[Any]) -> None:
    """Begins a round where weights are equal although replicas train apart: somebody has set them within a round."""
    for local in local_updates_in(reducers):
        if local.are_apart:
            local.begin_anew()


def watch_looks(model: Any) -> None:
    """Lets `fit` show the mean of replicas that train apart, where one program runs them. Twice changes nothing."""
    for name in _LOOKING:
        override_method(model, name, _showing)


def watch_apart(model: Any) -> None:
    """The same, and lets training steps go on from each replica's copies."""
    watch_looks(model)
    override_method(model, "make_train_function", _make_train_function)


def _reducers(model: Any) -> list[Any]:
    return reducers_in(model, model._keras_shardopt_reducers_of)


def _showing(model: Any, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stands around what looks at weights, or comes before it at the end of an epoch."""
    show_mean(_reducers(model))
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
