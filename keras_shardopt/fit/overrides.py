"""Helpers of all backends in `fit/`: overriding methods of one model's trainer, and checks of its optimizers.

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
    """Return the arguments of a call by name."""
    return dict(inspect.signature(function).bind(*args, **kwargs).arguments)


def call_silently(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `fit`, `evaluate` or `predict` with `verbose=0`, also if a model overrides it with another signature."""
    parameters = inspect.signature(real).parameters
    taking_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    bound = inspect.signature(real).bind(*args, **kwargs)
    if "verbose" in parameters:
        bound.arguments["verbose"] = 0
    elif taking_any:
        bound = inspect.signature(real).bind(*args, **{**kwargs, "verbose": 0})
    return real(*bound.args, **bound.kwargs)


def reducers_in(model: Any, reducers_of: Callable[[Any], list[Any]]) -> list[Any]:
    """Return each `CrossShard` known to update the model.

    Args:
        model: a `keras.Model`.
        reducers_of: returns each `CrossShard` in an optimizer's chain, outermost first.
    """
    return [reducer for optimizer in optimizers_in_step(model) for reducer in reducers_of(optimizer)]


def before_look(reducers: Sequence[Any]) -> None:
    """Prepare the weights that these `CrossShard` optimizers update for reading. All processes call it together."""
    for reducer in reducers:
        reducer.pipeline.before_look()


def watch_empty_epochs(model: Any) -> None:
    """Make an epoch of `fit` without batches warn and log nothing. Idempotent."""
    override_method(model, "_get_metrics_result_or_logs", _logs_of_epoch)
    override_method(model, "evaluate", _evaluate)


def _logs_of_epoch(model: Any, real: Callable[..., Any], logs: Any) -> Any:
    """Drop logs of an earlier epoch: without batches, Keras keeps them and returns metrics of zero rows."""
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
    """Separate the logs of training from those of a validation between two epochs."""
    before = vars(model).get(_LAST_LOGS)
    object.__setattr__(model, _LAST_LOGS, None)
    try:
        return real(*args, **kwargs)
    finally:
        object.__setattr__(model, _LAST_LOGS, before)


_LAST_LOGS = "_keras_shardopt_last_logs"
"""Attribute of a model: the logs of the last training step."""


def refuse_groups(reducers: Sequence[Any]) -> None:
    """Raise ValueError if a `CrossShard` of a prepared model has several groups: each would train separately."""
    for cross_shard in reducers:
        if len(cross_shard.group_assignment or []) > 1:
            raise ValueError(
                "`model` must be trained by all replicas together, and with `group_assignment` the groups train apart. "
                f"Received: {cross_shard!r}. Train it without `prepare`, on equal parts of each batch."
            )


def warn_of_unequal_start(names: Sequence[str]) -> None:
    """Warn, in one line, of variables that differed between processes when an epoch began."""
    warn(
        "All processes must begin an epoch equal, so all go on with the values of the first one. "
        f"Received: other values of {check.listed(names, ', ')} on some. Change variables on every process alike.",
    )


def num_rows(data: Any) -> Any:
    """Return the number of rows of a batch: `(x, y, sample_weight)` or less, as `train_step` receives it."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    return keras.ops.shape(next(leaf for leaf in keras.tree.flatten(x) if leaf is not None))[0]
