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

    def disable_builtin_all_reduce(self, optimizers: Sequence[Any]) -> None:
        """Makes these innermost optimizers keep their own reduction off inside `claim_reduction()`."""
        del optimizers

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
    ) -> Any:
        """What reduces gradients of these variables while a backward pass computes them; None where nothing does.

        See `backends.torch.overlap.Buckets`. All processes must call it together.
        """
        del replicas, variables, takes_mean, bucket_bytes, compression

    def gradients(
        self, loss: Callable[[], Tensor], variables: Sequence[Variable], axis_name: str
    ) -> list[Tensor | None]:
        """The gradients of what `loss` returns, a scalar, of this replica alone where replicas are told apart.

        None for a variable that the loss does not depend on. What the loss assigns to other variables (moving
        statistics, seeds) is assigned, once.
        """
        grads, _ = self.value_and_grad(lambda: (loss(), None), variables, axis_name)
        return grads

    def value_and_grad(
        self, loss: Callable[[], tuple[Tensor, Any]], variables: Sequence[Variable], axis_name: str
    ) -> tuple[list[Tensor | None], Any]:
        """As `gradients`, for a `loss` that returns the scalar and a tensor (or None) to be handed out beside them."""
        del loss, variables, axis_name
        raise NotImplementedError("This Keras backend has no gradients. Use the tensorflow, jax or torch backend.")

    def when(self, condition: Any, action: Callable[[], None], variables: Sequence[Variable]) -> None:
        """Calls `action` where `condition`, a bool or a scalar bool tensor, is true.

        The action assigns `variables` only, and exchanges nothing with other replicas.
        """
        del variables
        if condition:
            action()

    def cond(
        self,
        condition: Tensor,
        update: Callable[[Sequence[Any]], None],
        grads: Sequence[Any],
        variables: Sequence[Variable],
    ) -> None:
        """Calls `update(grads)` where the scalar bool tensor `condition` is true; else nothing changes.

        The condition must be equal on all replicas. `update` may reduce over replicas, and must hold nothing of this
        replica but `grads`. `variables` are all that it reads or assigns.
        """
        del variables
        # Not `bool(condition)`, which costs torch.compile one more break of its graph.
        if condition:
            update(grads)

    steps_are_traced: bool = False
    """Whether Python runs once for many steps, so that it cannot keep account of any one of them."""

    def is_concrete(self, value: Any) -> bool:
        """Whether a bool or scalar tensor has its value now, and not only when what is being traced runs."""
        return True

    def is_compiling(self) -> bool:
        """Whether what runs is being compiled, with no Python left in it."""
        return False

    note: Callable[[Variable], None] | None = None
    """Called before what a loss has assigned inside `gradients` reaches a variable."""

    def is_in_reach(self, tensor: Tensor) -> bool:
        """Whether a tensor from earlier can be used here."""
        return True

    def is_further_inside(self, tensor: Tensor) -> bool:
        """Whether it is out of reach because it is of a function or a loop that was traced inside this one."""
        return False

    def copied(self, tensors: Sequence[Tensor], into: Sequence[Tensor] | None = None) -> Sequence[Tensor]:
        """Copies of tensors; where updates are neither traced nor stateless, in the memory of `into`, if given."""
        return [ops.copy(ops.convert_to_tensor(tensor)) for tensor in tensors]

    def stamp(self, counter: Variable) -> Any:
        """What `has_moved` compares: the value of a counter, or something that changes with it."""
        return ops.copy(ops.convert_to_tensor(counter))

    def has_moved(self, before: Any, after: Any) -> Any:
        """Whether a counter was changed between two stamps: a bool if that is known now, or a scalar tensor."""
        return ops.not_equal(before, after)

    def no_compile(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls `function(*args)`, step by step in Python where the framework does not trace updates anyway."""
        return function(*args)

    stops_in_step: bool = True
    """Whether `raise_if` ends the step that calls it, also where that is compiled."""

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

    def count_up(self, counter: Variable, period: int, starts_over: bool | None = None) -> tuple[Any, Any]:
        """Adds 1 to an integer scalar that starts over at `period`, or when told to.

        Args:
            counter: the scalar.
            period: what it never reaches, if it is not told.
            starts_over: whether it starts over now; None to go by the period.

        Returns:
            Whether it was 0, and whether it starts over now: bools, or scalar tensors where that is not known yet.
        """
        before = ops.copy(ops.convert_to_tensor(counter))
        is_over = ops.equal(before + 1, period) if starts_over is None else starts_over
        counter.assign(ops.where(is_over, ops.zeros_like(before), before + 1))
        return ops.equal(before, 0), is_over

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

    def gradient_of(self, function: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
        """The gradient of a function with a scalar result at `value`."""
        del function, value
        raise NotImplementedError("This Keras backend computes no gradients.")

    def init_scope(self) -> contextlib.AbstractContextManager[Any]:
        """A scope in which assignments happen now, also while a training step is being traced."""
        return contextlib.nullcontext()

    places_towers: bool = False
    """Whether parts of one step can run on several devices while the weights stay on one."""

    def place_tower(self, device: str) -> contextlib.AbstractContextManager[Any]:
        """A scope in which what is computed runs on this device."""
        del device
        return contextlib.nullcontext()

    def divide_rows(self, tensor: Tensor, num_parts: int) -> list[Tensor]:
        """A tensor in equal parts along its first dimension, which `num_parts` divides."""
        size = tensor.shape[0] // num_parts
        return [tensor[k * size : (k + 1) * size] for k in range(num_parts)]

    def running_if_divisible(
        self, tensors: Sequence[Tensor], divisor: int, rule: str, remedy: str
    ) -> contextlib.AbstractContextManager[Any]:
        """A scope in which nothing runs if `divisor` does not divide the first dimension of each tensor.

        For tensors of a size that a trace does not know. The error has `rule`, the size and `remedy`.
        """
        del tensors, divisor, rule, remedy
        return contextlib.nullcontext()
