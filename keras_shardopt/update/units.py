"""Units of gradients: the factor between gradients as they arrive and those of a replica's mean loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras import ops

from keras_shardopt.backends.communicator import Communicator, GradientState
from keras_shardopt.numerics import (
    Gradients,
    Tensor,
    Variable,
    dtype_of,
    in_float32,
    like_variable,
    map_values,
    overwrites_variable,
)
from keras_shardopt.update.context import StageContext
from keras_shardopt.update.step import Step


def unit_of(step: Step, comm: Communicator, context: StageContext) -> Any:
    """Return the factor between this replica's gradients in `step` and those of its mean loss.

    It is the loss scale, times the replica's share of the rows, divided by the number of replicas for prescaled
    gradients.
    """
    share = step.row_share
    # Without rows, use 1 to avoid a division by 0, because the reduction discards this replica's gradients anyway.
    rows = share or 1.0 if isinstance(share, float) else ops.where(share > 0, share, 1.0)
    unit = rows * (context.loss_scale if step.loss_scale is None else step.loss_scale)
    return unit / comm.num_replicas if step.gradient_state is GradientState.LOCAL_PRESCALED else unit


def times_unit(value: Tensor, unit: Any) -> Tensor:
    """Return a tensor times a unit, in the dtype of the tensor. A unit of 1 returns the same object."""
    return value if is_one(unit) else ops.multiply(value, ops.cast(unit, dtype_of(value)))


def unscaled_gradients(grads: Gradients, variables: Sequence[Variable], unit: Any) -> list[Tensor | None]:
    """Divide gradients by `unit`, such as a loss scale. Half precision becomes float32, unless `unit` is 1."""
    if is_one(unit):
        return list(grads)
    return [
        grad if grad is None or overwrites_variable(variable) else map_values(lambda v: _unscaled(v, unit), grad)
        for grad, variable in zip(grads, variables)
    ]


def scaled_gradients(grads: Gradients, variables: Sequence[Variable], unit: Any) -> list[Tensor | None]:
    """Multiply gradients by `unit`, in the dtype of each variable. Reverse of `unscaled_gradients`."""
    if is_one(unit):
        return list(grads)
    return [
        grad
        if grad is None or overwrites_variable(variable)
        else like_variable(map_values(lambda v: times_unit(in_float32(v), unit), grad), variable)
        for grad, variable in zip(grads, variables)
    ]


def _unscaled(value: Tensor, unit: Any) -> Tensor:
    value = in_float32(value)
    return ops.divide(value, ops.cast(unit, dtype_of(value)))


def is_one(factor: Any) -> bool:
    """Whether a factor is a Python number equal to 1."""
    return isinstance(factor, (int, float)) and factor == 1
