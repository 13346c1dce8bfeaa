"""Optimizer state in slices of equal length, for replicas that run one program with copies of each variable.

Each trainable variable is flattened, zero-padded and split into one slice per replica. The inner optimizer is built on
stand-ins: variables with the length of a slice, in place of the weights. Each replica's copy of a stand-in, and of its
state, holds a different slice. So all replicas run the same program with the same shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import ops

from keras_shardopt.backends import for_backend, stored_parts
from keras_shardopt.backends.active import placement, runtime
from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.backends.stored_parts import OwnParts, even_parts
from keras_shardopt.numerics import Gradients, Tensor, Variable, dtype_of, overwrites_variable
from keras_shardopt.sharding.report import MemoryReport, item_size, size_of
from keras_shardopt.sharding.separability import (
    are_elementwise_inside,
    first_state,
    holds_weights,
    keep_exclusions,
)
from keras_shardopt.sharding.shards import OneProgramShards, flattened
from keras_shardopt.update.context import CrossShardProtocol
from keras_shardopt.wrapping.slots import named_like

# TensorFlow only (otherwise None): makes checkpoints join the slices that a variable's copies on replicas hold.
_copies = for_backend({"tensorflow": "keras_shardopt.backends.tensorflow.placement"})


class PaddedShards(OneProgramShards):
    """Divides each variable into slices of equal length, one per replica of this program.

    Raises:
        ValueError: if a wrapped optimizer cannot update every variable in parts.
    """

    def __init__(self, optimizer: CrossShardProtocol, variables: Sequence[Variable], num_replicas: int) -> None:
        super().__init__(optimizer, variables, num_replicas)
        self._divided = [i for i, variable in enumerate(self.variables) if not overwrites_variable(variable)]
        self._starts_with_weights = False
        placement.outside_strategy(lambda: self._try_out(optimizer))
        self._chunks = [-(-size_of(variable) // num_replicas) for variable in self.variables]
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
        arguments = {"initializer": "zeros", "shape": (self._chunks[i],), "dtype": dtype_of(variable)}
        with placement.colocate_with(variable):
            return named_like(variable, trainable=False, autocast=False, **arguments)

    def bind_state(self, optimizer: CrossShardProtocol) -> None:
        masters = self._find_slots(optimizer)
        with runtime.init_scope():
            for i, master in masters:
                placement.assign_replica_values(master, self._rows(i, placement.replica_values(self.variables[i])[0]))
            if self._starts_with_weights:
                self._start()
        for variable in filter(self.is_divided, optimizer.inner.variables):
            if _copies is not None:
                _copies.store_whole(variable, self.stored_shape(variable))

    def _start(self) -> None:
        """Initialize each replica's state from its slices of the weights, before the first update."""
        values = [placement.replica_values(variable)[0] for variable in self.variables]
        rows = [
            self._rows(i, array) if i in self._divided else [array] * self.num_replicas
            for i, array in enumerate(values)
        ]
        states = [
            placement.outside_strategy(functools.partial(first_state, self._leaf, self.variables, mine))
            for mine in zip(*rows)
        ]
        for variable, arrays in zip(self._leaf.variables, zip(*states)):
            if self.is_divided(variable):
                placement.assign_replica_values(variable, arrays)

    def _own_slice(self, i: int, whole: Tensor) -> Tensor:
        return self._slice(i, whole, runtime.communicator(self._axis_name).replica_id)

    def _slice(self, i: int, whole: Tensor, replica_id: Any) -> Tensor:
        missing = self._chunks[i] * self.num_replicas - size_of(self.variables[i])
        if missing:
            whole = ops.concatenate([whole, ops.zeros((missing,), dtype_of(whole))])
        return ops.reshape(whole, (self.num_replicas, self._chunks[i]))[replica_id]

    # -- the update ----------------------------------------------------------------------------------------------

    def update(self, inner: Any, grads: Gradients, variables: Sequence[Variable], replicas: Communicator) -> None:
        for i in self._divided:
            own = self._slice(i, flattened(self.variables[i]), replicas.replica_id)
            self.stand_ins[i].assign(own)
        inner.apply(list(grads), self.inside(variables))
        given = {self._position(v) for v, grad in zip(variables, grads) if grad is not None}
        self._all_gather_weights([i for i in self._divided if i in given], replicas)

    def _all_gather_weights(self, positions: Sequence[int], replicas: Communicator) -> None:
        for dtype in dict.fromkeys(dtype_of(self.variables[i]) for i in positions):
            alike = [i for i in positions if dtype_of(self.variables[i]) == dtype]
            own = ops.concatenate([ops.convert_to_tensor(self.stand_ins[i]) for i in alike])
            (joined,) = replicas.all_gather([own])
            rows = ops.reshape(joined, (self.num_replicas, -1))
            start = 0
            for i in alike:
                stop = start + self._chunks[i]
                variable = self.variables[i]
                whole = ops.reshape(rows[:, start:stop], (-1,))[: size_of(variable)]
                variable.assign(ops.reshape(whole, tuple(variable.shape)))
                start = stop

    def finalize(self, inner: Any, variables: Sequence[Variable]) -> None:
        for i in self._divided:
            placement.assign_replica_values(
                self.stand_ins[i], self._rows(i, placement.replica_values(self.variables[i])[0])
            )
        inner.finalize_variable_values(self.inside(variables))
        for i in self._divided:
            self.variables[i].assign(self._joined(i, self.stand_ins[i]))

    # -- files ---------------------------------------------------------------------------------------------------

    def _rows(self, i: int, array: Any) -> list[np.ndarray]:
        """Divide a whole array, padded with zeros, into one slice per replica."""
        array = np.asarray(array).reshape(-1)
        rows = np.zeros((self.num_replicas * self._chunks[i],), array.dtype)
        rows[: array.size] = array
        return list(rows.reshape(self.num_replicas, self._chunks[i]))

    def _joined(self, i: int, variable: Variable) -> np.ndarray:
        whole = np.concatenate(placement.replica_values(variable))[: size_of(self.variables[i])]
        return whole.reshape(tuple(self.variables[i].shape))

    def stored(self, variable: Variable) -> np.ndarray:
        if self.is_divided(variable):
            return self._joined(self._slots[id(variable)], variable)
        return ops.convert_to_numpy(variable)

    def own_parts(self, variable: Variable, process: tuple[int, int]) -> OwnParts:
        return even_parts(self.stored(variable), process)

    def assign_stored(self, variable: Variable, array: Any) -> None:
        if self.is_divided(variable):
            placement.assign_replica_values(variable, self._rows(self._slots[id(variable)], array))
        else:
            stored_parts.assign_stored(variable, array)

    # -- the report ----------------------------------------------------------------------------------------------

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
        return MemoryReport([held] * self.num_replicas, whole, replicated)
