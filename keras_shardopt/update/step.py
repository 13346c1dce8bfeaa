"""The data of one update (`Step`), and the base class of the features that process it (`Stage`)."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras_shardopt.backends.active import runtime
from keras_shardopt.backends.communicator import Communicator, GradientState
from keras_shardopt.numerics import Gradients, Tensor, Variable


@dataclasses.dataclass(frozen=True)
class Step:
    """The gradients of one update, and how to reduce them.

    Its tensors belong to one replica and may be traced, so a stage must not store them.

    Example:
        >>> from keras_shardopt.update.step import Step
        >>> step = Step(grads=[None], variables=[None])
        >>> step.replace(weight=0.5).weight
        0.5
    """

    grads: Gradients
    """One tensor or None per variable."""

    variables: Sequence[Variable]
    """The trainable variables, in the order of `grads`."""

    gradient_state: GradientState | None = None
    """Whether the gradients were already summed or averaged when they arrived. Known in `local`; it may be None in
    `collect` and `commit`."""

    is_reduced: bool = False
    """Whether an outer `CrossShard` or the trainer has already reduced the gradients."""

    weight: Any = 1.0
    """The factor of this replica's gradients in the reduction. 0 discards them, NaN included."""

    row_share: Any = 1.0
    """This replica's number of rows divided by the mean number per replica; 0 without rows. With `replica_axis`, it may
    be a tensor with one number per replica."""

    loss_scale: Any = None
    """The factor by which the loss was multiplied; None for the optimizer's `loss_scale`."""

    found_inf: Tensor | tuple[int, int, int] | None = None
    """The first nonfinite gradient; None if unchecked. Indices are positions among the optimizer's trainable variables.

    Before the reduction: a scalar tensor, 1 plus the index of this replica's first nonfinite gradient; 0 if all are
    finite. After the reduction: an int32 tensor of shape `[3]`, equal on all replicas. Element 0 is greater than 0 if a
    gradient is not finite, 1 is the replica, 2 the index; either may be `UNKNOWN`. `numerics.ALL_FINITE` replaces the
    tensor if the CPU has already read that all gradients are finite.
    """

    replica_axis: str | None = None
    """JAX: the mesh axis of gradients stacked along their first dimension, one entry per replica; None if unstacked."""

    axes: Sequence[int | None] | None = None
    """For each gradient, the dimension along which the reduction divides it among replicas; None to keep it whole."""

    own: Sequence[Tensor] | None = None
    """Values that this replica passes from one reduction to the next, such as compression errors.
    Before the reduction: the old values, or None to read the variables. After the reduction: the new values."""

    notes: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """Tensors that stages pass from `local` to `commit`, equal on all replicas."""

    def replace(self, **changes: Any) -> Step:
        """Return a copy with other values in some fields."""
        return Step(**{**vars(self), **changes})  # takes half the time of `dataclasses.replace`

    @property
    def is_local(self) -> bool:
        """Whether the gradients are this replica's, not yet reduced. Valid in `local` and in reducers only."""
        return self.gradient_state is not None and self.gradient_state.is_local


Proceed = Callable[[Step], None]
"""Runs the rest of the update after a stage."""


class Stage:
    """Base class of one feature of an update. Hooks that a subclass does not override leave the step unchanged.

    Every replica runs the same stages in the same order, so a stage may run collectives of `comm`.

    Example:
        >>> import keras, keras_shardopt as ks
        >>> class Halve(ks.Stage):
        ...     def commit(self, step, proceed):
        ...         proceed(step.replace(grads=[grad / 2 for grad in step.grads]))
        >>> optimizer = ks.CrossShard(keras.optimizers.SGD(1.0), stages=[Halve()])
        >>> weight = keras.Variable(3.0)
        >>> optimizer.apply([keras.ops.convert_to_tensor(2.0)], [weight])
        >>> float(keras.ops.convert_to_numpy(weight))
        2.0
    """

    takes_slices: bool = False
    """Whether `commit` is element-wise, so it may receive slices of gradients (`shard_state=True`)."""

    @property
    def needs_local_gradients(self) -> bool:
        """Whether the stage needs each replica's gradients. If so, `CrossShard` raises for reduced gradients."""
        return self._overrides("local")

    @property
    def _replica_state(self) -> Sequence[Variable]:
        """The stage's variables with a different value on each replica."""
        return ()

    def _overrides(self, *hooks: str) -> bool:
        """Whether the stage's class overrides one of the methods named in `hooks`."""
        return any(getattr(type(self), hook) is not getattr(Stage, hook) for hook in hooks)

    @property
    def _allows_overlap(self) -> bool:
        """Whether gradients may be sent during the backward pass, before the update starts, which skips `local`."""
        return not (self.needs_local_gradients or self._overrides("collect", "local"))

    def check(self, optimizer: Any) -> None:
        """Raise ValueError if `optimizer`, a `CrossShard` under construction, does not support the stage."""

    def _check_outside(self, outer: Any) -> None:
        """Raise ValueError if the loss-scaling optimizer `outer` must not wrap the `CrossShard` with this stage."""

    def build(self, variables: Sequence[Variable], add_variable: Callable[..., Variable]) -> None:
        """Create the stage's variables when the optimizer is built.

        Args:
            variables: the trainable variables.
            add_variable: `keras.optimizers.Optimizer.add_variable`.
        """

    def collect(self, step: Step, proceed: Proceed) -> None:
        """Process a step before the reduction, in each `apply`; with gradient accumulation, once per update.

        To skip the update, do not call `proceed`. Use this hook to count and to decide, not to change gradients: these
        can be reduced already, or, in `fit` on JAX after `prepare`, stacked over all replicas.
        """
        proceed(step)

    def _micro_batch(self, step: Step, starts: Any, comm: Communicator) -> None:
        """Process this replica's gradients of one micro-batch; `starts` is true for the first of an update."""

    def local(self, step: Step, comm: Communicator) -> Step:
        """Return the step with this replica's gradients changed, just before the reduction."""
        del comm
        return step

    def commit(self, step: Step, proceed: Proceed) -> None:
        """Process the reduced gradients just before the update. To skip the update, do not call `proceed`."""
        proceed(step)

    def reset(self) -> None:
        """Discard values of an unfinished update, because state was loaded or training resumes from another point."""

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor, which saved models contain.

        Raises:
            NotImplementedError: if the constructor has arguments and the class does not override this method.
        """
        if inspect.signature(type(self)).parameters:
            name = type(self).__name__
            raise NotImplementedError(f"`{name}` must override `get_config`, because its constructor has arguments.")
        return {}

    def __repr__(self) -> str:
        try:
            arguments = ", ".join(f"{name}={value!r}" for name, value in self.get_config().items())
        except NotImplementedError:
            arguments = "..."
        return f"{type(self).__name__}({arguments})"

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Stage:
        """Create a stage from the result of `get_config`."""
        return cls(**config)


def proceed_if(
    condition: Tensor, proceed: Proceed, step: Step, variables: Sequence[Variable], updates_differ: bool
) -> None:
    """Call `proceed(step)` if the scalar bool tensor `condition` is true, as in most updates.

    Args:
        condition: the scalar, equal on all replicas unless `updates_differ`.
        proceed: the rest of the update.
        step: the step to proceed with. Its gradients and notes are passed to the conditional branch.
        variables: all variables that the rest of the update reads or assigns.
        updates_differ: whether the scalar may differ among replicas. Then `proceed` must not communicate.
    """
    count, names = len(step.grads), list(step.notes)

    def inside(tensors: Sequence[Any]) -> None:
        proceed(step.replace(grads=list(tensors[:count]), notes=dict(zip(names, tensors[count:])), found_inf=None))

    runtime.cond(condition, inside, [*step.grads, *step.notes.values()], variables, apart=updates_differ, mostly=True)
