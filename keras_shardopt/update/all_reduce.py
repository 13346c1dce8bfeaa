"""The reducers that send gradients after the backward pass: all-reduce, and reduce-scatter for divided state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from keras_shardopt.backends.active import placement
from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.numerics import Gradients, Tensor, Variable, overwrites_variable
from keras_shardopt.update import exchange
from keras_shardopt.update.context import StageContext
from keras_shardopt.update.nonfinite import (
    first_not_finite,
    found_inf_without_flags,
    move_and_check,
    move_unchecked,
    num_flags,
)
from keras_shardopt.update.options import CrossShardOptions
from keras_shardopt.update.reduction import Reduction, rescale_reduced
from keras_shardopt.update.row_weights import zero_without_rows
from keras_shardopt.update.scattered import AlongAxes
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


class AllReduce:
    """Gives every replica the mean or the sum of the gradients of all replicas, or of its group.

    Its methods are the interface of all reducers.
    """

    transport: Transport
    """Encodes and sends gradients between replicas."""

    buckets: Any = None
    """The groups of gradients that are sent during the backward pass; None if all are sent at the end."""

    def __init__(self, context: StageContext, options: CrossShardOptions, transport: Transport) -> None:
        self._context = context
        self._options = options
        self.transport = transport
        self._checks_finite = options.on_nonfinite != "ignore"
        self._decides_with_all = context.decides_with_all

    def watch(self, loss: Tensor, row_share: Any) -> None:
        """Prepare to send gradients during the backward pass of `loss`. `row_share` is 0 if the replica has no rows."""

    def reduced_early(self, step: Step, comm: Communicator) -> Step | None:
        """Return the step with gradients reduced in buckets (groups), skipping `Stage.local`; None without buckets."""
        return None

    @property
    def has_finished(self) -> bool:
        """Whether the last backward pass has already reduced the gradients of this step."""
        return False

    def predicted_bytes(self) -> tuple[int, int | None]:
        """Predict the bytes of this replica's gradient slices, and the bytes for sending (None if unknown)."""
        return 0, 0

    def members(self, comm: Communicator) -> Communicator:
        """Return the communicator of the replicas that reduce gradients together: `comm`, or this replica's group."""
        groups = self._options.group_assignment
        return comm if groups is None else comm.split(groups)

    def reduce(self, step: Step, comm: Communicator) -> Step:
        """Return the step with gradients reduced over replicas: whole, or this replica's slices."""
        members = self.members(comm)
        if not step.is_local:
            return self.own_part(self._without_collective(step, members))
        step = self._ready(zero_without_rows(step))
        reduction = Reduction.of(step, self._context, members, self._options.reduction)
        transfer = self.transport.begin(members, reduction)
        rows = zip(reduction.places, step.axes or (), reduction.grads)
        axes = {place: axis for place, axis, grad in rows if axis is not None and grad is not None}
        transfer = AlongAxes(transfer.comm, axes) if axes else transfer
        move = functools.partial(self._move, transfer=transfer, members=members)
        if self._checks_finite:
            grads, found_inf = move_and_check(reduction, move, members)
        else:
            grads, found_inf = move_unchecked(reduction, move, members, self._decides_with_all), None
        step = step.replace(grads=reduction.unpack(grads, step.variables), found_inf=found_inf)
        return self._arrived(transfer.left(step, self._decides_with_all))

    def own_part(self, step: Step) -> Step:
        """Return a reduced step with only this replica's slices of gradients; the same step if state is not divided."""
        return step

    def dividing_axes(self, variables: Sequence[Variable]) -> list[int | None]:
        """Return, for each gradient, the dimension along which `reduce` divides it among replicas, or None."""
        if not self._leaves_slices:
            return [None for _ in variables]
        axes = placement.dividing_axes(variables)
        return [None if overwrites_variable(v) else axis for v, axis in zip(variables, axes)]

    @property
    def _leaves_slices(self) -> bool:
        declared = self._context.state_finder.declared_state
        is_reduced = declared is not None and not declared.is_local
        return self._context.lays_out_state and not is_reduced and self.transport.divides_along_axes

    def finish(self, comm: Communicator) -> None:
        """Send zeros and the flag that this replica has ended training, so other replicas do not wait."""
        members, variables = self.members(comm), self._context.trainable
        # Send nothing if one program runs all replicas, or if float8 variables would need a second collective.
        if members.is_spmd or any(overwrites_variable(v) for v in variables):
            return
        flags = num_flags(len(variables), comm.num_replicas) if self._checks_finite and members.world is members else 0
        reduction = Reduction.of_nothing(variables, flags)
        self._move(reduction, self.transport.begin(members, reduction), members)

    def _without_collective(self, step: Step, members: Communicator) -> Step:
        step = step.replace(grads=rescale_reduced(step, self._options.reduction, members.num_replicas))
        if not self._checks_finite:
            return step
        position = first_not_finite(step.grads, step.variables, self._context.positions(step.variables))
        return step.replace(found_inf=found_inf_without_flags(position, step.found_inf, members.num_replicas))

    def _move(self, reduction: Reduction, transfer: Transfer, members: Communicator) -> exchange.Moved:
        moved = exchange.move(reduction, transfer, members)
        return moved._replace(in_slices=isinstance(transfer, AlongAxes))

    def _ready(self, step: Step) -> Step:
        return step

    def _arrived(self, step: Step) -> Step:
        return step


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
