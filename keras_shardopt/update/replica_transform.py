"""The options `replica_transform` and `replica_clipnorm`: change each replica's gradients before the reduction."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from keras import ops

from keras_shardopt.backends.communicator import Communicator, GradientState
from keras_shardopt.numerics import (
    Gradients,
    Tensor,
    Variable,
    clipped_to,
    dtype_of,
    global_norm,
    in_float32,
    is_sparse,
    like_variable,
    map_values,
    overwrites_variable,
)
from keras_shardopt.update.context import StageContext
from keras_shardopt.update.options import CrossShardOptions, LocalTransform
from keras_shardopt.update.step import Stage, Step


class _ReplicaOption(Stage):
    """Base class of stages that apply one option to the gradients of each replica's mean loss."""

    _option: str

    def __init__(self, value: Any, context: StageContext) -> None:
        self._value = value
        self._context = context

    @classmethod
    def from_options(cls, options: CrossShardOptions, context: StageContext) -> list[Stage]:
        value = getattr(options, cls._option)
        return [] if value is None else [cls(value, context)]

    def local(self, step: Step, comm: Communicator) -> Step:
        # Without rows, use 1 to avoid a division by 0, because the reduction discards this replica's gradients anyway.
        rows = 1.0 if isinstance(step.row_share, float) and not step.row_share else step.row_share
        unit = (self._context.loss_scale if step.loss_scale is None else step.loss_scale) * rows
        assert step.gradient_state is not None
        arguments = (step.grads, step.variables, comm.num_replicas, step.gradient_state, unit)
        how = {"replica_clipnorm": None, "replica_transform": None, self._option: self._value}
        return step.replace(grads=transformed_gradients(*arguments, *how.values()))


class ReplicaTransform(_ReplicaOption):
    """Applies `replica_transform` to each replica's gradients."""

    _option = "replica_transform"


class ReplicaClip(_ReplicaOption):
    """Clips each replica's gradients by their global norm."""

    _option = "replica_clipnorm"


def transformed_gradients(
    grads: Gradients,
    variables: Sequence[Variable],
    num_replicas: int,
    gradient_state: GradientState,
    loss_scale: Any = 1.0,
    clipnorm: float | None = None,
    transform: LocalTransform | None = None,
) -> list[Tensor | None]:
    r"""Return this replica's gradients, changed by `transform` and then clipped by their global norm.

    Let $g_r$ be the gradient of the replica's mean loss. It arrives as $u g_r$: $u$ is the loss scale $s$, or $s / N$
    for prescaled gradients. `transform` receives $g_r$ (half precision as float32). Clipping changes $g_r$ to
    $g_r \min(1, c / \lVert g_r \rVert)$. The result is multiplied by $u$ again, in the dtype of the argument.

    Args:
        grads: this replica's local or prescaled gradients, one tensor or None per variable.
        variables: the variables of `grads`. Next values (`overwrite_with_gradient`) stay unchanged.
        num_replicas: int. The divisor $N$ of prescaled gradients.
        gradient_state: how the gradients arrive: local, or prescaled (divided by $N$).
        loss_scale: number or scalar tensor, 1.0 by default. The factor $s$ of the loss.
        clipnorm: float or None. The largest global norm $c$.
        transform: `(grads, variables) -> grads`, or None.

    Raises:
        ValueError: if `transform` returns a different number of gradients, or one with a different shape.
    """
    result = list(grads)
    plain = [i for i, variable in enumerate(variables) if not overwrites_variable(variable)]
    # Keep Python numbers, because a Python factor of 1 is free and bitwise exact.
    unit = (
        loss_scale / num_replicas
        if gradient_state is GradientState.LOCAL_PRESCALED and num_replicas > 1
        else loss_scale
    )
    if transform is not None:
        arrived = [grads[i] for i in plain]
        own = [None if g is None else map_values(lambda v: _in_units(in_float32(v), 1 / unit), g) for g in arrived]
        owners = [variables[i] for i in plain]
        for i, grad in zip(plain, _checked(transform(own, owners), owners)):
            dtype = dtype_of(variables[i] if grads[i] is None else grads[i])
            result[i] = None if grad is None else map_values(functools.partial(_arriving, unit=unit, dtype=dtype), grad)
    if clipnorm is not None:
        # Scale the limit instead of the gradients, so gradients within the limit stay bitwise unchanged.
        own = [result[i] for i in plain]
        for i, grad in zip(plain, clipped_to(own, clipnorm * unit, global_norm(own))):
            result[i] = grad
    return result


def _arriving(value: Tensor, unit: Any, dtype: str) -> Tensor:
    return ops.cast(_in_units(value, unit), dtype)


def _in_units(value: Tensor, unit: Any) -> Tensor:
    if is_one(unit):
        return value
    return ops.multiply(value, ops.cast(unit, dtype_of(value)))


def _checked(returned: Any, variables: Sequence[Variable]) -> list[Tensor | None]:
    """Return the result of a transform as a list. Raise ValueError if the result does not fit `variables`."""
    rule = "`replica_transform` must return a list with one gradient, or None, for each gradient that it receives."
    if not isinstance(returned, (list, tuple)):
        raise ValueError(f"{rule} Received: {returned!r} (of type {type(returned).__name__})")
    if len(returned) != len(variables):
        raise ValueError(f"{rule} Received: {len(returned)} gradients for {len(variables)} variables")
    grads = [g if g is None or is_sparse(g) else ops.convert_to_tensor(g) for g in returned]
    for grad, variable in zip(grads, variables):
        if grad is not None and not is_sparse(grad) and tuple(grad.shape) != tuple(variable.shape):
            raise ValueError(
                "`replica_transform` must return gradients with the shapes of their variables. Received: shape "
                f"{tuple(grad.shape)} for `{getattr(variable, 'path', variable)}` of shape {tuple(variable.shape)}"
            )
    return grads


def unscaled_gradients(grads: Gradients, variables: Sequence[Variable], loss_scale: Any) -> list[Tensor | None]:
    """Divide gradients by the loss scale. Half precision becomes float32, unless the scale is 1."""
    if is_one(loss_scale):
        return list(grads)
    return [
        grad if grad is None or overwrites_variable(variable) else map_values(lambda v: _unscaled(v, loss_scale), grad)
        for grad, variable in zip(grads, variables)
    ]


def scaled_gradients(grads: Gradients, variables: Sequence[Variable], loss_scale: Any) -> list[Tensor | None]:
    """Multiply gradients by the loss scale, in the dtype of each variable. Reverse of `unscaled_gradients`."""
    if is_one(loss_scale):
        return list(grads)
    return [
        grad
        if grad is None or overwrites_variable(variable)
        else like_variable(map_values(lambda v: _in_units(in_float32(v), loss_scale), grad), variable)
        for grad, variable in zip(grads, variables)
    ]


def _unscaled(value: Tensor, loss_scale: Any) -> Tensor:
    value = in_float32(value)
    return ops.divide(value, ops.cast(loss_scale, dtype_of(value)))


def is_one(factor: Any) -> bool:
    """Whether a factor is a Python number equal to 1."""
    return isinstance(factor, (int, float)) and factor == 1
