"""Weights a replica's gradients by its rows, or the sum of their sample weights."""

from __future__ import annotations

from typing import Any

from keras import ops

from keras_shardopt.numerics import Gradients, Tensor, Variable, dtype_of, map_values, overwrites_variable
from keras_shardopt.update.replica_transform import is_one
from keras_shardopt.update.step import Step


def weighted_by_rows(step: Step) -> Step:
    """The step with its gradients times its weight, zeros where it has no rows; then nothing in them is bad either."""
    weight = step.weight
    if not isinstance(step.row_share, float):
        weight = ops.where(step.row_share > 0, weight, 0.0)
    elif not step.row_share:
        weight = 0.0
    found = step.found_inf
    if found is not None:
        found = ops.where(ops.equal(weight, 0), ops.zeros_like(found), found)
    grads: Gradients = step.grads
    if not is_one(weight):
        grads = [_weighted(grad, variable, weight) for grad, variable in zip(grads, step.variables)]
    return step.replace(grads=grads, weight=weight, found_inf=found)


def _weighted(grad: Any, variable: Variable, weight: Any) -> Any:
    if grad is None or overwrites_variable(variable):
        return grad

    def times(value: Tensor) -> Tensor:
        # Not times zero: a gradient of no rows, or of foreign weights, may hold anything, also NaN.
        if isinstance(weight, (int, float)):
            # Cast, or a scalar of half precision becomes a float32 on PyTorch, and on some replicas only.
            return ops.zeros_like(value) if weight == 0 else ops.multiply(value, ops.cast(weight, dtype_of(value)))
        product = ops.multiply(value, ops.cast(weight, dtype_of(value)))
        return ops.where(ops.equal(weight, 0), ops.zeros_like(value), product)

    return map_values(times, grad)
