"""Optimizer state in slices of equal length, for replicas that run one program with copies of each variable.

Each trainable variable is flattened, zero-padded and split into one slice per replica. The inner optimizer is built on
stand-ins: variables with the length of a slice, in place of the weights. Each replica's copy of a stand-in, and of its
state, holds a different slice. So all replicas run the same program with the same shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from keras import ops

from keras_shardopt.backends import for_backend
from keras_shardopt.backends.active import placement, runtime
from keras_shardopt.backends.stored_parts import OwnParts, even_parts
from keras_shardopt.numerics import Tensor, Variable, dtype_of, overwrites_variable
from keras_shardopt.sharding.report import MemoryReport, item_size, size_of
from keras_shardopt.sharding.separability import (
    are_elementwise_inside,
    first_state,
    holds_weights,
    keep_exclusions,
)
from keras_shardopt.sharding.shards import OneProgramShards, OneProgramState, flattened, stand_in_for
from keras_shardopt.update.context import CrossShardProtocol

# TensorFlow only (otherwise None): makes checkpoints join the slices that a variable's copies on replicas hold.
_copies = for_backend({"tensorflow": "keras_shardopt.backends.tensorflow.placement"})


class PaddedShards(OneProgramShards):
    """Divides each variable into slices of equal length, one per replica of this program.

    Raises:
        ValueError: if a wrapped optimizer cannot update every variable in parts.
    """

    def __init__(self, optimizer: CrossShardProtocol, variables: Sequence[Variable], num_replicas: int) -> None:
        super().__init__(optimizer, variables, num_replicas)
        self.state = _State(self, {})
        self._divided = [i for i, variable in enumerate(self.variables) if not overwrites_variable(variable)]
        self._starts_with_weights = False
        placement.outside_strategy(lambda: self._try_out(optimizer))
        self.stand_ins = [self._stand_in(i) for i in range(len(self.variables))]
        keep_exclusions(optimizer, self.variables, self.inside)

    def _try_out(self, optimizer: CrossShardProtocol) -> None:
        may_cut = are_elementwise_inside(optimizer, self.variables)
        whole = [self.variables[i] for i in self._divided if not may_cut[i]]
        if whole:
            constrained = [variable.path for variable in whole if variable.constraint is not None]
            others = [variable.path for variable in whole if variable.constraint is None]
            problems = [f"{optimizer.inner!r}, which needs {others} whole"] if others else []
            problems += [f"constraints of {constrained}"] if constrained else []
            raise ValueError(
                "With `shard_state=True` under a TensorFlow strategy, every variable must allow updates in parts. "
                f"Received: {', and '.join(problems)}. Use `shard_state=False`; on PyTorch and JAX such state can be "
                "divided."
            )
        self._starts_with_weights = holds_weights(self._leaf, self.variables)

    # -- setup ---------------------------------------------------------------------------------------------------

    def _stand_in(self, i: int) -> Variable:
        variable = self.variables[i]
        if i not in self._divided:
            return variable
        # Start with zeros: before each update, each replica assigns its slice of the weights to its copy.
        with placement.colocate_with(variable):
            return stand_in_for(variable, (self._chunk(i),), "zeros")

    def _chunk(self, i: int) -> int:
        """Return the number of elements in each replica's slice of a variable, padding included."""
        return -(-size_of(self.variables[i]) // self.num_replicas)

    def bind_state(self, optimizer: CrossShardProtocol) -> None:
        slots, masters = self._find_slots(optimizer)
        self.state = _State(self, slots)
        with runtime.init_scope():
            for i, master in masters:
                placement.assign_replica_values(master, _rows(_value(self.variables[i]), self.num_replicas))
            if self._starts_with_weights:
                self._start()
        for variable in filter(self.state.is_divided, optimizer.inner.variables):
            if _copies is not None:
                _copies.store_whole(variable, self.state.stored_shape(variable))

    def _start(self) -> None:
        """Initialize each replica's state from its slices of the weights, before the first update."""
        values = [_value(variable) for variable in self.variables]
        rows = [
            _rows(array, self.num_replicas) if i in self._divided else [array] * self.num_replicas
            for i, array in enumerate(values)
        ]
        states = [
            placement.outside_strategy(functools.partial(first_state, self._leaf, self.variables, mine))
            for mine in zip(*rows)
        ]
        for variable, arrays in zip(self._leaf.variables, zip(*states)):
            if self.state.is_divided(variable):
                placement.assign_replica_values(variable, arrays)

    # -- the update ----------------------------------------------------------------------------------------------

    def _own_slice(self, i: int, grad: Tensor) -> Tensor:
        whole, replica_id = flattened(grad, self.variables[i]), runtime.communicator(self.axis_name).replica_id
        return self._slice(i, whole, replica_id)

    def _slice(self, i: int, whole: Tensor, replica_id: Any) -> Tensor:
        missing = self._chunk(i) * self.num_replicas - size_of(self.variables[i])
        if missing:
            whole = ops.concatenate([whole, ops.zeros((missing,), dtype_of(whole))])
        return ops.reshape(whole, (self.num_replicas, self._chunk(i)))[replica_id]

    def _fill_stand_ins(self) -> None:
        replica_id = runtime.communicator(self.axis_name).replica_id
        for i in self._divided:
            self.stand_ins[i].assign(self._slice(i, flattened(self.variables[i]), replica_id))

    def _assign_from_stand_ins(self, positions: Collection[int]) -> None:
        replicas = runtime.communicator(self.axis_name)
        for dtype in dict.fromkeys(dtype_of(self.variables[i]) for i in positions):
            alike = [i for i in positions if dtype_of(self.variables[i]) == dtype]
            own = ops.concatenate([ops.convert_to_tensor(self.stand_ins[i]) for i in alike])
            (joined,) = replicas.all_gather([own])
            rows = ops.reshape(joined, (self.num_replicas, -1))
            start = 0
            for i in alike:
                stop, variable = start + self._chunk(i), self.variables[i]
                whole = ops.reshape(rows[:, start:stop], (-1,))[: size_of(variable)]
                variable.assign(ops.reshape(whole, tuple(variable.shape)))
                start = stop

    def finalize(self, inner: Any, variables: Sequence[Variable]) -> None:
        # Training has ended, and this code is outside the replicas: it reads and assigns all of their copies.
        for i in self._divided:
            rows = _rows(_value(self.variables[i]), self.num_replicas)
            placement.assign_replica_values(self.stand_ins[i], rows)
        inner.finalize_variable_values(self.inside(variables))
        for i in self._divided:
            self.variables[i].assign(_joined(self.stand_ins[i], self.variables[i]))


class _State(OneProgramState):
    """State in the copies of variables: each replica's copy is its slice."""

    def stored(self, variable: Variable) -> np.ndarray:
        return _joined(variable, self._weight(variable)) if self.is_divided(variable) else super().stored(variable)

    def own_parts(self, variable: Variable, process: tuple[int, int]) -> OwnParts:
        return even_parts(self.stored(variable), process)

    def assign_stored(self, variable: Variable, array: Any) -> None:
        if self.is_divided(variable):
            placement.assign_replica_values(variable, _rows(array, self._shards.num_replicas))
        else:
            super().assign_stored(variable, array)

    def memory_report(self, state: Sequence[Variable]) -> MemoryReport:
        held = whole = 0
        replicated = []
        for variable in state:
            size = size_of(variable) * item_size(variable)
            held += size
            whole += int(np.prod(self.stored_shape(variable))) * item_size(variable)
            if not self.is_divided(variable):
                why = "a scalar" if not len(variable.shape) else "it belongs to no variable that is divided"
                replicated.append((variable.path, size, why))
        return MemoryReport([held] * self._shards.num_replicas, whole, replicated)


def _value(variable: Variable) -> np.ndarray:
    return placement.replica_values(variable)[0]


def _rows(whole: Any, num_replicas: int) -> list[np.ndarray]:
    """Divide an array, flattened and padded with zeros, into one slice per replica."""
    flat = np.asarray(whole).reshape(-1)
    rows = np.zeros((num_replicas, -(-flat.size // num_replicas)), flat.dtype)
    rows.reshape(-1)[: flat.size] = flat
    return list(rows)


def _joined(slices: Variable, variable: Variable) -> np.ndarray:
    """Join the slices of all replicas to an array with the shape of `variable`."""
    whole = np.concatenate(placement.replica_values(slices))[: size_of(variable)]
    return whole.reshape(tuple(variable.shape))
