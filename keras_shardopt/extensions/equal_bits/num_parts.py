"""Finds the number of parts of a batch for `VirtualReplicas`. Checks that a model can train on one after another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from keras_shardopt.backends.models import optimizers_in_step
from keras_shardopt.extensions.equal_bits.stage import SumOfParts
from keras_shardopt.fit.batch_normalization import synchronized_statistics
from keras_shardopt.fit.calls import cross_shards_in_step
from keras_shardopt.fit.stateful import stateful_layers


def has_virtual_replicas(cross_shards: Iterable[Any]) -> bool:
    """Whether one of the optimizers `cross_shards` has the extension `VirtualReplicas`."""
    return bool(SumOfParts.found_in(cross_shards))


def num_parts_of(model: Any) -> int:
    """Return the number of parts per batch, for a model whose optimizer has `VirtualReplicas`.

    Raises:
        ValueError: if the model has several optimizers, or layers that `VirtualReplicas` does not support.
    """
    cross_shards = cross_shards_in_step(model)
    if len(optimizers_in_step(model)) > 1 or len(cross_shards) > 1:
        raise ValueError(
            "`VirtualReplicas` supports one optimizer per model. With several optimizers, the parts of a batch would "
            f"depend on each other's updates. Received: {len(optimizers_in_step(model))} optimizers. Remove "
            "`VirtualReplicas`."
        )
    if synchronized_statistics(model):
        raise ValueError(
            "`VirtualReplicas` computes the parts of a batch one after another, but a synchronized "
            "`BatchNormalization` needs all parts at once. Received: both features. Remove `synchronized=True` or "
            "`VirtualReplicas`."
        )
    stateful = stateful_layers(model)
    if stateful:
        raise ValueError(
            "With `VirtualReplicas` each part of a batch starts from the same state, but a stateful layer has a state "
            f"per row. Received: layer {stateful[0].name!r} with `stateful=True`. Remove `VirtualReplicas`."
        )
    return SumOfParts.found_in(cross_shards)[0].num_parts
