"""The reducers: all-reduce, reduce-scatter, and a version of each that overlaps with the backward pass.

A reducer decides when gradients are sent, and which replica receives the sums. Its transport decides how gradients are
encoded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from keras import ops

from keras_shardopt.backends import for_backend
from keras_shardopt.backends.active import placement, runtime
from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.backends.traffic import note
from keras_shardopt.numerics import ALL_FINITE, Gradients, Tensor, Variable, overwrites_variable
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
from keras_shardopt.update.step import Stage, Step
from keras_shardopt.update.transport import Transfer, Transport, transport_of

# PyTorch only: reduces gradients during the backward pass.
_overlap: Any = for_backend({"torch": "keras_shardopt.backends.torch.overlap"})

# PyTorch only: predicts the memory of the buckets in which gradients are sent.
_bytes: Any = for_backend({"torch": "keras_shardopt.backends.torch.bucket_bytes"})


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


class Overlapped:
    """Sends gradients during the backward pass on PyTorch. If that is impossible, `at_the_end` sends them later."""

    def __init__(
        self,
        at_the_end: AllReduce,
        context: StageContext,
        options: CrossShardOptions,
        shards: GradientSlicer | None,
    ) -> None:
        self._context = context
        self._options = options
        self._at_the_end = at_the_end
        self._shards = shards
        self.transport = at_the_end.transport
        self.reduce, self.own_part, self.members = at_the_end.reduce, at_the_end.own_part, at_the_end.members
        self.dividing_axes = at_the_end.dividing_axes
        self.buckets: Any = None
        """The buckets: groups of gradients that are sent together. None if gradients are not sent early."""
        self._among: Communicator | None = None

    def watch(self, loss: Tensor, row_share: Any) -> None:
        """Prepare to send gradients during the backward pass of this loss, if Keras' trainer runs the step."""
        if self.buckets is None or not runtime.is_concrete(loss):
            return
        optimizer, counts = self._context.optimizer, bool(row_share)
        if optimizer.accumulation is None:
            self.buckets.follow(loss, optimizer, counts)
        elif (mean := optimizer.accumulation.sums.mean_with_last(counts)) is not None:
            self.buckets.follow(loss, optimizer, True, mean)

    def reduced_early(self, step: Step, comm: Communicator) -> Step | None:
        buckets = self.buckets_among(comm)
        if buckets is None:
            return None
        grads = buckets.reduce(step.grads, step.variables, bool(step.row_share), step.weight)
        for kind, tensors in buckets.sent:
            note(kind, tensors, comm.num_replicas)
        found_inf = buckets.found_inf
        if found_inf not in (None, ALL_FINITE):
            found_inf = ops.convert_to_tensor(found_inf, "int32")
        step = step.replace(grads=grads, found_inf=found_inf)
        if buckets.transfer is not None:
            step = buckets.transfer.left(step, all_decide=False)
        buckets.release()
        return step

    def predicted_bytes(self) -> tuple[int, int | None]:
        if self._among is not None and self.buckets is None:
            return 0, 0
        num_ranks = self._context.communicator().num_replicas
        if num_ranks == 1 or self.transport.buckets is not None:
            return 0, 0 if num_ranks == 1 else None
        slices = None if self._shards is None else self._shards.gradient_slices
        predicted: tuple[int, int] = _bytes.predicted(num_ranks, self._context.trainable, self.transport.narrow, slices)
        return predicted

    @property
    def has_finished(self) -> bool:
        return self.buckets is not None and bool(self.buckets.has_finished)

    def finish(self, comm: Communicator) -> None:
        """Send zeros as gradients, because this rank has ended training. Send them in buckets if other ranks do."""
        buckets = self.buckets_among(comm)
        if buckets is None:
            self._at_the_end.finish(comm)
        else:
            buckets.join_uneven_inputs()

    def buckets_among(self, comm: Communicator) -> Any:
        """Return the buckets in which the replicas of `comm` send gradients early; None if they send all at the end."""
        if self._among is not comm:
            if self._context.started is not comm or not self._context.state_finder.may_be_local:
                return None
            self.buckets, self._among = None, comm
            variables = self._context.trainable
            if not any(map(overwrites_variable, variables)):
                takes_mean, num_bytes = self._options.reduction == "mean", self._options.speed.bucket_mib * 2**20
                slices = None if self._shards is None else self._shards.gradient_slices
                checks, transport = self._options.on_nonfinite != "ignore", self.transport

                def begin() -> Transfer:
                    return transport.begin(comm, Reduction.of_nothing(variables))

                made = (transport.buckets, None if transport.buckets is None else begin)
                arguments = (takes_mean, num_bytes, transport.narrow, checks, slices, made)
                self.buckets = _overlap.buckets_among(comm, variables, *arguments)
        return self.buckets


Reducer = AllReduce | Overlapped


def reducer_of(
    context: StageContext,
    options: CrossShardOptions,
    stages: Sequence[Stage],
    transport: Transport | None = None,
    shards: GradientSlicer | None = None,
) -> Reducer:
    """Return the object that reduces gradients, as the options require. With `shards`, each replica gets its slices."""
    if transport is None:
        transport = transport_of(options.compression, context)
        transport.check()
    if shards is None:
        at_the_end, can_overlap = AllReduce(context, options, transport), True
    else:
        at_the_end = ReduceScatter(context, options, transport, shards)
        can_overlap = shards.gradient_slices is not None and transport.early_in_slices
    allows_overlap = options.group_assignment is None and all(stage._allows_overlap for stage in stages)
    if _overlap is not None and options.speed.overlap == "auto" and allows_overlap and can_overlap:
        return Overlapped(at_the_end, context, options, shards)
    return at_the_end


def whole_reducer_of(reducer: Reducer) -> AllReduce:
    """Return the reducer that sends after the backward pass: `reducer`, or the one inside an `Overlapped`."""
    return reducer._at_the_end if isinstance(reducer, Overlapped) else reducer
