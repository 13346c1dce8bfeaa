"""Helpers for `fit/` on all backends: arguments of calls, and checks of a model's optimizers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_shardopt.backends.models import optimizers_in_step
from keras_shardopt.optimizers.cross_shard import cross_shards_in


def call_printing(prints: bool, real: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call `fit`, `evaluate` or `predict`; unless `prints`, with `verbose=0`, if the method accepts that argument."""
    if prints:
        return real(*args, **kwargs)
    parameters = inspect.signature(real).parameters
    taking_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    bound = inspect.signature(real).bind(*args, **kwargs)
    if "verbose" in parameters:
        bound.arguments["verbose"] = 0
    elif taking_any:
        bound = inspect.signature(real).bind(*args, **{**kwargs, "verbose": 0})
    return real(*bound.args, **bound.kwargs)


def cross_shards_in_step(model: Any) -> list[Any]:
    """Return each `CrossShard` (a wrapper that averages gradients) among the optimizers of the model's step."""
    return [each for optimizer in optimizers_in_step(model) for each in cross_shards_in(optimizer)]


def before_reading(cross_shards: Sequence[Any]) -> None:
    """Average weights that differ between replicas (local SGD) before they are read. All processes must call this."""
    for cross_shard in cross_shards:
        cross_shard.pipeline.before_reading()


def refuse_groups(cross_shards: Sequence[Any]) -> None:
    """Raise ValueError if a `CrossShard` has several groups of replicas, because each group trains its own weights."""
    for cross_shard in cross_shards:
        if len(cross_shard.group_assignment or []) > 1:
            raise ValueError(
                "All replicas must train `model` together, but with `group_assignment` the groups train separately. "
                f"Received: {cross_shard!r}. Train without `keras_shardopt.prepare`, on equal parts of each batch."
            )


def num_rows(data: Any) -> Any:
    """Return the number of rows of a batch in the form that `train_step` receives, such as `(x, y, sample_weight)`."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    return keras.ops.shape(next(leaf for leaf in keras.tree.flatten(x) if leaf is not None))[0]
