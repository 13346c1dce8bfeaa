"""The reducer that gives every replica its slices of the reduced gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.numerics import Gradients, Tensor, Variable
from keras_shardopt.update import exchange
from keras_shardopt.update.all_reduce import AllReduce
from keras_shardopt.update.context import StageContext
from keras_shardopt.update.options import CrossShardOptions
from keras_shardopt.update.reduction import Reduction
from keras_shardopt.update.step import Step
from keras_shardopt.update.transport import Transfer, Transport


class GradientSlicer(Protocol):
    """The members of `Shards` (an optimizer's divided state, `sharding/shards.py`) that a reducer uses, as a type."""

    reduces_in_slices: bool
    gradient_slices: Any
    axes_inside: Callable[[Sequence[Variable], Sequence[int | None]], list[int | None]]
    move: Callable[[Reduction, Transfer, Communicator], exchange.Moved]

    def slices_of(self, grads: Gradients, variables: Sequence[Variable]) -> list[Tensor | None]:
        """Return this replica's slices of gradients that are reduced over replicas."""


class ReduceScatter(AllReduce):
    """Gives every replica its slices of the reduced gradients, because it holds only the state of these slices."""

    def __init__(
        self, context: StageContext, options: CrossShardOptions, transport: Transport, shards: GradientSlicer
    ) -> None:
        super().__init__(context, options, transport)
        self._shards = shards

    def own_part(self, step: Step) -> Step:
        return step.replace(grads=self._shards.slices_of(step.grads, step.variables))

    def dividing_axes(self, variables: Sequence[Variable]) -> list[int | None]:
        """Return the dimension along which each gradient is divided, or 0 for state in padded arrays."""
        axes = super().dividing_axes(variables)
        return self._shards.axes_inside(variables, axes) if self._leaves_slices else axes

    def _move(self, reduction: Reduction, transfer: Transfer, members: Communicator) -> exchange.Moved:
        if not self._shards.reduces_in_slices:
            return super()._move(reduction, transfer, members)
        return self._shards.move(reduction, transfer, members)

    def _ready(self, step: Step) -> Step:
        return self.own_part(step) if self._arrives_in_slices(step) else step

    def _arrived(self, step: Step) -> Step:
        return step if self._shards.reduces_in_slices or self._arrives_in_slices(step) else self.own_part(step)

    def _arrives_in_slices(self, step: Step) -> bool:
        """Whether each replica receives its slice of each gradient along `Step.axes`, not the whole gradient."""
        return step.axes is not None and self._leaves_slices and not self._shards.reduces_in_slices
