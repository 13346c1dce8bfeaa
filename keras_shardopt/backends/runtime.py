"""What the package needs of a framework beyond moving tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from keras import ops

from keras_shardopt._typing import FunctionT, Tensor, Variable
from keras_shardopt.backends.communicator import Communicator, SingleReplica


def stopped(rule: str, replica: int, name: str | None) -> str:
    """The message of an error about a gradient that is not finite."""
    who = f"replica {replica}" if replica >= 0 else "a replica that cannot be told"
    return f"{rule} Received: NaN or infinity on {who}, first in that of {name or 'a variable that cannot be told'}."


class Runtime:
    """How the framework traces, branches and differentiates. The defaults are right where nothing is traced."""

    updates_are_stateless: bool = False
    """Whether updates are traced as pure functions, so that inner optimizers are driven by `stateless_apply`."""

    def no_autograph(self, function: FunctionT) -> FunctionT:
        """For what is called in the steps of others: where their code is rewritten to be traced, this is left alone."""
        return function

    def communicator(self, axis_name: str) -> Communicator:
        """The replicas around the caller, at this point of the program (or of its trace)."""
        del axis_name
        return SingleReplica()

    def update_fused(self, optimizers: Sequence[Any], update: Callable[..., None], *args: Any) -> None:
        """Calls `update(*args)`, in which these innermost optimizers may update in a faster way, equal to 1e-6."""
        del optimizers
        update(*args)

    def buckets(
        self,
        replicas: Communicator,
        variables: Sequence[Variable],
        takes_mean: bool,
        bucket_bytes: float,
        compression: str | None,
        check: Callable[[bool, float, float, int], None],
    ) -> Any:
        """What reduces gradients of these variables while a backward pass computes them; None where nothing does.

        See `replica.torch_overlap.Buckets`. All processes must call it together.
        """
        del replicas, variables, takes_mean, bucket_bytes, compression, check

    def value_and_grad(
        self,
        loss: Callable[[], tuple[Tensor, Any]],
        variables: Sequence[Variable],
        axis_name: str | None,
        before_assign: Callable[[Variable], None] | None = None,
    ) -> tuple[list[Tensor | None], Any]:
        """The gradients of a scalar, of this replica alone where replicas are told apart.

        What the loss assigns to other variables (moving statistics, seeds) is assigned, once.

        Args:
            loss: returns the scalar, and a tensor (or None) to be handed out beside the gradients.
            variables: to differentiate by.
            axis_name: of the replicas; None for what is equal on all of them, also of variables that are not trained.
            before_assign: called where assignments of the loss reach variables only after it, before each of them.

        Returns:
            The gradients, None for a variable that the loss does not depend on; and what was handed out.
        """
        del loss, variables, axis_name, before_assign
        raise NotImplementedError("This Keras backend has no gradients. Use the tensorflow, jax or torch backend.")

    def cond(
        self,
        condition: Any,
        update: Callable[[Sequence[Any]], None],
        grads: Sequence[Any],
        variables: Sequence[Variable],
        communicates: bool = True,
    ) -> None:
        """Calls `update(grads)` where `condition`, a scalar bool tensor or a bool, is true; else nothing changes.

        `variables` are all that `update` assigns. Where it `communicates` it may reduce over replicas, the condition
        must be equal on all of them, and it must hold nothing of this replica but `grads`.
        """
        del variables, communicates
        # Not `bool(condition)`, which costs torch.compile one more break of its graph.
        if condition:
            update(grads)

    def is_concrete(self, value: Any) -> bool:
        """Whether a bool or scalar tensor has its value now, and not only when what is being traced runs."""
        return True

    def version(self, variable: Variable) -> int | None:
        """A number that changes with each assignment, to be had without waiting for a device.

        None where one trace of Python stands for many steps, so that it cannot keep account of any one of them.
        """
        return None

    def copied(self, tensors: Sequence[Tensor], into: Sequence[Tensor] | None = None) -> Sequence[Tensor]:
        """Copies of tensors; where updates are neither traced nor stateless, in the memory of `into`, if given."""
        return [ops.copy(ops.convert_to_tensor(tensor)) for tensor in tensors]

    def no_compile(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls `function(*args)`, step by step in Python where the framework does not trace updates anyway."""
        return function(*args)

    def raise_if(
        self, condition: Any, nonfinite_source: Tensor, names: Sequence[str], rule: str, after: Sequence[Variable] = ()
    ) -> None:
        """Raises where the scalar bool tensor `condition` is true.

        Args:
            condition: equal on all replicas.
            nonfinite_source: an int tensor of shape `[2]`: which replica, and which of the names; -1 for unknown.
            names: what there is to name.
            rule: what the error begins with.
            after: variables whose assignments so far must have happened.

        Raises:
            FloatingPointError: with the rule, the replica and the name; inside a `tf.function`
                `tf.errors.InvalidArgumentError`.
        """
        if condition:
            replica, position = (int(i) for i in ops.convert_to_numpy(nonfinite_source))
            raise FloatingPointError(stopped(rule, replica, names[position] if position >= 0 else None))

    def add_n(self, variables: Sequence[Variable], values: Sequence[Tensor | None], starts: Any) -> None:
        """Adds a tensor, or nothing, to each of some variables of this replica; first to 0 where `starts` is true."""
        for variable, value in zip(variables, values):
            # In one pass, and by assignment: a NaN times zero is a NaN.
            before = ops.convert_to_tensor(variable)
            first = ops.zeros_like(before) if value is None else value
            variable.assign(ops.where(starts, first, before if value is None else before + value))

    def map_replicas(self, function: Callable[..., Any], stacked: Any) -> Any:
        """Calls `function(own)` on each replica with its entry of a nest of stacked tensors.

        Returns:
            What it returns, which must be equal on all replicas.
        """
        del function, stacked
        raise NotImplementedError("Nothing is stacked on this Keras backend.")

    def init_scope(self) -> contextlib.AbstractContextManager[Any]:
        """A scope in which assignments happen now, also while a training step is being traced."""
        return contextlib.nullcontext()
