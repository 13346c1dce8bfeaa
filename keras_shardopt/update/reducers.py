"""Where the gradients of all replicas arrive: everywhere, in slices, or before the backward pass is over.

A reducer is handed the transport that takes them there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras import ops

from keras_shardopt.backends import for_backend
from keras_shardopt.backends.active import placement, runtime
from keras_shardopt.backends.communicator import Communicator, GradientState
from keras_shardopt.backends.traffic import note
from keras_shardopt.numerics import ALL_FINITE, Tensor, Variable, overwrites_variable
from keras_shardopt.update import exchange
from keras_shardopt.update.context import StageContext
from keras_shardopt.update.nonfinite import fail_among_all, first_not_finite, found_alone, moved_and_checked, num_flags
from keras_shardopt.update.options import CrossShardOptions
from keras_shardopt.update.reduction import Reduction, as_told
from keras_shardopt.update.row_weights import weighted_by_rows
from keras_shardopt.update.scattered import AlongAxes
from keras_shardopt.update.step import Step
from keras_shardopt.update.transport import Transfer, Transport, transport_of

# Where gradients can be reduced while the others are computed.
_overlap = for_backend({"torch": "keras_shardopt.backends.torch.overlap"})


class AllReduce:
    """Every replica gets the mean, or the sum, of all gradients (of its group).

    Args:
        context: the optimizer.
        options: its options.
        transport: takes gradients there.
    """

    def __init__(self, context: StageContext, options: CrossShardOptions, transport: Transport) -> None:
        self._context = context
        self._options = options
        self.transport = transport
        self._checks_finite = options.on_nonfinite != "ignore"
        self._decides_with_all = context.decides_with_all

    def watch(self, loss: Tensor, row_share: Any) -> None:
        """Nothing is sent before all gradients are there."""

    def reduced_early(self, step: Step, comm: Communicator) -> Step | None:
        """Nothing is."""
        return None

    @property
    def has_finished(self) -> bool:
        """Whether the backward pass that is over has left global gradients."""
        return False

    def members(self, comm: Communicator) -> Communicator:
        """The replicas that this one averages with; the groups are checked by then."""
        groups = self._options.group_assignment
        return comm if groups is None else comm.split(groups)

    def reduce(self, step: Step, comm: Communicator) -> Step:
        """Weighs them by the replica's rows, and sends them."""
        members = self.members(comm)
        if not step.is_local:
            return self.own_part(self._as_told(step, members))
        step = self._ready(weighted_by_rows(step))
        reduction = Reduction.of(step, self._context, members, self._options.reduction)
        transfer = self.transport.begin(members, reduction)
        rows = zip(reduction.places, step.axes or (), reduction.grads)
        axes = {place: axis for place, axis, grad in rows if axis is not None and grad is not None}
        transfer = AlongAxes(transfer, axes) if axes else transfer
        grads, found_inf = self._moved(reduction, transfer, members)
        step = transfer.left(step.replace(found_inf=found_inf), self._decides_with_all)
        return self._arrived(reduction.unpack(grads, found_inf, step))

    def own_part(self, step: Step) -> Step:
        """All of it."""
        return step

    def dividing_axes(self, variables: Sequence[Variable]) -> list[int | None]:
        """Those along which a layout divides state; none of gradients that are reduced already, or not divided so."""
        if not self._leaves_slices:
            return [None for _ in variables]
        axes = placement.dividing_axes(variables)
        return [None if overwrites_variable(v) else axis for v, axis in zip(variables, axes)]

    @property
    def _leaves_slices(self) -> bool:
        is_local = self._context.told not in (GradientState.GLOBAL, GradientState.SUMMED)
        return self._context.lays_out_state and is_local and self.transport.divides_along_axes

    def finish(self, comm: Communicator) -> None:
        """Sends zeros, and that there are no more gradients, as if it were one more update."""
        members, variables = self.members(comm), self._context.trainable
        # Next values travel by themselves, and only some of them, so that another replica may be somewhere else.
        if members.is_spmd or any(overwrites_variable(v) for v in variables):
            return
        flags = num_flags(len(variables), comm.num_replicas) if self._checks_finite and members.world is members else 0
        reduction = Reduction.of_nothing(variables, flags)
        self._move(reduction, self.transport.begin(members, reduction), members)

    def _as_told(self, step: Step, members: Communicator) -> Step:
        step = step.replace(grads=as_told(step, self._options.reduction, members.num_replicas))
        if not self._checks_finite:
            return step
        position = first_not_finite(step.grads, step.variables)
        return step.replace(found_inf=found_alone(position, step.found_inf, members.num_replicas))

    def _moved(self, reduction: Reduction, transfer: Transfer, members: Communicator) -> tuple[Any, Tensor | None]:
        def move(reduction: Reduction) -> exchange.Moved:
            return self._move(reduction, transfer, members)

        if self._checks_finite:
            return moved_and_checked(reduction, move, members)
        try:
            return move(reduction).grads, None
        except ValueError:
            if members.world is not members and self._decides_with_all and not members.is_spmd:
                fail_among_all(members.world)
            raise

    def _move(self, reduction: Reduction, transfer: Transfer, members: Communicator) -> exchange.Moved:
        moved = exchange.move(reduction, transfer, members)
        return moved._replace(in_slices=isinstance(transfer, AlongAxes))

    def _ready(self, step: Step) -> Step:
        return step

    def _arrived(self, step: Step) -> Step:
        return step


class ReduceScatter(AllReduce):
    """Every replica gets its slices of the global gradients, because it has state for these only.

    Args:
        context: the optimizer.
        options: its options.
        transport: takes gradients there.
        shards: who owns what, a `FlatShards`, `PaddedShards` or `PaddedLayout`.
    """

    def __init__(self, context: StageContext, options: CrossShardOptions, transport: Transport, shards: Any) -> None:
        super().__init__(context, options, transport)
        self._shards = shards

    def own_part(self, step: Step) -> Step:
        """This replica's slices."""
        return step.replace(grads=self._shards.slices_of(step.grads, step.variables))

    def dividing_axes(self, variables: Sequence[Variable]) -> list[int | None]:
        """As `AllReduce.dividing_axes`; padded gradients are divided by rows."""
        axes = super().dividing_axes(variables)
        return self._shards.axes_inside(variables, axes) if self._leaves_slices else axes

    def _move(self, reduction: Reduction, transfer: Transfer, members: Communicator) -> exchange.Moved:
        if not self._shards.reduces_in_slices:
            return super()._move(reduction, transfer, members)
        moved: exchange.Moved = self._shards.move(reduction, transfer, members)
        return moved

    def _ready(self, step: Step) -> Step:
        return self.own_part(step) if self._arrives_in_slices(step) else step

    def _arrived(self, step: Step) -> Step:
        return step if self._shards.reduces_in_slices or self._arrives_in_slices(step) else self.own_part(step)

    def _arrives_in_slices(self, step: Step) -> bool:
        """Whether a layout leaves slices of this step's gradients."""
        return step.axes is not None and self._leaves_slices and not self._shards.reduces_in_slices


class Overlapped:
    """On PyTorch sends gradients while the backward pass computes others; elsewhere as another reducer does.

    Args:
        at_the_end: the other one.
        context: the optimizer.
        options: its options.
        shards: of a `ReduceScatter`, who owns what.
    """

    def __init__(
        self, at_the_end: AllReduce, context: StageContext, options: CrossShardOptions, shards: Any = None
    ) -> None:
        self._context = context
        self._options = options
        self._at_the_end = at_the_end
        self._shards = shards
        self.transport = at_the_end.transport
        self.reduce, self.own_part, self.members = at_the_end.reduce, at_the_end.own_part, at_the_end.members
        self.dividing_axes = at_the_end.dividing_axes
        self.buckets: Any = None
        """What is sent together, where gradients are sent early."""
        self._among: Communicator | None = None

    def watch(self, loss: Tensor, row_share: Any) -> None:
        """Sends gradients while this loss is differentiated, if it is that of a step of Keras' trainer."""
        if self.buckets is None or not runtime.is_concrete(loss):
            return
        window = self._context.window
        if window is None:
            self.buckets.follow(loss, self._context.optimizer, bool(row_share))
        elif window.is_built and window.ends_next:
            self.buckets.follow(loss, self._context.optimizer, True, window.mean_with(bool(row_share)))

    def reduced_early(self, step: Step, comm: Communicator) -> Step | None:
        """With the gradients that the buckets have, or now get."""
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

    @property
    def has_finished(self) -> bool:
        """Whether the backward pass that is over has left global gradients."""
        return self.buckets is not None and bool(self.buckets.has_finished)

    def finish(self, comm: Communicator) -> None:
        """See `AllReduce.finish`; in buckets, where gradients are."""
        buckets = self.buckets_among(comm)
        if buckets is None:
            self._at_the_end.finish(comm)
        else:
            buckets.join_uneven_inputs()

    def buckets_among(self, comm: Communicator) -> Any:
        """The buckets of these replicas, made when they are first asked for; None where nothing is sent early."""
        if self._among is not comm:
            if self._context.started is not comm or not self._context.may_be_local:
                return None
            self.buckets, self._among = None, comm
            variables = self._context.trainable
            if _overlap is not None and not any(map(overwrites_variable, variables)):
                takes_mean, num_bytes = self._options.reduction == "mean", self._options.bucket_mib * 2**20
                slices = None if self._shards is None else self._shards.gradient_slices
                checks, transport = self._options.on_nonfinite != "ignore", self.transport

                def begin() -> Transfer:
                    return transport.begin(comm, Reduction.of_nothing(variables))

                made = None if transport.buckets is None else (transport.buckets, begin)
                arguments = (takes_mean, num_bytes, transport.narrow, checks, slices, made)
                self.buckets = _overlap.buckets_among(comm, variables, *arguments)
        return self.buckets


def reducer_of(
    context: StageContext, options: CrossShardOptions, transport: Transport | None = None, shards: Any = None
) -> AllReduce | Overlapped:
    """The reducer that the options of a `CrossShard` ask for; with `shards` each replica gets its slices."""
    if transport is None:
        transport = transport_of(options.compression, context)
        transport.check()
    if shards is None:
        at_the_end, can_overlap = AllReduce(context, options, transport), True
    else:
        at_the_end = ReduceScatter(context, options, transport, shards)
        can_overlap = shards.gradient_slices is not None and transport.early_in_slices
    if options.overlap == "auto" and options.is_plain and can_overlap:
        return Overlapped(at_the_end, context, options, shards)
    return at_the_end


def whole_reducer_of(reducer: Any) -> Any:
    """The reducer that takes the place of one, where each replica's gradients are looked at before they are sent."""
    return reducer._at_the_end if isinstance(reducer, Overlapped) else reducer
