"""Base classes of divided optimizer state: a replica updates a part of each variable, and holds the state of that part.

Private names of Keras touched here (test_private_names.py checks that each exists):
    `Optimizer._trainable_variables`, `_var_key` - the variables of the optimizer's build.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Sequence
from typing import Any

from keras import ops

from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.numerics import Gradients, Tensor, Variable, dense, dtype_of
from keras_shardopt.sharding.report import MemoryReport
from keras_shardopt.update.context import CrossShardProtocol
from keras_shardopt.update.exchange import Moved
from keras_shardopt.update.reduction import Reduction
from keras_shardopt.update.transport import Transfer
from keras_shardopt.wrapping.chain import base_optimizers, descendants
from keras_shardopt.wrapping.slots import named_like, slots_of
from keras_shardopt.wrapping.stored_state import StoredState
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

    axes_inside: Callable[[Sequence[Variable], Sequence[int | None]], list[int | None]]
    """Maps the divided dimension of each gradient to that of the variable in `stand_ins`. Only with JAX shardings."""

    gradient_slices: Any = None
    """Describes the slices of gradients that are sent during the backward pass; None if no slices are sent then."""

    stand_ins: list[Variable]
    """For each variable, the variable that the inner optimizer updates: this replica's part, or the variable itself."""

    replica_id: int = 0
    """The number of this process's replica; 0 if one program runs all replicas."""

    state: DividedState
    """The state of the inner optimizers; empty before `bind_state`."""

    _divided: Collection[int]
    """The positions of the variables that are divided."""

    def __init__(self, optimizer: CrossShardProtocol, variables: Sequence[Variable], num_replicas: int) -> None:
        self.variables = list(variables)
        self.num_replicas = num_replicas
        self.axis_name = optimizer.axis_name
        (self._leaf,) = base_optimizers(optimizer)
        self._key = optimizer._var_key
        self._positions = {self._key(v): i for i, v in enumerate(self.variables)}

    def _position(self, variable: Variable) -> int:
        return self._positions[self._key(variable)]

    def inside(self, variables: Sequence[Variable]) -> list[Variable]:
        """Return the variables that the inner optimizer updates in place of `variables` (see `stand_ins`)."""
        return [self.stand_ins[self._position(variable)] for variable in variables]

    @property
    def copies(self) -> list[Variable]:
        """The `stand_ins` that need extra memory, because they are not the trainable variables themselves."""
        return [part for part, variable in zip(self.stand_ins, self.variables) if part is not variable]

    def _find_slots(self, optimizer: CrossShardProtocol) -> tuple[dict[int, int], list[tuple[int, Variable]]]:
        """Map the id of each slot (state such as a momentum) of a divided variable to the variable's position.

        Return also (position of the variable, slot) for the slots of wrappers.
        """
        of_leaf = [(i, slot) for i, _, slot in slots_of(self._leaf, self._leaf._trainable_variables)]
        keys = {self._key(stand_in): i for i, stand_in in enumerate(self.stand_ins)}
        of_wrappers = [
            (keys[key], slot)
            for wrapper in descendants(optimizer)
            for key, _, slot in (wrapper._own_slots() if isinstance(wrapper, OptimizerWrapper) else ())
            if key in keys
        ]
        return {id(slot): i for i, slot in [*of_leaf, *of_wrappers] if i in self._divided}, of_wrappers

    def slices_of(self, grads: Gradients, variables: Sequence[Variable]) -> list[Tensor | None]:
        """Return this replica's slices of gradients that are already reduced over all replicas."""
        return [
            grad if grad is None or i not in self._divided else self._own_slice(i, grad)
            for grad, i in zip(grads, map(self._position, variables))
        ]

    @abc.abstractmethod
    def _own_slice(self, i: int, grad: Tensor) -> Tensor:
        """Return this replica's slice of the gradient of variable `i`, shaped like the stand-in."""

    @abc.abstractmethod
    def bind_state(self, optimizer: CrossShardProtocol) -> None:
        """Map each state variable to its weight, after the inner optimizers are built. Sets `state`."""

    @abc.abstractmethod
    def update(self, inner: Any, grads: Gradients, variables: Sequence[Variable]) -> None:
        """Update this replica's parts of the variables with `inner`, and send the new weights to all replicas."""

    @abc.abstractmethod
    def finalize(self, inner: Any, variables: Sequence[Variable]) -> None:
        """Let the inner optimizer set the final values of weights after training, such as moving averages."""

    def check_start(self, iterations: int) -> None:
        """Check, on all replicas together, that their parts of the state are from the same update.

        Raises:
            ValueError: on all replicas, if their numbers of updates differ, or if state depends on weights that differ.
        """
        del iterations  # one program loads all parts, so all are from the same update


class OneProgramShards(Shards):
    """Divides variables into parts of equal length, for replicas that run in one program."""

    reduces_in_slices = False

    def update(self, inner: Any, grads: Gradients, variables: Sequence[Variable]) -> None:
        self._fill_stand_ins()
        inner.apply(list(grads), self.inside(variables))
        given = {self._position(v) for v, grad in zip(variables, grads) if grad is not None}
        self._assign_from_stand_ins([i for i in self._divided if i in given])

    @abc.abstractmethod
    def _fill_stand_ins(self) -> None:
        """Assign the parts of the weights to the stand-ins."""

    @abc.abstractmethod
    def _assign_from_stand_ins(self, positions: Collection[int]) -> None:
        """Assign the updated stand-ins to the weights at these positions."""


class DividedState(StoredState, abc.ABC):
    """The optimizer state of one replica's slices, as files and reports read it.

    Args:
        shards: the division of the variables.
        slots: maps the id of each slot of a divided variable to the variable's position.
    """

    def __init__(self, shards: Shards, slots: dict[int, int]) -> None:
        self._shards = shards
        self._slots = slots

    @abc.abstractmethod
    def is_divided(self, variable: Variable) -> bool:
        """Whether replicas hold different parts of this state variable."""

    @abc.abstractmethod
    def memory_report(self, state: Sequence[Variable]) -> MemoryReport:
        """Return the bytes of `state` on each replica, as far as this replica can compute them."""


class OneProgramState(DividedState):
    """The state of `OneProgramShards`."""

    def is_divided(self, variable: Variable) -> bool:
        return id(variable) in self._slots and len(variable.shape) > 0

    def stored_shape(self, variable: Variable) -> tuple[int, ...]:
        return tuple((self._weight(variable) if self.is_divided(variable) else variable).shape)

    def _weight(self, slot: Variable) -> Variable:
        """Return the trainable variable that a slot belongs to."""
        return self._shards.variables[self._slots[id(slot)]]


def stand_in_for(variable: Variable, shape: Sequence[int], initializer: Any) -> Variable:
    """Return a variable of this shape that an inner optimizer updates in place of `variable`."""
    arguments = {"initializer": initializer, "shape": tuple(shape), "dtype": dtype_of(variable)}
    return named_like(variable, trainable=False, autocast=False, **arguments)


def flattened(value: Any, variable: Variable | None = None) -> Tensor:
    """Return all elements of a variable, or of its gradient, as a vector."""
    if getattr(value, "is_sparse", False) is True:  # a PyTorch tensor
        value = value.to_dense()
    return ops.reshape(ops.convert_to_tensor(dense(value, variable)), (-1,))
