"""Nonfinite gradients: find the replica and the variable, and skip the update.

Each replica checks only its gradients. It sends the index of its first nonfinite gradient with the gradients, as
binary digits (flags) in elements reserved for this replica. A sum or mean in any dtype preserves the digits of all
replicas. The result of the check has three forms:

- Before the reduction: a scalar, the index from 1 of this replica's first nonfinite gradient, or 0.
- In the reduction: flags, `num_flags` elements.
- After the reduction: `found_inf`, three ints that are equal on all replicas. `Step.found_inf` describes them.

Every index is a position among the optimizer's trainable variables, even if a step has only some of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from keras_shardopt.backends import norms
from keras_shardopt.backends.active import runtime
from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.numerics import UNKNOWN, Gradients, Tensor, Variable, filled_like, overwrites_variable, values_of
from keras_shardopt.update.context import StageContext
from keras_shardopt.update.exchange import Moved, raise_failure_of_others
from keras_shardopt.update.options import CrossShardOptions
from keras_shardopt.update.reduction import Reduction
from keras_shardopt.update.step import Proceed, Stage, Step, proceed_if


class SkipNonFinite(Stage):
    """Skips updates with a NaN or infinite gradient on any replica, and records the replica and the variable.

    Args:
        context: the interface of the optimizer. The constructor creates counters, so they are readable before `build`.
        skips_inside: whether a wrapped loss-scaling optimizer skips and counts such updates instead.
        checks_early: whether to check each replica's gradients before the reduction, even if they arrive reduced.
    """

    _allows_overlap = True  # a reducer that sends early also checks the gradients

    def __init__(self, context: StageContext, skips_inside: bool, checks_early: bool) -> None:
        optimizer = context.optimizer
        self.skipped = optimizer.add_variable((), "zeros", dtype="int", name="skipped_steps")
        """The number of skipped updates: a scalar variable."""
        unknown = keras.initializers.Constant(UNKNOWN)
        self.source = optimizer.add_variable((2,), unknown, dtype="int32", name="last_nonfinite")
        """The replica and the variable's position of the last nonfinite gradient; either can be `UNKNOWN`."""
        self._skips_inside = skips_inside
        self._checks_early = checks_early
        self._context = context
        self._num_reported = 0

    @classmethod
    def from_options(cls, options: CrossShardOptions, context: StageContext) -> list[Stage]:
        if options.on_nonfinite == "ignore":
            return []
        return [cls(context, context.skips_inside, options.uses_local_gradients)]

    def collect(self, step: Step, proceed: Proceed) -> None:
        """Check gradients that an outer optimizer or a trainer has reduced without a check."""
        if step.is_reduced and step.found_inf is None:
            places = self._context.positions(step.variables)
            step = step.replace(found_inf=check_reduced(step.grads, step.variables, places))
        proceed(step)

    def local(self, step: Step, comm: Communicator) -> Step:
        """Check gradients after `replica_transform` and before `replica_clipnorm`, because clipping spreads a NaN."""
        if not (step.is_local or self._checks_early):
            return step
        places = self._context.positions(step.variables)
        return step.replace(found_inf=first_not_finite(step.grads, step.variables, places))

    def commit(self, step: Step, proceed: Proceed) -> None:
        """Skip and count an update with nonfinite gradients. Record the replica and the variable."""
        found_inf = step.found_inf
        assert found_inf is not None
        if isinstance(found_inf, tuple):  # `ALL_FINITE`: all gradients are finite
            proceed(step.replace(found_inf=None))
            return
        is_bad = found_inf[0] > 0
        self.source.assign(ops.where(is_bad, found_inf[1:], ops.convert_to_tensor(self.source)))
        if self._skips_inside:
            proceed(step)
            return
        self.skipped.assign(self.skipped + ops.cast(is_bad, self.skipped.dtype))
        updates_differ = self._context.updates_differ
        proceed_if(ops.logical_not(is_bad), proceed, step, self._context.written, updates_differ)

    def last(self) -> tuple[int, int]:
        """Return the replica and the variable's position of the last nonfinite gradient; either may be `UNKNOWN`."""
        replica, position = (int(i) for i in ops.convert_to_numpy(self.source))
        return replica, position

    def raise_if_more(self, before: Tensor, names: Sequence[str], after: Sequence[Variable]) -> None:
        """Raise FloatingPointError if more than `before` updates were skipped. First wait for the variables `after`."""
        # Pass `after` to wait for the end of the update. TensorFlow might otherwise stop in the middle of it.
        is_new = ops.convert_to_tensor(self.skipped) > before
        runtime.raise_if(is_new, ops.convert_to_tensor(self.source), names, _RAISES, after)

    def report(self, names: Sequence[str], from_now: bool) -> None:
        """Raise FloatingPointError if updates were skipped since the last call. With `from_now`, ignore these."""
        num_skipped = int(ops.convert_to_numpy(self.skipped))
        is_new, self._num_reported = num_skipped > self._num_reported, num_skipped
        runtime.raise_if(is_new and not from_now, ops.convert_to_numpy(self.source), names, _RAISES)


_RAISES = 'With `on_nonfinite="raise"` all gradients must be finite.'


def first_not_finite(grads: Gradients, variables: Sequence[Variable], places: Sequence[int]) -> Tensor:
    """Return the index, from 1, of the first nonfinite gradient, as a scalar int32; 0 if all are finite.

    Args:
        grads: one gradient or None per variable.
        variables: the variables of `grads`.
        places: the positions of `variables` among the optimizer's trainable variables.
    """
    checked = [i for i, grad in enumerate(grads) if grad is not None and not overwrites_variable(variables[i])]
    if not checked:
        return ops.zeros((), "int32")
    is_bad = ops.logical_not(norms.are_finite([values_of(grads[i]) for i in checked]))
    # `arange` is made on the device; a list would be copied to it.
    is_all = len(checked) == len(grads) and isinstance(places, range)
    given = [places[i] for i in checked]
    positions = ops.arange(1, len(grads) + 1, dtype="int32") if is_all else ops.convert_to_tensor(given, "int32") + 1
    last = num_places(places) + 1
    first = ops.min(ops.where(is_bad, positions, filled_like(positions, last)))
    return ops.where(first < last, first, ops.zeros_like(first))


def num_places(places: Sequence[int]) -> int:
    """Return the number of the optimizer's trainable variables up to the last one with a position in `places`."""
    return len(places) if isinstance(places, range) else max(places, default=-1) + 1


def num_flags(num_variables: int, num_replicas: int) -> int:
    """Return the length of the tensor from `flags`: per replica, one element for each binary digit of an index."""
    return num_replicas * num_variables.bit_length()


def flags(position: Tensor, replica_id: Any, num_variables: int, num_replicas: int, dtype: str) -> Tensor:
    """Return the binary digits of the index `position`, in elements reserved for this replica. Other elements are 0."""
    powers = ops.convert_to_tensor([2**i for i in range(num_variables.bit_length())], "int32")
    digits = ops.cast(ops.floor_divide(position, powers) % 2, dtype)
    mine = ops.cast(ops.equal(ops.arange(num_replicas, dtype="int32"), ops.cast(replica_id, "int32")), dtype)
    return ops.reshape(mine[:, None] * digits[None, :], (-1,))


def nonfinite_source(flags: Tensor, num_variables: int, num_replicas: int) -> Tensor:
    """Decode the sum or mean of all replicas' `flags`: find the first replica with a nonfinite gradient, and its index.

    Returns:
        An int32 tensor of shape `[2]`: the replica and the index, from 0; (-1, -1) if all gradients are finite.
    """
    num_digits = num_variables.bit_length()
    digits = ops.cast(ops.reshape(flags, (num_replicas, num_digits)) > 0, "int32")
    powers = ops.convert_to_tensor([2**i for i in range(num_digits)], "int32")
    positions = ops.cast(ops.sum(digits * powers[None, :], axis=1), "int32")
    replicas = ops.arange(num_replicas, dtype="int32")
    first = ops.min(ops.where(positions > 0, replicas, filled_like(replicas, num_replicas)))
    is_first = ops.cast(ops.equal(replicas, first), "int32")
    position = ops.cast(ops.sum(positions * is_first), "int32") - 1
    replica = ops.where(position >= 0, ops.cast(first, "int32"), filled_like(position, UNKNOWN))
    return ops.stack([replica, position])


def found_inf_from_flags(flags: Tensor, position: Tensor, num_variables: int, num_replicas: int) -> Tensor:
    """Return (is nonfinite, replica, index) from reduced `flags`, or from `position`, an index from 1 (0 if finite)."""
    source = nonfinite_source(flags, num_variables, num_replicas)
    is_known = source[1] >= 0
    is_bad = ops.where(is_known, ops.ones_like(position), position)
    return ops.stack([is_bad, source[0], ops.where(is_known, source[1], position - 1)])


def check_reduced(grads: Gradients, variables: Sequence[Variable], places: Sequence[int]) -> Tensor:
    """Return (is nonfinite, `UNKNOWN` as replica, index) for gradients that are already reduced over replicas."""
    position = first_not_finite(grads, variables, places)
    return ops.stack([position, filled_like(position, UNKNOWN), position - 1])


def largest_of_all(has_nan: Tensor, amax: Tensor, replicas: Communicator) -> tuple[Tensor, Tensor]:
    """Return whether any replica has a NaN gradient, and the largest absolute value over all replicas.

    Raises:
        ValueError: if another replica calls `fail_among_all` instead.
    """
    found = ops.stack([ops.cast(has_nan, "float32"), ops.where(has_nan, ops.zeros_like(amax), amax)])
    (found,) = replicas.all_reduce([found], "max")
    if not replicas.is_spmd and runtime.is_cheap_to_read(found) and found[0] > 1:
        raise_failure_of_others(replicas)
    return found[0] > 0, found[1]


def fail_among_all(replicas: Communicator) -> None:
    """Make `largest_of_all` raise on the other replicas, because this replica is about to raise an error."""
    replicas.all_reduce([ops.convert_to_tensor([_FAILS, 0.0], "float32")], "max")


_FAILS = 2.0
"""A replica that is about to raise an error sends this number in place of 0 or 1 (whether it has a NaN)."""


def move_and_check(
    reduction: Reduction, move: Callable[[Reduction], Moved], members: Communicator
) -> tuple[list[Tensor | None], Tensor]:
    """Reduce gradients and check them in the same collective.

    With `group_assignment`, all groups run one more collective of a few elements, because they skip updates together.

    Args:
        reduction: this replica's input. Its `found`, the index of a nonfinite gradient, may be from before clipping.
        move: executes the reduction.
        members: the replicas of this replica's group.

    Returns:
        The gradients, and `found_inf`, equal on the replicas of all groups.
    """
    world, places, found = members.world, reduction.places, reduction.found
    num_variables, is_group = num_places(places), members.world is not members

    def own_flags(dtype: str) -> Tensor:
        return flags(found, world.replica_id, num_variables, world.num_replicas, dtype)

    failure = None
    try:
        moved = move(reduction.replace(nonfinite_flags=own_flags if found is not None and not is_group else None))
    except ValueError as error:
        if not is_group or members.is_spmd:
            raise
        failure, moved = error, Moved(list(reduction.grads), None)  # raised below, after the collective of all groups
    all_flags, position = moved.nonfinite_flags, first_not_finite(moved.grads, reduction.variables, places)
    if moved.in_slices:
        position = first_in_slices(position, num_variables, members)
    if is_group:
        sum_overflows = ops.cast(ops.reshape(position, (1,)), "float32")
        fails = ops.full((1,), float(failure is not None), "float32")
        (of_all,) = world.all_reduce([ops.concatenate([own_flags("float32"), sum_overflows, fails])], "max")
        if failure is not None:
            raise failure
        if not members.is_spmd and runtime.is_cheap_to_read(of_all) and of_all[-1] > 0:
            raise_failure_of_others(members)
        all_flags, position = of_all[:-2], ops.cast(of_all[-2], "int32")
    if all_flags is None:
        return moved.grads, found_inf_without_flags(position, found, world.num_replicas)
    return moved.grads, found_inf_from_flags(all_flags, position, num_variables, world.num_replicas)


def move_unchecked(
    reduction: Reduction, move: Callable[[Reduction], Moved], members: Communicator, all_decide: bool
) -> list[Tensor | None]:
    """Reduce gradients without a check. With `all_decide`, an error also makes `largest_of_all` of all groups raise."""
    try:
        return move(reduction).grads
    except ValueError:
        if members.world is not members and all_decide and not members.is_spmd:
            fail_among_all(members.world)
        raise


def found_inf_without_flags(position: Tensor, found: Tensor | None, num_replicas: int) -> Tensor:
    """Return (is nonfinite, replica, index) from the index (from 1) of a nonfinite reduced, or local, gradient."""
    first = position if found is None else ops.where(found > 0, found, position)
    unknown = filled_like(first, UNKNOWN)
    replica = ops.zeros_like(first) if num_replicas == 1 else unknown
    return ops.stack([position, ops.where(first > 0, replica, unknown), first - 1])


def first_in_slices(position: Tensor, num_variables: int, replicas: Communicator) -> Tensor:
    """Return the index (from 1; 0 for none) of the first gradient with a nonfinite slice on any replica."""
    last, none = num_variables + 1, ops.zeros_like(position)
    mine = ops.cast(ops.where(position > 0, last - position, none), "float32")
    (first,) = replicas.all_reduce([ops.reshape(mine, (1,))], "max")
    first = ops.cast(first[0], "int32")
    return ops.where(first > 0, last - first, ops.zeros_like(first))
