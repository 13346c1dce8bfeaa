"""Helpers of all backends in `fit/`: arguments of calls, and checks of a model's optimizers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_shardopt import arguments as check
from keras_shardopt.backends.models import optimizers_in_step
from keras_shardopt.backends.user_warnings import warn
from keras_shardopt.optimizers.cross_shard import cross_shards


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


def reducers_in(model: Any) -> list[Any]:
    """Return each `CrossShard` known to update the model."""
    return [reducer for optimizer in optimizers_in_step(model) for reducer in cross_shards(optimizer)]


def before_reading(reducers: Sequence[Any]) -> None:
    """Prepare the weights that these `CrossShard` optimizers update for reading. All processes call it together."""
    for reducer in reducers:
        reducer.pipeline.before_reading()


def refuse_groups(reducers: Sequence[Any]) -> None:
    """Raise ValueError if a `CrossShard` of a prepared model has several groups: each would train separately."""
    for cross_shard in reducers:
        if len(cross_shard.group_assignment or []) > 1:
            raise ValueError(
                "All replicas must train `model` together, but with `group_assignment` the groups train separately. "
                f"Received: {cross_shard!r}. Train the model without `prepare`, on equal parts of each batch."
            )


def warn_of_unequal_start(names: Sequence[str]) -> None:
    """Warn once of all variables that differed between processes when an epoch began."""
    warn(
        "All processes must begin an epoch with equal values, so they take the values of the first process. "
        f"Received: other values of {check.listed(names, ', ')} on some. Assign to variables on every process.",
    )


def num_rows(data: Any) -> Any:
    """Return the number of rows of a batch: `(x, y, sample_weight)` or less, as `train_step` receives it."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    return keras.ops.shape(next(leaf for leaf in keras.tree.flatten(x) if leaf is not None))[0]
