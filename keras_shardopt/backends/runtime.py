"""Tracing and control flow inside a training step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from keras import ops

from keras_shardopt.backends.communicator import Communicator, SingleReplica
from keras_shardopt.numerics import FunctionT, Tensor, Variable


class Runtime:
    """How a framework traces, branches and differentiates. The defaults fit a framework without tracing.

    A new backend implements `communicator` and `value_and_grad`. If it traces steps, it also implements `is_concrete`,
    `cond` and `raise_if`, and if its tracing requires them `no_autograph`, `init_scope`, `updates_are_stateless` and
    `map_replicas`. `no_compile`, `is_cheap_to_read`, `version` and `add_n` only affect speed.
    """

    def communicator(self, axis_name: str) -> Communicator:
        """Return the communicator of the replicas that run the calling code."""
        del axis_name
        return SingleReplica()

    def value_and_grad(
        self,
        loss: Callable[[], tuple[Tensor, Any]],
        variables: Sequence[Variable],
        axis_name: str | None,
        before_assign: Callable[[Variable], None] | None = None,
    ) -> tuple[list[Tensor | None], Any]:
        """Return the gradients of a loss (None for variables that do not affect it), and the auxiliary value of `loss`.

        Each assignment in the loss (moving statistics, seeds) happens once.

        Args:
            loss: returns the loss (a scalar), and an auxiliary tensor or None.
            variables: to differentiate with respect to.
            axis_name: the name of the replica axis, if each replica has its own loss. If None, `variables` may be
                non-trainable.
            before_assign: called with the variable before each assignment that JAX defers until after the loss.
        """
        del loss, variables, axis_name, before_assign
        raise NotImplementedError("This Keras backend has no gradients. Use the tensorflow, jax or torch backend.")

    def is_concrete(self, value: Any) -> bool:
        """Return whether the value is available now, not only when the traced step runs."""
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
        """Call `update(grads)` if `condition` is true.

        Args:
            condition: a bool or a scalar bool tensor, equal on all replicas unless `apart`.
            update: assigns only `variables`.
            grads: the only tensors that `update` reads and that differ between replicas.
            variables: the variables that `update` may assign.
            communicates: whether `update` may reduce over replicas.
            apart: whether each replica has its own condition. `update` then reduces nothing.
            mostly: whether the condition is usually true. A compiled program may then always compute the update.
        """
        del variables, communicates, apart, mostly
        # Do not write `bool(condition)`: it would add a graph break in torch.compile.
        if condition:
            update(grads)

    def raise_if(
        self, condition: Any, nonfinite_source: Tensor, names: Sequence[str], rule: str, after: Sequence[Variable] = ()
    ) -> None:
        """Raise an error if a scalar bool tensor is true.

        Does nothing inside a compiled step if the framework cannot raise errors there.

        Args:
            condition: equal on all replicas.
            nonfinite_source: int tensor of shape `[2]`: the replica, and the position in `names`; -1 for unknown.
            names: the names of the variables.
            rule: the beginning of the error message.
            after: variables with assignments that must complete first.

        Raises:
            FloatingPointError: with rule, replica and name. A `tf.function` raises `tf.errors.InvalidArgumentError`.
        """
        if condition:
            replica, position = (int(i) for i in ops.convert_to_numpy(nonfinite_source))
            raise FloatingPointError(stopped(rule, replica, names[position] if position >= 0 else None))

    def map_replicas(self, function: Callable[..., Any], stacked: Any, axes: Sequence[int | None]) -> Any:
        """Call `function` on each replica, with that replica's row of each tensor in `stacked`.

        Args:
            function: returns a list of tensors, a nest (lists and dicts) of tensors that are equal on all replicas, and
                a nest of tensors that differ.
            stacked: a nest of tensors with one row per replica.
            axes: for each tensor in the list, the dimension along which each replica returns a slice. None for a whole
                tensor.

        Returns:
            The three results of `function`. Slices are concatenated, and tensors that differ are stacked.
        """
        del function, stacked, axes
        raise NotImplementedError("This Keras backend does not stack per-replica tensors.")

    updates_are_stateless: bool = False
    """Whether steps are traced as pure functions, so inner optimizers run in `stateless_apply`."""

    def init_scope(self) -> contextlib.AbstractContextManager[Any]:
        """Return a scope in which assignments happen at once, even during a trace."""
        return contextlib.nullcontext()

    def no_autograph(self, function: FunctionT) -> FunctionT:
        """Decorate a function that TensorFlow's AutoGraph must not rewrite."""
        return function

    def no_compile(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function(*args)` outside compiled code, if the framework supports that."""
        return function(*args)

    def is_cheap_to_read(self, tensor: Tensor) -> bool:
        """Return whether Python can read the values without waiting for a device or splitting a compiled step."""
        del tensor
        return True

    def version(self, variable: Variable) -> int | None:
        """Return a number that each assignment to the variable changes. None if Python does not run in each step."""
        return None

    def add_n(self, variables: Sequence[Variable], values: Sequence[Tensor | None], starts: Any) -> None:
        """Add each value to its variable, or assign the value if `starts` is true. A value of None means zeros."""
        for variable, value in zip(variables, values):
            # Choose between two values. A product with zero would not clear NaN, because NaN times zero is NaN.
            before = ops.convert_to_tensor(variable)
            first = ops.zeros_like(before) if value is None else value
            variable.assign(ops.where(starts, first, before if value is None else before + value))


def stopped(rule: str, replica: int, name: str | None) -> str:
    """Return the error message for a non-finite gradient: `rule`, then the replica and the name of the variable."""
    who = f"replica {replica}" if replica >= 0 else "an unidentified replica"
    return f"{rule} Received: NaN or infinity on {who}, first in the gradient of {name or 'an unidentified variable'}."
