"""How each replica's own gradients become global: three ways, of which an optimizer has one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras import ops

from keras_shardopt.backends import for_backend
from keras_shardopt.backends.active import placement, runtime
from keras_shardopt.backends.communicator import Communicator, GradientState
from keras_shardopt.backends.compression import Compressed
from keras_shardopt.backends.traffic import note
from keras_shardopt.numerics import ALL_FINITE, UNKNOWN, Tensor, Variable, overwrites_variable
from keras_shardopt.update.all_reduce import global_gradients, join_uneven_inputs
from keras_shardopt.update.coding import Coded
from keras_shardopt.update.nonfinite import all_reduce_and_check, fail_among_all, num_flags
from keras_shardopt.update.options import CrossShardOptions
from keras_shardopt.update.row_weights import weighted_by_rows
from keras_shardopt.update.scattered import scattered
from keras_shardopt.update.step import Step
from keras_shardopt.wrapping.chain import descendants

# Where gradients can be reduced while the others are computed.
_overlap = for_backend({"torch": "keras_shardopt.backends.torch.overlap"})


class AllReduce:
    """Every replica gets the mean, or the sum, of all gradients (of its group).

    Args:
        optimizer: the `CrossShard`.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._options: CrossShardOptions = optimizer._options
        self._half = None if self._options.codec is None else self._options.codec.sum_dtype
        self._checks_finite = self._options.on_nonfinite != "ignore"
        # Whether a loss scaling inside decides together with the replicas of all groups.
        self._decides_with_all = any(getattr(part, "_skips_overflows", False) for part in descendants(optimizer))

    def watch(self, loss: Tensor, row_share: Any) -> None:
        """Nothing is sent before all gradients are there."""

    def reduced_early(self, step: Step, comm: Communicator) -> Step | None:
        """Nothing is."""
        return None

    @property
    def has_finished(self) -> bool:
        """Whether the backward pass that is over has left global gradients."""
        return False

    def reduce(self, step: Step, comm: Communicator) -> Step:
        """Weighs them by the replica's rows, and sends them."""
        chosen = step.variables
        if step.is_local:
            step = weighted_by_rows(step)
        trained = None
        if not comm.is_spmd and len(chosen) < len(self._optimizer._trainable_variables):
            # All ranks send the same, also where some have frozen layers, so that they can notice.
            step, trained = self._with_frozen(step)
        members = self.members(comm)
        members = self._coded(step, members) if step.is_local else members
        step = self._send(step, members, trained)
        if isinstance(members, Coded):
            step = members.kept(step, self._decides_with_all)
        return step if trained is None else self._without_frozen(step, chosen)

    def own_part(self, step: Step) -> Step:
        """All of it."""
        return step

    def dividing_axes(self, variables: Sequence[Variable]) -> list[int | None]:
        """Those along which a layout divides state; none of gradients that are reduced already, or sent coded."""
        if not self._leaves_slices:
            return [None for _ in variables]
        axes = placement.dividing_axes(variables)
        return [None if overwrites_variable(v) else axis for v, axis in zip(variables, axes)]

    @property
    def _leaves_slices(self) -> bool:
        optimizer = self._optimizer
        is_local = optimizer.state_finder.told not in (GradientState.GLOBAL, GradientState.SUMMED)
        return optimizer._lays_out_state and is_local and optimizer.pipeline.coding is None

    def finish(self, comm: Communicator) -> None:
        """Sends zeros, and that there are no more gradients, as if it were one more update."""
        members = self.members(comm)
        flags = num_flags(len(self._optimizer._trainable_variables), comm.num_replicas)
        flags = flags if self._checks_finite and members.world is members else 0
        variables = self._optimizer._trainable_variables
        step = Step([None] * len(variables), variables, GradientState.LOCAL)
        self._join(self._coded(step, members), flags)

    def _coded(self, step: Step, members: Communicator) -> Communicator:
        """The replicas, which send this step's gradients as `compression` says."""
        if self._half is not None:
            return Compressed(members, self._half, divides=step.gradient_state is GradientState.LOCAL)
        coding = self._optimizer.pipeline.coding
        return members if coding is None else coding.around(members, step)

    def members(self, comm: Communicator) -> Communicator:
        """The replicas that this one averages with; the groups are checked by then."""
        groups = self._options.group_assignment
        return comm if groups is None else comm.split(groups)

    def _join(self, members: Communicator, num_flags: int) -> None:
        join_uneven_inputs(self._optimizer._trainable_variables, members, num_flags)

    def _send(self, step: Step, members: Communicator, trained: Sequence[bool] | None) -> Step:
        assert step.gradient_state is not None
        members = scattered(members, step) if step.axes is not None and step.is_local else members
        arguments = (step.grads, step.variables, members, self._options.reduction, step.gradient_state)
        if self._checks_finite:
            grads, found_inf = all_reduce_and_check(*arguments, step.found_inf, trained)
            return step.replace(grads=grads, found_inf=found_inf)
        try:
            return step.replace(grads=global_gradients(*arguments, trained))
        except ValueError:
            if members.world is not members and self._decides_with_all and not members.is_spmd:
                fail_among_all(members.world)
            raise

    def _with_frozen(self, step: Step) -> tuple[Step, list[bool]]:
        """A step with all trainable variables, no gradient where none is given; and which are given."""
        positions = [self._optimizer._position(variable) for variable in step.variables]
        given = dict(zip(positions, step.grads))
        every = range(len(self._optimizer._trainable_variables))
        found = step.found_inf
        if found is not None:
            found = ops.take(ops.convert_to_tensor([0, *[i + 1 for i in positions]], "int32"), found, axis=0)
        grads = [given.get(i) for i in every]
        whole = step.replace(grads=grads, variables=list(self._optimizer._trainable_variables), found_inf=found)
        return whole, [i in given for i in every]

    def _without_frozen(self, step: Step, chosen: Sequence[Variable]) -> Step:
        """The reverse of `_with_frozen`, of a step that is reduced."""
        positions = [self._optimizer._position(variable) for variable in chosen]
        found = step.found_inf
        if found is not None:
            places = [UNKNOWN] * (len(step.variables) + 1)
            for place, position in enumerate(positions):
                places[position] = place
            name = ops.take(ops.convert_to_tensor(places, "int32"), found[2] % len(places), axis=0)
            found = ops.stack([found[0], found[1], name])
        return step.replace(grads=[step.grads[i] for i in positions], variables=chosen, found_inf=found)


class ReduceScatter(AllReduce):
    """Every replica gets its slices of the global gradients, because it has state for these only.

    Args:
        optimizer: the `CrossShard`.
        shards: who owns what, a `FlatShards`, `PaddedShards` or `PaddedLayout`.
    """

    def __init__(self, optimizer: Any, shards: Any) -> None:
        super().__init__(optimizer)
        self._shards = shards

    def own_part(self, step: Step) -> Step:
        """This replica's slices."""
        return step.replace(grads=self._shards.slices_of(step.grads, step.variables))

    def dividing_axes(self, variables: Sequence[Variable]) -> list[int | None]:
        """As `AllReduce.dividing_axes`; padded gradients are divided by rows."""
        axes = super().dividing_axes(variables)
        return self._shards.axes_inside(variables, axes) if self._leaves_slices else axes

    def _send(self, step: Step, members: Communicator, trained: Sequence[bool] | None) -> Step:
        if step.is_local and self._shards.reduces_in_slices:
            reduced: Step = self._shards.reduce(step, members, self._options.reduction, trained)
            return reduced
        if step.is_local and step.axes is not None and self._leaves_slices:
            return super()._send(self.own_part(step), members, trained)
        return self.own_part(super()._send(step, members, trained))

    def _join(self, members: Communicator, num_flags: int) -> None:
        self._shards.join_uneven_inputs(members, num_flags)


class Overlapped:
    """On PyTorch sends gradients while the backward pass computes others; elsewhere as another reducer does.

    Args:
        optimizer: the `CrossShard`.
        at_the_end: the other one.
        shards: of a `ReduceScatter`, who owns what.
    """

    def __init__(self, optimizer: Any, at_the_end: AllReduce, shards: Any = None) -> None:
        self._optimizer = optimizer
        self._options: CrossShardOptions = optimizer._options
        self._at_the_end = at_the_end
        self._shards = shards
        self.reduce, self.own_part, self.members = at_the_end.reduce, at_the_end.own_part, at_the_end.members
        self.dividing_axes = at_the_end.dividing_axes
        self.buckets: Any = None
        """What is sent together, where gradients are sent early."""
        self._among: Communicator | None = None

    def watch(self, loss: Tensor, row_share: Any) -> None:
        """Sends gradients while this loss is differentiated, if it is that of a step of Keras' trainer."""
        if self.buckets is None or not runtime.is_concrete(loss):
            return
        window = self._optimizer.accumulation
        if window is None:
            self.buckets.follow(loss, self._optimizer, bool(row_share))
        elif window.is_built and window.ends_next:
            self.buckets.follow(loss, self._optimizer, True, window.mean_with(bool(row_share)))

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
        if buckets.coded is not None:
            step = buckets.coded.kept(step, all_decide=False)
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
            optimizer = self._optimizer
            if optimizer.peers.started is not comm or not optimizer.state_finder.may_be_local:
                return None
            self.buckets, self._among = None, comm
            variables = self._optimizer._trainable_variables
            if _overlap is not None and not any(map(overwrites_variable, variables)):
                takes_mean, num_bytes = self._options.reduction == "mean", self._options.bucket_mib * 2**20
                slices = None if self._shards is None else self._shards.gradient_slices
                arguments = (
                    takes_mean,
                    num_bytes,
                    self._at_the_end._half,
                    self._options.on_nonfinite != "ignore",
                    slices,
                    None if self._optimizer.pipeline.coding is None else lambda: self._coded(comm),
                )
                self.buckets = _overlap.buckets_among(comm, variables, *arguments)
        return self.buckets

    def _coded(self, comm: Communicator) -> Communicator:
        """What codes the gradients of the next reduction."""
        variables = self._optimizer._trainable_variables
        nothing = Step([None] * len(variables), variables, GradientState.LOCAL)
        return self._at_the_end._coded(nothing, comm)


def reducer_of(optimizer: Any, shards: Any = None) -> AllReduce | Overlapped:
    """The reducer that the options of a `CrossShard` ask for; with `shards` each replica gets its slices."""
    options: CrossShardOptions = optimizer._options
    at_the_end = AllReduce(optimizer) if shards is None else ReduceScatter(optimizer, shards)
    overlaps = options.overlap == "auto" and options.is_plain
    is_coded = options.codec is not None and options.codec.sum_dtype is None
    if overlaps and (shards is None or (shards.gradient_slices is not None and not is_coded)):
        return Overlapped(optimizer, at_the_end, shards)
    return at_the_end


def whole_reducer_of(reducer: Any) -> Any:
    """The reducer that takes the place of one, where each replica's gradients are looked at before they are sent."""
    return reducer._at_the_end if isinstance(reducer, Overlapped) else reducer
