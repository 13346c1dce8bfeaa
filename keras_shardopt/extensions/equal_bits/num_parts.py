"""Finds the number of parts of a batch for `VirtualReplicas`. Checks that a model can train on one after another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from keras_shardopt.backends.models import optimizers_in_step
from keras_shardopt.extensions.equal_bits.settings import VirtualReplicas
from keras_shardopt.fit.batch_normalization import synchronized_statistics
from keras_shardopt.fit.calls import cross_shards_in_step
from keras_shardopt.fit.stateful import stateful_layers


def has_virtual_replicas(cross_shards: Iterable[Any]) -> bool:
    """Whether one of the optimizers `cross_shards` has the extension `VirtualReplicas`."""
    return any(map(_nums_parts, cross_shards))


def _nums_parts(cross_shard: Any) -> list[int]:
    return [each.number for each in cross_shard.extensions if isinstance(each, VirtualReplicas)]


def num_parts_of(model: Any) -> int:
    """Return the number of parts per batch, for a model whose optimizer has `VirtualReplicas`.

    Raises:
        ValueError: if the model has several optimizers, or layers that `VirtualReplicas` does not support.
    """
    cross_shards = cross_shards_in_step(model)
    nums_parts = [number for cross_shard in cross_shards for number in _nums_parts(cross_shard)]
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
    return nums_parts[0]
