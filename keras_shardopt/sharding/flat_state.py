"""State variables of `FlatShards` in files and reports.

Such a variable is one of four kinds:
- a slice: state of a variable that may be split, with the same elements as this replica's slice of it;
- state of a variable that stays whole, on its only owner;
- state that belongs to no variable, on the only replica where it has elements;
- state that all replicas hold.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from keras import ops

from keras_shardopt.backends import stored_parts
from keras_shardopt.backends.active import processes, runtime
from keras_shardopt.backends.stored_parts import OwnParts, Part
from keras_shardopt.numerics import Variable, dtype_of
from keras_shardopt.sharding.division import Division
from keras_shardopt.sharding.partition import Piece
from keras_shardopt.sharding.report import MemoryReport, item_size, size_of
from keras_shardopt.sharding.shards import DividedState, Shards, flattened

_MAX_ELEMENTS_SENT = 2**22
"""The maximum number of state elements sent at a time when replicas join the slices of an array."""


class FlatState(DividedState):
    """The state of `FlatShards`.

    Args:
        shards: the `FlatShards`.
        slots: maps the id of each slot of a divided variable to the variable's position.
        division: the slices of all replicas.
        without_variable: the ids of arrays of state that belong to no variable.
    """

    def __init__(
        self, shards: Shards, slots: dict[int, int], division: Division, without_variable: Collection[int]
    ) -> None:
        super().__init__(shards, slots)
        self._division = division
        self._without_variable = without_variable

    def is_divided(self, variable: Variable) -> bool:
        return id(variable) in self._without_variable or id(variable) in self._slots

    def stored_shape(self, variable: Variable) -> tuple[int, ...] | None:
        shape = tuple(variable.shape)
        if id(variable) in self._without_variable:
            return None if 0 in shape else shape
        i = self._slots.get(id(variable))
        if i is None or not shape:
            return shape
        if shape == tuple(self._shards.stand_ins[i].shape):
            return tuple(self._shards.variables[i].shape)
        return shape if i in self._division.own else None

    def stored(self, variable: Variable) -> np.ndarray:
        if not self.is_divided(variable):
            return super().stored(variable)
        i = self._slots.get(id(variable))
        if i is None:
            shapes = processes.gather_objects(tuple(variable.shape))
            holders = [r for r, shape in enumerate(shapes) if 0 not in shape]
            if len(holders) > 1:
                return super().stored(variable)  # all replicas hold this state
            owners = [(r, Piece(-1, 0, int(np.prod(shapes[r])))) for r in holders]
            shape = shapes[holders[0]] if holders else shapes[0]
        else:
            owners, shape = self._division.owners[i], self.stored_shape(variable)
            may_split = self._division.may_split[i]
            # If the state is one scalar per variable, only the first owner of a slice sends the scalar. This condition
            # must be equal on all replicas.
            if not tuple(variable.shape) and (may_split or len(self._shards.variables[i].shape)):
                owners, shape = [(owners[0][0], Piece(i, 0, 1))], ()
            elif not may_split:
                shape = processes.gather_objects(shape)[owners[0][0]]
                owners = [(owners[0][0], Piece(i, 0, int(np.prod(shape))))]
        return self._joined(variable, owners).reshape(shape)

    def _joined(self, variable: Variable, owners: Sequence[tuple[int, Piece]]) -> np.ndarray:
        """Return a flat array with the slices of a state variable that its owners send."""
        replicas = runtime.communicator(self._shards.axis_name)
        whole = None
        for replica, piece in owners:
            mine = flattened(variable) if replica == self._shards.replica_id else None
            for start in range(0, piece.size, _MAX_ELEMENTS_SENT):
                stop = min(piece.size, start + _MAX_ELEMENTS_SENT)
                part = ops.zeros((stop - start,), dtype_of(variable)) if mine is None else mine[start:stop]
                (part,) = replicas.broadcast([part], root=replica)
                array = ops.convert_to_numpy(part)
                whole = np.empty((sum(p.size for _, p in owners),), array.dtype) if whole is None else whole
                whole[piece.start + start : piece.start + stop] = array
        return np.zeros(0) if whole is None else whole

    def own_parts(self, variable: Variable, process: tuple[int, int]) -> OwnParts:
        if not self.is_divided(variable):
            return super().own_parts(variable, process)
        i, start = self._slots.get(id(variable)), 0
        shape: tuple[int, ...] | None = tuple(variable.shape)
        if i is None:
            has = [0 not in other for other in processes.gather_objects(shape)]
            if sum(has) != 1:  # not the state of a single replica, so all replicas hold it
                return super().own_parts(variable, process)
            is_owner = has[process[1]]
            shape = shape if is_owner else None
        elif shape and self._division.may_split[i]:
            shape, piece = tuple(self._shards.variables[i].shape), self._division.own.get(i)
            is_owner, start = piece is not None, 0 if piece is None else piece.start
        else:  # state of a variable that one replica updates, or a scalar
            is_owner = self._division.owners[i][0][0] == self._shards.replica_id
            shape = shape if is_owner or not shape else self.stored_shape(variable)
        parts = [Part((start,), stored_parts.host_copy(variable).reshape(-1))] if is_owner else []
        return OwnParts(shape, dtype_of(variable), parts)

    def assign_stored(self, variable: Variable, array: Any) -> None:
        i = self._slots.get(id(variable))
        if self.is_divided(variable) and 0 in variable.shape:
            return
        if i is None or not self._division.may_split[i] or not tuple(variable.shape):
            super().assign_stored(variable, array)
        else:
            piece = self._division.own[i]
            variable.assign(_flat_range(array, piece.start, piece.stop))

    def memory_report(self, state: Sequence[Variable]) -> MemoryReport:
        held = [0] * self._shards.num_replicas
        own, whole, replicated, unknown = self._shards.replica_id, 0, [], False
        for variable in state:
            i, size = self._slots.get(id(variable)), size_of(variable) * item_size(variable)
            if id(variable) in self._without_variable or self.stored_shape(variable) is None:
                unknown = True
                held[own] += size
            elif i is None or not len(variable.shape):
                held = [others + size for others in held]
                whole += size
                why = "it belongs to no variable" if len(variable.shape) else "a scalar"
                replicated.append((variable.path, size, why))
            else:
                full = int(np.prod(self.stored_shape(variable) or ()))
                whole += full * item_size(variable)
                for replica, piece in self._division.owners[i]:
                    num_elements = piece.size if self._division.may_split[i] else full
                    held[replica] += num_elements * item_size(variable)
        return MemoryReport([h if r == own or not unknown else None for r, h in enumerate(held)], whole, replicated)


def _flat_range(array: Any, start: int, stop: int) -> np.ndarray:
    """Return elements `start` to `stop` of a flattened array. From an array in a checkpoint, read only these."""
    if hasattr(array, "flat_range"):
        return array.flat_range(start, stop)
    return np.array(array).reshape(-1)[start:stop]
