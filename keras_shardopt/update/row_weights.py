"""Weighs a replica's gradients by its part of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras import ops

from keras_shardopt._typing import Gradients, Tensor, Variable
from keras_shardopt.numerics import (
    dtype_of,
    map_values,
    overwrites_variable,
)
from keras_shardopt.update.replica_transform import (
    is_one,
)


def weighted_gradients(grads: Gradients, variables: Sequence[Variable], weight: Any) -> Gradients:
    """Gradients times the weight with which their replica counts; zeros for a weight of 0, whatever they hold."""
    if is_one(weight):
        return grads
    return [
        grad if grad is None or overwrites_variable(variable) else map_values(lambda v: _weighted(v, weight), grad)
        for grad, variable in zip(grads, variables)
    ]


def _weighted(value: Tensor, weight: Any) -> Tensor:
    # Not times zero: a gradient of no rows, or of foreign weights, may hold anything, also NaN.
    if isinstance(weight, (int, float)):
        # Cast, or a scalar of half precision becomes a float32 on PyTorch, and on some replicas only.
        return ops.zeros_like(value) if weight == 0 else ops.multiply(value, ops.cast(weight, dtype_of(value)))
    product = ops.multiply(value, ops.cast(weight, dtype_of(value)))
    return ops.where(ops.equal(weight, 0), ops.zeros_like(value), product)
