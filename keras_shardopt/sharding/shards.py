"""Base classes of divided optimizer state: a replica updates a part of each variable, and holds the state of that part.

Private names of Keras touched here (test_private_names.py checks that each exists):
    `Optimizer._trainable_variables`, `_var_key` - the variables of the optimizer's build.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from keras import ops

from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.backends.stored_parts import OwnParts
from keras_shardopt.numerics import Gradients, Tensor, Variable, dense
from keras_shardopt.sharding.report import MemoryReport
from keras_shardopt.update.context import CrossShardProtocol
from keras_shardopt.update.exchange import Moved
from keras_shardopt.update.reduction import Reduction
from keras_shardopt.update.transport import Transfer
from keras_shardopt.wrapping.chain import base_optimizers, descendants
from keras_shardopt.wrapping.slots import slots_of
from keras_shardopt.wrapping.wrapper import OptimizerWrapper


class Shards(abc.ABC):
    """Divides trainable variables among replicas.

    The inner optimizers are built on stand-ins: variables that contain only this replica's part of each weight.

    Args:
        optimizer: the `CrossShard`, around optimizers that are not built.
        variables: the trainable variables.
        num_replicas: int >= 2.
    """

    reduces_in_slices = True
    """Whether `move` reduces gradients to slices. Otherwise all replicas receive all gradients."""

    move: Callable[[Reduction, Transfer, Communicator], Moved]
    """Reduces gradients over replicas, and returns this replica's slices. Only with `reduces_in_slices`."""

    lays_out = False
    """Whether one program divides each array of state over its devices by a JAX sharding."""

    axes_inside: Callable[[Sequence[Variable], Sequence[int | None]], list[int | None]]
    """Maps the divided dimension of each gradient to that of the variable in `stand_ins`. Only if `lays_out`."""

    gradient_slices: Any = None
    """Describes the slices of gradients that are sent during the backward pass; None if no slices are sent then."""

    stand_ins: list[Variable]
    """For each variable, the variable that the inner optimizer updates: this replica's part, or the variable itself."""

    replica_id: int = 0
    """The number of this process's replica; 0 if one program runs all replicas."""

    _divided: Collection[int]
    """The positions of the variables that are divided."""

    def __init__(self, optimizer: CrossShardProtocol, variables: Sequence[Variable], num_replicas: int) -> None:
        self.variables = list(variables)
        self.num_replicas = num_replicas
        self._axis_name = optimizer.axis_name
        (self._leaf,) = base_optimizers(optimizer)
        self._key = optimizer._var_key
        self._positions = {self._key(v): i for i, v in enumerate(self.variables)}
        # Maps the id of a slot (state such as a momentum) to the position of its weight. Filled after the build.
        self._slots: dict[int, int] = {}

    def _position(self, variable: Variable) -> int:
        return self._positions[self._key(variable)]

    def inside(self, variables: Sequence[Variable]) -> list[Variable]:
        """Return the variables that the inner optimizer updates in place of `variables` (see `stand_ins`)."""
        return [self.stand_ins[self._position(variable)] for variable in variables]

    @property
    def copies(self) -> list[Variable]:
        """The `stand_ins` that need extra memory, because they are not the trainable variables themselves."""
        return [part for part, variable in zip(self.stand_ins, self.variables) if part is not variable]

    def _find_slots(self, optimizer: CrossShardProtocol) -> list[tuple[int, Variable]]:
        """Map state variables to weights. Return (position of the weight, state variable) for the state of wrappers."""
        optimizer.scope_inside.holds_slices = not self.lays_out
        of_leaf = [(i, slot) for i, _, slot in slots_of(self._leaf, self._leaf._trainable_variables)]
        keys = {self._key(stand_in): i for i, stand_in in enumerate(self.stand_ins)}
        of_wrappers = [
            (keys[key], slot)
            for wrapper in descendants(optimizer)
            for key, _, slot in (wrapper._own_slots() if isinstance(wrapper, OptimizerWrapper) else ())
            if key in keys
        ]
        self._slots = {id(slot): i for i, slot in [*of_leaf, *of_wrappers] if i in self._divided}
        return of_wrappers

    def check(self, replicas: Communicator) -> None:
        """Raise ValueError if the number of replicas has changed since the state was divided."""
        if replicas.num_replicas != self.num_replicas:
            raise ValueError(
                "The number of replicas must not change after the build, because each replica holds a part of the "
                f"state. Received: {replicas.num_replicas} replicas, and state divided among {self.num_replicas}. "
                "Build the model again, and load a checkpoint. A checkpoint fits any number of replicas."
            )

    def slices_of(self, grads: Gradients, variables: Sequence[Variable]) -> list[Tensor | None]:
        """Return this replica's slices of gradients that are already reduced over all replicas."""
        return [
            grad if grad is None or i not in self._divided else self._own_slice(i, flattened(grad, self.variables[i]))
            for grad, i in zip(grads, map(self._position, variables))
        ]

    @abc.abstractmethod
    def _own_slice(self, i: int, whole: Tensor) -> Tensor:
        """Return this replica's slice of a flat tensor, shaped like this replica's part of variable `i`."""

    @abc.abstractmethod
    def bind_state(self, optimizer: CrossShardProtocol) -> None:
        """Map each state variable to its weight, after the inner optimizers are built."""

    @abc.abstractmethod
    def update(self, inner: Any, grads: Gradients, variables: Sequence[Variable], replicas: Communicator) -> None:
        """Update this replica's parts of the variables with `inner`, and send the new weights to all replicas."""

    @abc.abstractmethod
    def finalize(self, inner: Any, variables: Sequence[Variable]) -> None:
        """Let the inner optimizer set the final values of weights after training, such as moving averages."""

    @abc.abstractmethod
    def is_divided(self, variable: Variable) -> bool:
        """Whether replicas hold different parts of this state variable."""

    @abc.abstractmethod
    def stored_shape(self, variable: Variable) -> tuple[int, ...] | None:
        """Return the undivided shape of a state variable; None if only another replica holds its values."""

    @abc.abstractmethod
    def stored(self, variable: Variable) -> np.ndarray:
        """Return the undivided value of a state variable. All replicas must call this together."""

    @abc.abstractmethod
    def own_parts(self, variable: Variable, process: tuple[int, int]) -> OwnParts:
        """Return the parts of a state variable that this process saves in a sharded checkpoint."""

    @abc.abstractmethod
    def assign_stored(self, variable: Variable, array: Any) -> None:
        """Assign this replica's part of an undivided array to a state variable."""

    @abc.abstractmethod
    def check_start(self, iterations: int) -> None:
        """Check, on all replicas together, that their parts of the state are from the same update.

        Raises:
            ValueError: on all replicas, if their numbers of updates differ, or if state depends on weights that differ.
        """

    @abc.abstractmethod
    def memory_report(self, state: Sequence[Variable]) -> MemoryReport:
        """Return the bytes of `state` on each replica, as far as this replica can compute them."""


class OneProgramShards(Shards):
    """Divides variables into parts of equal length, for replicas that run in one program."""

    reduces_in_slices = False

    def is_divided(self, variable: Variable) -> bool:
        return id(variable) in self._slots and len(variable.shape) > 0

    def stored_shape(self, variable: Variable) -> tuple[int, ...]:
        whole = self.variables[self._slots[id(variable)]] if self.is_divided(variable) else variable
        return tuple(whole.shape)

    def check_start(self, iterations: int) -> None:
        del iterations  # one program has loaded all parts, so all are from the same update


def flat_range(array: Any, start: int, stop: int) -> np.ndarray:
    """Return elements `start` to `stop` of a flattened array. From an array in a checkpoint, read only these."""
    if hasattr(array, "flat_range"):
        return array.flat_range(start, stop)
    return np.array(array).reshape(-1)[start:stop]


def flattened(value: Any, variable: Variable | None = None) -> Tensor:
    """Return all elements of a variable, or of its gradient, as a vector."""
    if getattr(value, "is_sparse", False) is True:  # a PyTorch tensor
        value = value.to_dense()
    return ops.reshape(ops.convert_to_tensor(dense(value, variable)), (-1,))
