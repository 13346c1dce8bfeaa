"""Tracing and control flow: what the package needs of a framework inside a training step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from keras import ops

from keras_shardopt.backends.communicator import Communicator, SingleReplica
from keras_shardopt.numerics import FunctionT, Tensor, Variable


class Runtime:
    """How a framework traces, branches and differentiates. The defaults are right where nothing is traced.

    A new backend writes `communicator` and `value_and_grad`. One that traces steps also writes `is_concrete`, `cond`
    and `raise_if`; if it rewrites Python for that, `no_autograph`; if assignments wait for the traced step to run,
    `init_scope`; if steps are pure functions, `updates_are_stateless`; if one program keeps per-replica gradients,
    `map_replicas`. Only speed: `no_compile`, `is_cheap_to_read`, `version`, `add_n`.
    """

    def communicator(self, axis_name: str) -> Communicator:
        """The replicas around the caller, at this point of the program or of its trace."""
        del axis_name
        return SingleReplica()

    def value_and_grad(
        self,
        loss: Callable[[], tuple[Tensor, Any]],
        variables: Sequence[Variable],
        axis_name: str | None,
        before_assign: Callable[[Variable], None] | None = None,
    ) -> tuple[list[Tensor | None], Any]:
        """The gradients of a scalar. What the loss assigns (moving statistics, seeds) is assigned once.

        Args:
            loss: returns the scalar, and a tensor or None to return with the gradients.
            variables: to differentiate by.
            axis_name: of the replicas, each of which gets gradients of its own loss; None for a loss that is equal on
                all of them, and variables that need not be trainable.
            before_assign: called before each assignment that reaches its variable only after the loss.

        Returns:
            The gradients, None where the loss does not depend on the variable; and what was returned with the scalar.
        """
        del loss, variables, axis_name, before_assign
        raise NotImplementedError("This Keras backend has no gradients. Use the tensorflow, jax or torch backend.")

    def is_concrete(self, value: Any) -> bool:
        """Whether a bool or tensor has its value now, and not only when what is being traced runs."""
        return True

    def cond(
        self,
        condition: Any,
        update: Callable[[Sequence[Any]], None],
        grads: Sequence[Any],
        variables: Sequence[Variable],
        communicates: bool = True,
        apart: bool = False,
        mostly: bool = False,
    ) -> None:
        """Calls `update(grads)` where `condition`, a bool or a scalar bool tensor, is true.

        `update` assigns `variables` only. If it `communicates` it may reduce over replicas; then the condition is equal
        on all of them, and `grads` are all that it reads of this replica's own tensors. With `apart` it is an optimizer
        that updates, and reduces nothing: the condition is this replica's own. If the condition holds `mostly`, a
        compiled program may compute the update in any case and keep the values from before if it does not hold.
        """
        del variables, communicates, apart, mostly
        # Not `bool(condition)`, which costs torch.compile one more break of its graph.
        if condition:
            update(grads)

    def raise_if(
        self, condition: Any, nonfinite_source: Tensor, names: Sequence[str], rule: str, after: Sequence[Variable] = ()
    ) -> None:
        """Raises where a scalar bool tensor is true. Where no step can raise, it does so for known values only.

        Args:
            condition: equal on all replicas.
            nonfinite_source: int tensor of shape `[2]`: the replica, and the position in `names`; -1 for unknown.
            names: of the variables.
            rule: what the error begins with.
            after: variables whose assignments so far come first.

        Raises:
            FloatingPointError: with rule, replica and name; in a `tf.function` `tf.errors.InvalidArgumentError`.
        """
        if condition:
            replica, position = (int(i) for i in ops.convert_to_numpy(nonfinite_source))
            raise FloatingPointError(stopped(rule, replica, names[position] if position >= 0 else None))

    def map_replicas(self, function: Callable[..., Any], stacked: Any, axes: Sequence[int | None]) -> Any:
        """What `function(own)` returns for each replica's entry of a nest of stacked tensors.

        A list of tensors, of which each replica has its slice along a dimension of `axes`, or all where that is None;
        a nest that is equal on all replicas; and one of tensors of its own, which come back stacked.
        """
        del function, stacked, axes
        raise NotImplementedError("Nothing is stacked on this Keras backend.")

    updates_are_stateless: bool = False
    """Whether steps are traced as pure functions, so that inner optimizers run in `stateless_apply`."""

    def init_scope(self) -> contextlib.AbstractContextManager[Any]:
        """A scope in which assignments happen now, also while a step is being traced."""
        return contextlib.nullcontext()

    def no_autograph(self, function: FunctionT) -> FunctionT:
        """A decorator: the function is traced as it is, and not rewritten."""
        return function

    def no_compile(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls `function(*args)` outside of what is being compiled, where such a thing is possible."""
        return function(*args)

    def is_cheap_to_read(self, tensor: Tensor) -> bool:
        """Whether values can be read without waiting for a device, or breaking a compiled step apart."""
        del tensor
        return True

    def version(self, variable: Variable) -> int | None:
        """A number that each assignment changes, read without waiting for a device.

        None where Python does not run in each step, and so cannot keep account of one.
        """
        return None

    def add_n(self, variables: Sequence[Variable], values: Sequence[Tensor | None], starts: Any) -> None:
        """Adds a tensor, or nothing, to each variable of this replica; where `starts` is true, to 0.

        Also to tensors, where Python runs in each step.
        """
        for variable, value in zip(variables, values):
            # In one pass, and by assignment: a NaN times zero is a NaN.
            before = ops.convert_to_tensor(variable)
            first = ops.zeros_like(before) if value is None else value
            variable.assign(ops.where(starts, first, before if value is None else before + value))


def stopped(rule: str, replica: int, name: str | None) -> str:
    """The message of an error about a gradient that is not finite."""
    who = f"replica {replica}" if replica >= 0 else "a replica that cannot be told"
    return f"{rule} Received: NaN or infinity on {who}, first in that of {name or 'a variable that cannot be told'}."
