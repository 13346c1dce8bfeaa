"""What the three backends of `fit/` share: one model's own stand-ins for methods of its trainer.

Private names of Keras touched here (a test holds each of them):
    `Trainer._get_metrics_result_or_logs` - the logs of an epoch, before validation.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_shardopt import arguments as check
from keras_shardopt.backends.models import optimizers_in_step, override_method
from keras_shardopt.backends.user_warnings import warn


def arguments_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a call, by name."""
    return dict(inspect.signature(function).bind(*args, **kwargs).arguments)


def call_silently(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls `fit`, `evaluate` or `predict` so that it prints nothing; also one with a signature of the model's own."""
    parameters = inspect.signature(real).parameters
    taking_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    bound = inspect.signature(real).bind(*args, **kwargs)
    if "verbose" in parameters:
        bound.arguments["verbose"] = 0
    elif taking_any:
        bound = inspect.signature(real).bind(*args, **{**kwargs, "verbose": 0})
    return real(*bound.args, **bound.kwargs)


def reducers_in(model: Any, reducers_of: Callable[[Any], list[Any]]) -> list[Any]:
    """Each `CrossShard` that updates the model, as far as that is known.

    Args:
        model: a `keras.Model`.
        reducers_of: finds each `CrossShard` that an optimizer consists of, from the outside in.
    """
    return [reducer for optimizer in optimizers_in_step(model) for reducer in reducers_of(optimizer)]


def watch_empty_epochs(model: Any) -> None:
    """Makes an epoch of `fit` without batches log nothing, with a warning. Doing it twice changes nothing."""
    override_method(model, "_get_metrics_result_or_logs", _logs_of_epoch)
    override_method(model, "evaluate", _evaluate)


def _logs_of_epoch(model: Any, real: Callable[..., Any], logs: Any) -> Any:
    """Leaves out logs of an earlier epoch: Keras keeps them, and returns metrics of zero rows in their place."""
    before = vars(model).get(_LAST_LOGS)
    is_empty = before and (logs is before or logs == {})
    if not is_empty:
        object.__setattr__(model, _LAST_LOGS, logs)
    else:
        warn(
            "An epoch without batches logs no metrics. Received: no batch left for an epoch of `fit`. "
            "Repeat the data (`dataset.repeat()`), or leave out `steps_per_epoch`."
        )
    return real({} if is_empty else logs)


def _evaluate(model: Any, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Keeps the logs of training apart from those of a validation between two epochs."""
    before = vars(model).get(_LAST_LOGS)
    object.__setattr__(model, _LAST_LOGS, None)
    try:
        return real(*args, **kwargs)
    finally:
        object.__setattr__(model, _LAST_LOGS, before)


_LAST_LOGS = "_keras_shardopt_last_logs"
"""On a model: the logs of the last training step."""


def refuse_groups(reducers: Sequence[Any]) -> None:
    """Raises ValueError if a prepared model would be trained with groups, of which each trains apart."""
    for cross_shard in reducers:
        if len(cross_shard.group_assignment or []) > 1:
            raise ValueError(
                "`model` must be trained by all replicas together, and with `group_assignment` the groups train apart. "
                f"Received: {cross_shard!r}. Train it without `prepare`, on equal parts of each batch."
            )


def warn_of_unequal_start(names: Sequence[str]) -> None:
    """Says, in one line, which variables were not equal on all processes when an epoch began."""
    warn(
        "All processes must begin an epoch equal, so all go on with the values of the first one. "
        f"Received: other values of {check.listed(names, ', ')} on some. Change variables on every process alike.",
    )


def num_rows(data: Any) -> Any:
    """How many rows a batch has: a batch is what `train_step` gets, `(x, y, sample_weight)` or less."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    return keras.ops.shape(next(leaf for leaf in keras.tree.flatten(x) if leaf is not None))[0]
