"""Weights for a replica's gradients: 0 if the replica has no rows of the batch, otherwise `Step.weight`."""

from __future__ import annotations

from typing import Any

from keras import ops

from keras_shardopt.numerics import Gradients, Tensor, Variable, dtype_of, map_values, overwrites_variable
from keras_shardopt.update.step import Step
from keras_shardopt.update.units import is_one


def zero_without_rows(step: Step) -> Step:
    """Multiply the gradients by `Step.weight`. If this replica has no rows, gradients become 0 and count as finite.

    Gradients are not weighted by rows, because losses have already divided by the number of rows of all replicas.
    """
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
        # Select zeros if the weight is 0, because gradients can be NaN then, and NaN times 0 is NaN.
        if isinstance(weight, (int, float)):
            # Cast the weight. Otherwise, on PyTorch, the product with a scalar half-precision gradient is in float32.
            return ops.zeros_like(value) if weight == 0 else ops.multiply(value, ops.cast(weight, dtype_of(value)))
        product = ops.multiply(value, ops.cast(weight, dtype_of(value)))
        return ops.where(ops.equal(weight, 0), ops.zeros_like(value), product)

    return map_values(times, grad)
