"""The options `replica_transform` and `replica_clipnorm`: change each replica's gradients before the reduction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras import ops

from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.numerics import (
    Gradients,
    Tensor,
    Variable,
    clipped_to,
    dtype_of,
    global_norm,
    in_float32,
    is_sparse,
    map_values,
    overwrites_variable,
)
from keras_shardopt.update.context import StageContext
from keras_shardopt.update.options import CrossShardOptions
from keras_shardopt.update.step import Stage, Step
from keras_shardopt.update.units import times_unit, unit_of


class _ReplicaOption(Stage):
    r"""Base class of stages that apply one option to the gradients of each replica's mean loss.

    The gradient $g$ of the mean loss arrives as $u g$ (`unit_of`), and leaves in the same unit. Next values
    (`overwrite_with_gradient`) stay unchanged.
    """

    _option: str

    def __init__(self, value: Any, context: StageContext) -> None:
        self._value = value
        self._context = context

    @classmethod
    def from_options(cls, options: CrossShardOptions, context: StageContext) -> list[Stage]:
        value = getattr(options, cls._option)
        return [] if value is None else [cls(value, context)]

    def local(self, step: Step, comm: Communicator) -> Step:
        grads = list(step.grads)
        plain = [i for i, variable in enumerate(step.variables) if not overwrites_variable(variable)]
        owners = [step.variables[i] for i in plain]
        changed = self._changed([grads[i] for i in plain], owners, unit_of(step, comm, self._context))
        for i, grad in zip(plain, changed):
            grads[i] = grad
        return step.replace(grads=grads)

    def _changed(self, grads: Gradients, variables: Sequence[Variable], unit: Any) -> Gradients:
        raise NotImplementedError


class ReplicaTransform(_ReplicaOption):
    """Applies `replica_transform` to each replica's gradients."""

    _option = "replica_transform"

    def _changed(self, grads: Gradients, variables: Sequence[Variable], unit: Any) -> Gradients:
        """Pass half precision as float32. Return each result in the dtype of its argument.

        Raises:
            ValueError: if the transform returns a different number of gradients, or one with a different shape.
        """
        own = [None if g is None else map_values(lambda v: times_unit(in_float32(v), 1 / unit), g) for g in grads]
        returned = _checked(self._value(own, list(variables)), variables)
        dtypes = [dtype_of(v if g is None else g) for g, v in zip(grads, variables)]

        def in_units(grad: Tensor | None, dtype: str) -> Tensor | None:
            return None if grad is None else map_values(lambda value: ops.cast(times_unit(value, unit), dtype), grad)

        return list(map(in_units, returned, dtypes))


class ReplicaClip(_ReplicaOption):
    r"""Clips each replica's gradients by their global norm: $g$ becomes $g \min(1, c / \lVert g \rVert)$."""

    _option = "replica_clipnorm"

    def _changed(self, grads: Gradients, variables: Sequence[Variable], unit: Any) -> Gradients:
        # Scale the limit instead of the gradients, so gradients within the limit stay bitwise unchanged.
        return clipped_to(grads, self._value * unit, global_norm(grads))


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
