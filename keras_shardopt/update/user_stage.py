"""Wraps user-written stages (`Stage`): converts gradients to units of a mean loss, and checks the returned `Step`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
from keras import ops

from keras_shardopt.backends.active import runtime
from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.backends.scopes import assigning_nothing
from keras_shardopt.numerics import Variable, is_sparse, like_variable
from keras_shardopt.update.context import StageContext
from keras_shardopt.update.options import CrossShardOptions
from keras_shardopt.update.step import Proceed, Stage, Step
from keras_shardopt.update.units import scaled_gradients, unit_of, unscaled_gradients


class UserStage(Stage):
    """Runs a user's stage, and raises an error if the `Step` that the stage returns is invalid.

    `local` receives gradients of the replica's mean loss, `commit` gradients of the mean loss over all rows, without
    the factor of loss scaling. The checks read only shapes and dtypes, so they never wait for a device.
    """

    def __init__(self, stage: Stage, context: StageContext) -> None:
        self._stage = stage
        self._context = context
        self._variables: list[Variable] = []

    @classmethod
    def from_options(cls, options: CrossShardOptions, context: StageContext) -> list[Stage]:
        """Return a wrapper for each stage of the argument `stages`."""
        whole = [stage for stage in options.stages if stage._overrides("commit") and not stage.takes_slices]
        if options.gives_slices and whole:
            raise ValueError(
                "With `shard_state=True`, `commit` of a stage receives only this replica's slices of gradients, "
                f"flattened. Received: stages={whole!r}, without `takes_slices`. Use `shard_state=False`, or set "
                "`takes_slices = True` in the class if the stage processes each element independently."
            )
        return [cls(stage, context) for stage in options.stages]

    @property
    def _allows_overlap(self) -> bool:
        return self._stage._allows_overlap

    def build(self, variables: Sequence[Variable], add_variable: Callable[..., Variable]) -> None:
        """Build the stage, and record this optimizer as its owner."""
        # Store ids. A copy of a stage keeps this entry but has another id, so the copy may belong to another optimizer.
        owner = (id(self._stage), id(self))
        previous = vars(self._stage).get("_owner", owner)
        if previous[0] == owner[0] and previous != owner:
            raise ValueError(
                f"Each optimizer must have separate stages. Received: {self._stage!r}, which another optimizer already "
                "uses. Create a new stage."
            )
        vars(self._stage)["_owner"] = owner

        def add(*args: Any, **kwargs: Any) -> Variable:
            self._variables.append(add_variable(*args, **kwargs))
            return self._variables[-1]

        self._stage.build(variables, add)
        self._check_variables([*variables, *self._variables])

    def _check_variables(self, known: Sequence[Variable]) -> None:
        """Raise ValueError for variables outside the optimizer, because compiled steps would lose their values."""
        found: list[Any] = []
        for value in vars(self._stage).values():
            found += (
                value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else [value]
            )
        if runtime.updates_are_stateless:  # in a compiled step, seed generators lose their states too
            found = [each.state if isinstance(each, keras.random.SeedGenerator) else each for each in found]
        others = [v for v in found if isinstance(v, keras.Variable) and not any(v is each for each in known)]
        if others:
            raise ValueError(
                f"`{self._name_of('build')}` must create its variables with the argument `add_variable`, or compiled "
                f"steps would lose their values. Received: {[v.path for v in others]}, created without `add_variable`. "
                "Use `add_variable(...)` instead of `keras.Variable(...)`."
            )

    def collect(self, step: Step, proceed: Proceed) -> None:
        self._pass("collect", step, proceed)

    def local(self, step: Step, comm: Communicator) -> Step:
        if not self._stage._overrides("local"):
            return step
        unit = unit_of(step, comm, self._context)
        own = step.replace(grads=unscaled_gradients(step.grads, step.variables, unit))
        with assigning_nothing(f"`{self._name_of('local')}`"):
            after = self._stage.local(own, comm)
        self._check(after, own, "local", "End the method with `return step.replace(grads=...)`.")
        after = _scaled(after, own, step, unit)
        # All replicas must send the same dtypes, so cast gradients to those of the variables. None stays None.
        if all(_has_dtype_of(grad, old) for grad, old in zip(after.grads, step.grads)):
            return after
        return after.replace(grads=[like_variable(g, v) for g, v in zip(after.grads, step.variables)])

    def _micro_batch(self, step: Step, starts: Any, comm: Communicator) -> None:
        if self._stage._overrides("_micro_batch"):
            grads = unscaled_gradients(step.grads, step.variables, self._context.loss_scale)
            self._stage._micro_batch(step.replace(grads=grads), starts, comm)

    def commit(self, step: Step, proceed: Proceed) -> None:
        """Call the stage's `commit`. If loss scaling skips the update, the stage's variables keep their values."""
        if not self._stage._overrides("commit"):
            proceed(step)
            return
        unit = self._context.loss_scale
        kept = self._variables if self._context.skips_inside else []
        before = [ops.copy(ops.convert_to_tensor(variable)) for variable in kept]
        calls = ops.copy(ops.convert_to_tensor(self._context.counter)) if kept else 0
        own = step.replace(grads=unscaled_gradients(step.grads, step.variables, unit))
        has_proceeded = []

        def proceed_scaled(after: Step) -> None:
            has_proceeded.append(True)
            proceed(_scaled(after, own, step, unit))

        self._pass("commit", own, proceed_scaled)
        # The update was skipped if it left the counter unchanged. With slices of gradients, only the wrapped loss
        # scaling decides this, because it combines the checks of all replicas.
        is_skipped = ops.equal(ops.convert_to_tensor(self._context.counter), calls) if kept else False
        for variable, value in zip(kept, before) if has_proceeded else ():
            variable.assign(ops.where(is_skipped, value, ops.convert_to_tensor(variable)))

    def reset(self) -> None:
        self._stage.reset()

    def _name_of(self, hook: str) -> str:
        return f"{type(self._stage).__name__}.{hook}"

    def _pass(self, hook: str, step: Step, proceed: Proceed) -> None:
        if not self._stage._overrides(hook):
            proceed(step)
            return
        before = step

        def checked(step: Step) -> None:
            self._check(step, before, hook, "Use `proceed(step)` or `proceed(step.replace(grads=...))`.")
            proceed(step)

        returned = getattr(self._stage, hook)(step, checked)
        if returned is not None:
            raise TypeError(
                f"`{self._name_of(hook)}` must return None. To continue, call `proceed(step)`. To skip the update, do "
                f"not call `proceed`. Received: {type(returned).__name__}."
            )

    def _check(self, after: Any, before: Step, hook: str, fix: str) -> None:
        if after is before:
            return
        rule = f"`{self._name_of(hook)}` must {'return' if hook == 'local' else 'proceed with'}"
        if not isinstance(after, Step):
            raise TypeError(f"{rule} a `Step`. Received: {_shown(after)}. {fix}")
        if not isinstance(after.notes, Mapping):
            fix = "Use `step.replace(notes={**step.notes, 'name': tensor})`."
            raise TypeError(f"{rule} a dict of `notes`. Received: {_shown(after.notes)}. {fix}")
        if hook == "local" and not _same(after.variables, before.variables):
            fix = "Do not change `variables`. Set the gradient of a variable to None to keep its value."
            raise ValueError(
                f"{rule} unchanged `variables`. Received: {len(after.variables)} different variables. {fix}"
            )
        if not isinstance(after.grads, (list, tuple)):
            raise TypeError(f"{rule} a list of `grads`. Received: {_shown(after.grads)}. Use a list.")
        if len(after.grads) != len(after.variables):
            raise ValueError(
                f"{rule} one gradient, or None, for each of {len(after.variables)} variables. "
                f"Received: {len(after.grads)} gradients. Use None for a missing gradient."
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
            raise TypeError(f"{rule} `grads` of tensors or None. Received: {_shown(grad)} for {name}. {fix}")
        # Compare a reduced gradient with that before the stage, because a slice has another shape than the variable.
        like = variable if is_local or is_sparse(old) else old
        if like is not None and not is_sparse(grad) and not _may_be_equal(grad.shape, like.shape):
            raise ValueError(
                f"{rule} gradients with unchanged shapes. Received: shape {tuple(grad.shape)} for {name}, "
                f"instead of {tuple(like.shape)}. Reduce only with `keepdims=True`, or reshape the result."
            )


def _scaled(after: Step, own: Step, step: Step, unit: Any) -> Step:
    """Return `after`, the result of a user's stage, with gradients scaled by `unit` again."""
    is_same = after.grads is own.grads
    return after.replace(grads=step.grads if is_same else scaled_gradients(after.grads, after.variables, unit))


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return some is others or (len(some) == len(others) and all(a is b for a, b in zip(some, others)))


def _has_dtype_of(grad: Any, old: Any) -> bool:
    return grad is old or grad is None or (old is not None and grad.dtype == old.dtype)


def _may_be_equal(shape: Any, other: Any) -> bool:
    """Whether two shapes can be equal. In a `tf.function` some or all lengths may be unknown."""
    if None in (getattr(shape, "rank", 0), getattr(other, "rank", 0)):
        return True
    return len(shape) == len(other) and all(a == b or None in (a, b) for a, b in zip(shape, other))


def _shown(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"
