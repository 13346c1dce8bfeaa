"""The number of parts per batch for `VirtualReplicas`, and checks that the model supports it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from keras_shardopt.backends.models import optimizers_in_step
from keras_shardopt.extensions.equal_bits.settings import VirtualReplicas
from keras_shardopt.fit.batch_normalization import synchronized_statistics
from keras_shardopt.fit.calls import reducers_in
from keras_shardopt.fit.stateful import stateful_layers


def are_cut(reducers: Iterable[Any]) -> bool:
    """Whether one of these optimizers cuts batches into parts."""
    return any(map(_numbers_of, reducers))


def _numbers_of(reducer: Any) -> list[int]:
    return [each.number for each in reducer.extensions if isinstance(each, VirtualReplicas)]


def num_parts_of(model: Any) -> int:
    """Return the number of parts of a prepared model's batches. One of its `CrossShard`s must have `VirtualReplicas`.

    Raises:
        ValueError: if the parts of a batch cannot be computed one after another.
    """
    reducers = reducers_in(model)
    numbers = [number for reducer in reducers for number in _numbers_of(reducer)]
    if len(optimizers_in_step(model)) > 1 or len(reducers) > 1:
        raise ValueError(
            "`VirtualReplicas` needs a model with one optimizer: each updates after the last part of a batch, so that "
            "the parts of one rank would see another's updates late. "
            f"Received: {len(optimizers_in_step(model))} optimizers. Leave `VirtualReplicas` out."
        )
    if synchronized_statistics(model):
        raise ValueError(
            "`VirtualReplicas` works on the parts of a batch one after another, and a synchronized "
            "`BatchNormalization` needs them all together. Received: both. Leave `synchronized=True` out, or "
            "`VirtualReplicas`."
        )
    stateful = stateful_layers(model)
    if stateful:
        raise ValueError(
            "With `VirtualReplicas` each part of a batch starts from the same state, and a stateful layer has a state "
            f"for each row. Received: layer {stateful[0].name!r} with `stateful=True`. Leave `VirtualReplicas` out."
        )
    return numbers[0]
