"""Reductions of which each replica gets its slice along a dimension, where state is laid out so.

Hides that a `Communicator` reduces flat tensors only in slices.
"""

from __future__ import annotations

from collections.abc import Sequence

from keras import ops

from keras_shardopt.backends.communicator import Communicator, GradientState
from keras_shardopt.numerics import Gradients, ReduceOp, Tensor, Variable, overwrites_variable
from keras_shardopt.update.step import Step


def scattered(replicas: Communicator, step: Step) -> Communicator:
    """The replicas, of which each gets slices of the gradients along `step.axes`, if there are any."""
    assert step.axes is not None
    # Those that come first in the reduction.
    sent = [i for i, v in enumerate(step.variables) if step.grads[i] is not None and not overwrites_variable(v)]
    axes = [step.axes[i] for i in sent]
    return replicas if all(axis is None for axis in axes) else Scattered(replicas, axes)


class Scattered(Communicator):
    """The same replicas, of which each gets its slices of the gradients, and all of everything else.

    Args:
        replicas: the replicas.
        axes: for each gradient along which dimension it is divided; None for one that all get. The gradients come
            first in the first reduction.
    """

    def __init__(self, replicas: Communicator, axes: Sequence[int | None]) -> None:
        self._replicas = replicas
        self._axes: Sequence[int | None] = axes
        self.num_replicas = replicas.num_replicas
        self.replica_id = replicas.replica_id
        self.is_spmd = replicas.is_spmd
        self.is_multi_process = replicas.is_multi_process

    def gradient_state(self, grads: Gradients, variables: Sequence[Variable]) -> GradientState:
        """See `Communicator.gradient_state`."""
        return self._replicas.gradient_state(grads, variables)

    def all_gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See `Communicator.all_gather`."""
        return self._replicas.all_gather(tensors)

    def all_reduce(self, tensors: Sequence[Tensor], op: ReduceOp) -> list[Tensor]:
        """The first one, of gradients, leaves slices of them."""
        if op == "max":
            return self._replicas.all_reduce(tensors, op)
        axes, self._axes = self._axes, ()
        results: dict[int, Tensor] = {}
        divided = {i: axis for i, axis in enumerate(axes) if axis is not None}
        moved = [ops.moveaxis(tensors[i], axis, 0) for i, axis in divided.items()]
        for (i, axis), own in zip(divided.items(), self._replicas.reduce_scatter(moved, op)):
            results[i] = ops.moveaxis(own, 0, axis)
        whole = [i for i in range(len(tensors)) if i not in results]
        results |= zip(whole, self._replicas.all_reduce([tensors[i] for i in whole], op))
        return [results[i] for i in range(len(tensors))]

    def first_of_all(self, position: Tensor) -> Tensor:
        """The first position, counted from 1, that any replica has found in its slices; 0 if none has."""
        last, none = ops.full_like(position, 2**31 - 1), ops.zeros_like(position)
        (first,) = self._replicas.all_reduce([ops.where(position > 0, last - position, none)], "max")
        return ops.where(first > 0, last - first, none)
