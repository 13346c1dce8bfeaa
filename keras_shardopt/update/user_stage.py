"""A stage that a user has written, among those of the package: what it hands on is checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras import ops

from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.backends.scopes import assigning_nothing
from keras_shardopt.numerics import Variable, dtype_of, is_sparse
from keras_shardopt.update.options import CrossShardOptions
from keras_shardopt.update.step import Proceed, Stage, Step


class UserStage(Stage):
    """Runs a stage of a user, and refuses steps that no replica could go on with.

    Only shapes and dtypes are looked at, so that nobody waits for a device.

    Args:
        stage: the user's.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    @classmethod
    def from_options(cls, options: CrossShardOptions, optimizer: Any) -> list[Stage]:
        """Those that the options name."""
        return [cls(stage) for stage in options.stages]

    def build(self, variables: Sequence[Variable], add_variable: Callable[..., Variable]) -> None:
        """Builds it. From now on it belongs to this optimizer."""
        # By numbers: a copy of the stage takes them along, and belongs to nobody.
        mine = (id(self._stage), id(self))
        owner = vars(self._stage).get("_owner", mine)
        if owner[0] == mine[0] and owner != mine:
            raise ValueError(
                "Each optimizer must have stages of its own. "
                f"Received: {self._stage!r}, which another optimizer was built with. Make a new one."
            )
        vars(self._stage)["_owner"] = mine
        self._stage.build(variables, add_variable)

    def collect(self, step: Step, proceed: Proceed) -> None:
        """See `Stage.collect`."""
        self._pass("collect", step, proceed)

    def local(self, step: Step, comm: Communicator) -> Step:
        """See `Stage.local`."""
        if not self._stage._overrides("local"):
            return step
        with assigning_nothing(f"`{self._called('local')}`"):
            after = self._stage.local(step, comm)
        self._check(after, step, "local", "It must return the step: end it with `return step.replace(grads=...)`.")
        return after

    def commit(self, step: Step, proceed: Proceed) -> None:
        """See `Stage.commit`."""
        self._pass("commit", step, proceed)

    def reset(self) -> None:
        """See `Stage.reset`."""
        self._stage.reset()

    def _called(self, hook: str) -> str:
        return f"{type(self._stage).__name__}.{hook}"

    def _pass(self, hook: str, step: Step, proceed: Proceed) -> None:
        if not self._stage._overrides(hook):
            proceed(step)
            return
        before = step

        def go_on(step: Step) -> None:
            self._check(step, before, hook, "Use `proceed(step)` or `proceed(step.replace(grads=...))`.")
            proceed(step)

        returned = getattr(self._stage, hook)(step, go_on)
        if returned is not None:
            raise TypeError(
                f"`{self._called(hook)}` must return nothing: it hands the step on with `proceed(step)`, or leaves the "
                f"update out. Received: {type(returned).__name__}."
            )

    def _check(self, after: Any, before: Step, hook: str, fix: str) -> None:
        """Raises an error unless `after` can take the place of `before`."""
        if after is before:
            return
        rule = f"`{self._called(hook)}` must hand on"
        if not isinstance(after, Step):
            raise TypeError(f"{rule} a `Step`. Received: {_shown(after)}. {fix}")
        if not isinstance(after.notes, Mapping):
            fix = "Use `step.replace(notes={**step.notes, 'name': tensor})`."
            raise TypeError(f"{rule} a dict of `notes`. Received: {_shown(after.notes)}. {fix}")
        if hook == "local" and not _same(after.variables, before.variables):
            fix = "Leave `variables` as they are, and give None as the gradient of one that is not to be updated."
            raise ValueError(f"{rule} the step's own `variables`. Received: {len(after.variables)} others. {fix}")
        if not isinstance(after.grads, (list, tuple)):
            raise TypeError(f"{rule} a list of `grads`. Received: {_shown(after.grads)}. Use a list.")
        if len(after.grads) != len(after.variables):
            raise ValueError(
                f"{rule} one gradient, or None, for each of {len(after.variables)} variables. "
                f"Received: {len(after.grads)}. Give None where there is none."
            )
        given = {id(variable): grad for variable, grad in zip(before.variables, before.grads)}
        for variable, grad in zip(after.variables, after.grads):
            old = given.get(id(variable))
            if grad is not None and grad is not old:
                self._check_gradient(rule, variable, grad, old, hook == "local")

    def _check_gradient(self, rule: str, variable: Variable, grad: Any, old: Any, is_local: bool) -> None:
        name = f"`{getattr(variable, 'path', variable)}`"
        if not (ops.is_tensor(grad) or is_sparse(grad)):
            fix = "Use `keras.ops.convert_to_tensor`."
            raise TypeError(f"{rule} tensors, or None, as `grads`. Received: {_shown(grad)} for {name}. {fix}")
        # Reduced gradients may be slices, of other shapes than their variables.
        like = variable if is_local or is_sparse(old) else old
        if like is not None and not is_sparse(grad) and not _may_be_equal(grad.shape, like.shape):
            raise ValueError(
                f"{rule} gradients of the shapes of those that came. Received: shape {tuple(grad.shape)} for {name}, "
                f"in place of {tuple(like.shape)}. Reduce only with `keepdims=True`, or reshape the result."
            )
        if is_local and dtype_of(grad) != (dtype := dtype_of(variable if old is None else old)):
            raise ValueError(
                f"{rule} gradients of the dtypes in which they came, as replicas send each other these. Received: "
                f"{dtype_of(grad)} for {name}, in place of {dtype}. Use `keras.ops.cast(grad, {dtype!r})`."
            )


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return some is others or (len(some) == len(others) and all(a is b for a, b in zip(some, others)))


def _may_be_equal(shape: Any, other: Any) -> bool:
    """Whether two shapes can be equal. In a `tf.function` some lengths, or all, are not known."""
    if None in (getattr(shape, "rank", 0), getattr(other, "rank", 0)):
        return True
    return len(shape) == len(other) and all(a == b or None in (a, b) for a, b in zip(shape, other))


def _shown(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"
