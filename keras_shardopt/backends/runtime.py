"""What the package needs of a framework beyond moving tensors."""

from __future__ import annotations

import contextlib
import datetime
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_shardopt._typing import FunctionT, Tensor, Variable
from keras_shardopt.backends.communicator import Arrival, ReplicaBackend, SingleReplica
from keras_shardopt.backends.processes import World


def stopped(rule: str, replica: int, name: str | None) -> str:
    """The message of an error about a gradient that is not finite."""
    who = f"replica {replica}" if replica >= 0 else "a replica that cannot be told"
    return f"{rule} Received: NaN or infinity on {who}, first in that of {name or 'a variable that cannot be told'}."


class Framework:
    """What a framework as a whole can do, independent of any one update. The defaults know one replica only."""

    def __init__(self) -> None:
        self._watches: list[weakref.WeakSet[Any]] = []

    @contextlib.contextmanager
    def watch(self) -> Iterator[weakref.WeakSet[Any]]:
        """Collects the optimizers noticed during the block (those still alive) that count on other replicas."""
        noticed: weakref.WeakSet[Any] = weakref.WeakSet()
        self._watches.append(noticed)
        try:
            yield noticed
        finally:
            # `remove` compares what is in them, which may be the same in two.
            self._watches = [other for other in self._watches if other is not noticed]

    def notice(self, optimizer: Any) -> None:
        """Tells whoever watches that this optimizer was made."""
        for noticed in self._watches:
            noticed.add(optimizer)

    processes_start_apart: bool = False
    """Whether each of several processes makes weights of its own, which `start_equal` then makes equal."""

    updates_are_stateless: bool = False
    """Whether updates are traced as pure functions, so that inner optimizers are driven by `stateless_apply`."""

    def makes_variables_together(self) -> bool:
        """Whether processes make each variable together here, and so must agree before an optimizer makes its own."""
        return False

    def as_written(self, function: FunctionT) -> FunctionT:
        """For what is called in the steps of others: where their code is rewritten to be traced, this is left alone."""
        return function

    def replicas(self, axis_name: str) -> ReplicaBackend:
        """The replicas around the caller, at this point of the program (or of its trace)."""
        del axis_name
        return SingleReplica()

    def check_loaded(self, variables: Sequence[Variable]) -> None:
        """Warns where an optimizer that was loaded from a file trains these weights on fewer replicas than it looks."""
        del variables

    def take_over_reduction(self, optimizers: Sequence[Any]) -> None:
        """Makes these innermost optimizers keep their own reduction off inside `claim_reduction()`."""
        del optimizers

    def update_fused(self, optimizers: Sequence[Any], update: Callable[..., None], *args: Any) -> None:
        """Calls `update(*args)`, in which these innermost optimizers may update in a faster way, equal to 1e-6."""
        del optimizers
        update(*args)

    def buckets(
        self,
        replicas: ReplicaBackend,
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

    def check_ready(self, variables: Sequence[Variable], optimizers: Sequence[Any]) -> None:
        """Raises ValueError if updates of these variables by these innermost optimizers would go wrong.

        Called before each update, or before each trace of one.
        """
        del variables, optimizers

    def gradients(
        self, loss: Callable[[], Tensor], variables: Sequence[Variable], axis_name: str
    ) -> list[Tensor | None]:
        """The gradients of what `loss` returns, a scalar, of this replica alone where replicas are told apart.

        None for a variable that the loss does not depend on. What the loss assigns to other variables (moving
        statistics, seeds) is assigned, once.
        """
        grads, _ = self.gradients_and_more(lambda: (loss(), None), variables, axis_name)
        return grads

    def gradients_and_more(
        self, loss: Callable[[], tuple[Tensor, Any]], variables: Sequence[Variable], axis_name: str
    ) -> tuple[list[Tensor | None], Any]:
        """As `gradients`, for a `loss` that returns the scalar and a tensor (or None) to be handed out beside them."""
        del loss, variables, axis_name
        raise NotImplementedError("This Keras backend has no gradients. Use the tensorflow, jax or torch backend.")

    arrival_in_steps: Arrival | None = None
    """How gradients arrive in programs made by `compiled`, where that is another way than elsewhere."""

    def num_replicas_of_scope(self) -> int:
        """How many replicas have copies of a variable that is made here; 1 where that takes no scope."""
        return 1

    def check_scope(self, variables: Sequence[Variable], num_replicas: int, optimizer: Any) -> None:
        """Called before an optimizer is built that was made in a scope of so many replicas.

        Raises:
            ValueError: if these trainable variables, or the optimizer, were made where there are fewer.
        """
        del variables, num_replicas, optimizer

    def forget_scope(self) -> None:
        """Called when a scope is closed for good, and not only left: what comes next may be for one device."""

    def num_replicas_of_steps(self) -> int:
        """How many replicas a program made here by `compiled` would run on."""
        return 1

    def compiled(
        self, function: Callable[..., Tensor], variables: Sequence[Variable], jit_compile: bool | None
    ) -> Callable[..., Tensor]:
        """A training step as a program: on all replicas, with whatever variables it reads and assigns.

        Args:
            function: what each replica does with its part of the batch, given as positional arguments; keyword
                arguments are constants of the program. It returns a scalar, the mean over the rows of its part.
            variables: those that it reads and assigns, as far as known.
            jit_compile: None for the way that is usual on this backend, True for the compiler that fuses most, False
                for none.

        Returns:
            A function of the batch (arrays or tensors whose first dimension is that of the rows) and of the constants,
            that returns the mean over the replicas which this process runs.
        """
        del variables, jit_compile

        def run(*batch: Any, **constants: Any) -> Tensor:
            return function(*keras.tree.map_structure(ops.convert_to_tensor, batch), **constants)

        return run

    def when(self, condition: Any, action: Callable[[], None], variables: Sequence[Variable]) -> None:
        """Calls `action` where `condition`, a bool or a scalar bool tensor, is true.

        The action assigns `variables` only, and exchanges nothing with other replicas.
        """
        del variables
        if condition:
            action()

    def beside(self, variable: Variable) -> contextlib.AbstractContextManager[Any]:
        """A scope in which new variables are made where this one is."""
        del variable
        return contextlib.nullcontext()

    def place_state(self, variables: Sequence[Variable]) -> None:
        """Puts freshly built optimizer variables where the replicas of this program expect them."""
        del variables

    divides_state: bool = False
    """Whether each replica can have state of another shape, for a part of the variables."""

    lays_out_state: bool = False
    """Whether state is divided by a layout over the devices of one program, and optimizers need not know."""

    def num_copies(self, variables: Sequence[Variable]) -> int:
        """How many replicas of this program have a copy of their own of these variables, which copies may differ.

        Raises:
            ValueError: if they have copies that cannot differ here.
        """
        del variables
        return 1

    def copies(self, variable: Variable) -> list[np.ndarray]:
        """The values of the replicas' copies of a variable, outside of the replicas' program."""
        return [ops.convert_to_numpy(variable)]

    def assign_each(self, variable: Variable, arrays: Sequence[np.ndarray]) -> None:
        """Gives each replica's copy of a variable a value of its own, outside of the replicas' program."""
        (array,) = arrays
        variable.assign(array)

    def without_replicas(self, function: Callable[[], Any]) -> Any:
        """Calls `function()` as in a program that has no replicas."""
        return function()

    def lay_out(self, variables: Sequence[Variable]) -> None:
        """Divides these variables among the replicas, as far as their shapes allow."""
        del variables

    def check_can_lay_out(self, variables: Sequence[Variable]) -> None:
        """Raises ValueError where these weights are on several devices, but `lay_out` would not know them."""
        del variables

    def bytes_by_replica(self, variable: Variable) -> list[int]:
        """How many bytes of a variable each replica of this program holds."""
        return [ops.convert_to_numpy(variable).nbytes]

    def stored_value(self, variable: Variable) -> np.ndarray:
        """All of a variable as an array. All processes call it together where its parts lie in several."""
        return ops.convert_to_numpy(variable)

    def follow_slice(self, stand_in: Variable, variable: Variable, start: int, stop: int) -> None:
        """Gives a stand-in for a slice of a flattened variable the values that the variable has now."""
        stand_in.assign(ops.reshape(ops.reshape(ops.convert_to_tensor(variable), (-1,))[start:stop], stand_in.shape))

    def assign_slices(self, variable: Variable, slices: Sequence[Tensor]) -> None:
        """Assigns flat slices that, joined, are the whole variable."""
        variable.assign(ops.reshape(ops.concatenate(list(slices)), variable.shape))

    def meet(self, purpose: str, seconds: float, advice: str) -> None:
        """Waits until all processes have come for this purpose.

        Raises:
            RuntimeError: if some have not come after so many seconds, with the advice. Nothing else happens then.
        """
        del purpose, seconds, advice

    def update_if(
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

    def is_known(self, value: Any) -> bool:
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

    def uncompiled(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls `function(*args)`, step by step in Python where the framework does not trace updates anyway."""
        return function(*args)

    stops_in_step: bool = True
    """Whether `stop_if` ends the step that calls it, also where that is compiled."""

    def stop_if(
        self, condition: Any, culprit: Tensor, names: Sequence[str], rule: str, after: Sequence[Variable] = ()
    ) -> None:
        """Raises where the scalar bool tensor `condition` is true.

        Args:
            condition: equal on all replicas.
            culprit: an int tensor of shape `[2]`: which replica, and which of the names; -1 for unknown.
            names: what there is to name.
            rule: what the error begins with.
            after: variables whose assignments so far must have happened.

        Raises:
            FloatingPointError: with the rule, the replica and the name; inside a `tf.function`
                `tf.errors.InvalidArgumentError`.
        """
        if condition:
            replica, position = (int(i) for i in ops.convert_to_numpy(culprit))
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

    def add_to(self, variables: Sequence[Variable], values: Sequence[Tensor | None], starts: Any) -> None:
        """Adds a tensor, or nothing, to each of some variables of this replica; first to 0 where `starts` is true."""
        for variable, value in zip(variables, values):
            # In one pass, and by assignment: a NaN times zero is a NaN.
            before = ops.convert_to_tensor(variable)
            first = ops.zeros_like(before) if value is None else value
            variable.assign(ops.where(starts, first, before if value is None else before + value))

    def stack(self, variables: Sequence[Variable]) -> str | None:
        """Gives variables a first dimension with one entry per replica, where one program keeps those of all.

        Returns:
            The name of the axis of replicas; None where there is one replica only.
        """
        del variables
        return None

    def over_replicas(self, function: Callable[..., Any], stacked: Any) -> Any:
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

    def outside_trace(self) -> contextlib.AbstractContextManager[Any]:
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

    def versions(self) -> dict[str, str]:
        """The version of the framework, by its name."""
        return {}

    def process(self) -> tuple[int, int]:
        """How many processes feed data, and which of them this is, also outside `world()`."""
        return 1, 0

    outlives_its_block: bool = False
    """Whether `model.fit` needs what `world()` sets up even when it is called after the `with` block."""

    @contextlib.contextmanager
    def world(self, num_replicas: int | None, timeout: datetime.timedelta | None = None) -> Iterator[World]:
        """Sets up replicas and takes them down again. See `keras_shardopt.data_parallel`."""
        if num_replicas not in (None, 1):
            raise ValueError(
                "This Keras backend runs one replica only. "
                f"Received: num_replicas={num_replicas}. Use the tensorflow, jax or torch backend."
            )
        yield World()

    def prepare(self, model: Any, reducers_of: Callable[[Any], list[Any]]) -> None:
        """Makes the model's trainer aware of replicas where it is not. See `keras_shardopt.prepare`.

        Args:
            model: a compiled `keras.Model`.
            reducers_of: finds each `CrossShard` that an optimizer consists of, from the outside in.
        """
        del model, reducers_of

    def largest_difference(self, variables: Sequence[Variable]) -> float:
        """The largest absolute difference between any two replicas' copies of these variables."""
        del variables
        return 0.0

    def fingerprints(self, variables: Sequence[Variable]) -> np.ndarray:
        """A number for each replica's copy of each variable, made of all its bits and their places.

        Copies that differ in a single bit always differ in it. Copies that differ otherwise, also by elements that
        changed places, agree in it once in about 2**32 times. A NaN is bits like any other. All processes must call
        it together, and it returns the same on all of them.

        Returns:
            An array of unsigned integers, of shape `[num_replicas, num_variables]`. A variable of which there are no
            copies, because each replica holds another part of it, has the number 0 on all of them.

        Raises:
            ValueError: on every process, if they do not have equally many variables.
        """
        return np.zeros((1, len(variables)), "uint64")

    def alone(self, function: Callable[[], Any]) -> Any:
        """Calls `function()` so that it can make variables of its own while other processes do something else."""
        return function()

    def together(self, variable: Variable) -> contextlib.AbstractContextManager[Any]:
        """A scope for what all processes with this variable do together, also inside `alone`."""
        del variable
        return contextlib.nullcontext()

    def reads_together(self, variables: Sequence[Variable]) -> bool:
        """Whether all processes must be there when the values of these variables are read."""
        del variables
        return False

    def start_equal(self, variables: Sequence[Variable], optimizer_variables: Sequence[Variable]) -> None:
        """Gives all processes the first one's values of these variables, bit for bit.

        The default does nothing, which is right wherever one process holds all replicas.

        Raises:
            ValueError: on every process, if shapes or dtypes differ between them.
        """
        del variables, optimizer_variables

    def assign_copies(self, variables: Sequence[Variable], arrays: Sequence[np.ndarray]) -> None:
        """Assigns this process's copies of the variables, without a word to other processes."""
        for variable, array in zip(variables, arrays):
            variable.assign(array)

    def random_state(self) -> Any:
        """The state of the framework's own global random numbers here, as JSON has it; None if there are none."""
        return None

    def set_random_state(self, state: Any) -> None:
        """Takes back what `random_state` returned."""
        del state

    def draw_apart(self, variables: Sequence[Variable]) -> None:
        """Lets each replica draw other random numbers in its training steps, where all are seeded alike.

        Called when there are weights, with those that are trained.

        The default does nothing, which is right wherever the framework sees to it.
        """

    def gather_objects(self, value: Any) -> list[Any]:
        """The values of all processes, which may be of different lengths, in the order of the processes.

        All processes must call it together. It may be called while a step is being traced.
        """
        return [value]
