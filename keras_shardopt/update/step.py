"""What travels through one update, and what may be done to it on the way."""

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
    """Gradients on their way through one update, and what is known of them.

    Tensors in it may be traced, and belong to one replica: a stage closes over none of another's.

    Example:
        >>> from keras_shardopt.update.step import Step
        >>> step = Step(grads=[None], variables=[None])
        >>> step.replace(weight=0.5).weight
        0.5
    """

    grads: Gradients
    """One tensor or None per variable."""

    variables: Sequence[Variable]
    """The trainable variables of `grads`, in the same order."""

    gradient_state: GradientState | None = None
    """How the gradients arrive; None until the replicas are asked."""

    is_reduced: bool = False
    """Whether an outer `CrossShard`, or the trainer, has reduced them."""

    weight: Any = 1.0
    """How much this replica counts in the mean. With 0 nothing counts, not even a NaN."""

    row_share: Any = 1.0
    """This replica's rows in units of an equal part, which is the unit of its mean loss; 0: no rows."""

    loss_scale: Any = None
    """By what the loss was multiplied; None where the optimizer itself knows."""

    found_inf: Tensor | tuple[int, int, int] | None = None
    """Before the reduction the position, from 1, of this replica's first gradient that is not finite, or 0.

    After it three ints, equal on all replicas: greater than 0 if a gradient is not finite; the replica; the position
    of the variable, from 0. `ALL_FINITE` of `nonfinite.py` where that is known without waiting for a device.
    """

    replica_axis: str | None = None
    """JAX: the mesh axis along which gradients of all replicas are stacked, one row each."""

    axes: Sequence[int | None] | None = None
    """Along which dimension each gradient is to be divided among the replicas when it is reduced; None: not at all."""

    own: Sequence[Tensor] | None = None
    """The values of `Pipeline.carried` on this replica, where they do not come from, or go to, variables themselves."""

    notes: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """What stages hand on from `local` to `commit`: tensors that are equal on all replicas."""

    def replace(self, **changes: Any) -> Step:
        """The same step with other values in some fields."""
        return Step(**{**vars(self), **changes})  # `dataclasses.replace` takes twice as long, in each update

    @property
    def is_local(self) -> bool:
        """Whether the gradients are this replica's own, so that there is something to reduce."""
        return self.gradient_state in (GradientState.LOCAL, GradientState.LOCAL_PRESCALED)


Proceed = Callable[[Step], None]
"""The rest of the way."""


class Stage:
    """One feature of an update. A stage that overrides nothing does nothing.

    Every replica runs the same stages in the same order, so a stage may exchange tensors through `comm`.

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
    """Whether `commit` treats each element by itself, so that `shard_state=True` may give it slices of gradients."""

    @property
    def needs_local_gradients(self) -> bool:
        """Whether it must see each replica's own gradients, so that reduced ones are refused."""
        return self._overrides("local")

    @property
    def replica_state(self) -> Sequence[Variable]:
        """Which of its variables hold another value on each replica."""
        return ()

    def _overrides(self, *hooks: str) -> bool:
        """Whether its class has a method of its own for one of these hooks."""
        return any(getattr(type(self), hook) is not getattr(Stage, hook) for hook in hooks)

    @property
    def _looks_at_micro_batches(self) -> bool:
        return self._overrides("_micro_batch")

    def check(self, optimizer: Any) -> None:
        """Called by the constructor of the `CrossShard`; raises ValueError if the stage cannot work in it."""

    def build(self, variables: Sequence[Variable], add_variable: Callable[..., Variable]) -> None:
        """Makes its variables, when the optimizer is built on these trainable variables.

        Args:
            variables: the trainable variables.
            add_variable: `keras.optimizers.Optimizer.add_variable`.
        """

    def collect(self, step: Step, proceed: Proceed) -> None:
        """Before the reduction: each `apply`, with accumulation each window. It may hold gradients back for good.

        Under JAX's prepared `fit` they may be reduced already, or stacked: it is for counting and deciding.
        """
        proceed(step)

    def _micro_batch(self, step: Step, starts: Any, comm: Communicator) -> None:
        """With accumulation: this replica's gradients of each micro-batch, and whether it is the first."""

    def local(self, step: Step, comm: Communicator) -> Step:
        """What becomes of this replica's own gradients, just before they are reduced."""
        del comm
        return step

    def commit(self, step: Step, proceed: Proceed) -> None:
        """The reduced gradients, just before they update. It may leave the update out, and then does not proceed."""
        proceed(step)

    def reset(self) -> None:
        """Called when state was loaded, or training goes on from elsewhere."""

    def get_config(self) -> dict[str, Any]:
        """The arguments of its constructor, for files.

        Raises:
            NotImplementedError: if there are arguments, and the class does not override this.
        """
        if inspect.signature(type(self)).parameters:
            name = type(self).__name__
            raise NotImplementedError(f"`{name}` must override `get_config`, as its constructor has arguments.")
        return {}

    def __repr__(self) -> str:
        try:
            arguments = ", ".join(f"{name}={value!r}" for name, value in self.get_config().items())
        except NotImplementedError:
            arguments = "..."
        return f"{type(self).__name__}({arguments})"

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Stage:
        """The reverse of `get_config`."""
        return cls(**config)


def proceed_if(
    condition: Tensor, proceed: Proceed, step: Step, variables: Sequence[Variable], apart: bool = False
) -> None:
    """Proceeds where a scalar bool tensor, equal on all replicas and mostly true, is true.

    Args:
        condition: the scalar.
        proceed: the rest of the way.
        step: what goes on; its gradients and notes go through the branch as operands.
        variables: all that the rest of the way reads or assigns.
        apart: whether the scalar is this replica's own, and nothing further on reduces.
    """
    count, names = len(step.grads), list(step.notes)

    def inside(tensors: Sequence[Any]) -> None:
        proceed(step.replace(grads=list(tensors[:count]), notes=dict(zip(names, tensors[count:])), found_inf=None))

    runtime.cond(condition, inside, [*step.grads, *step.notes.values()], variables, apart=apart, mostly=True)
