"""Divides optimizer state among the devices of one program, even if no dimension is a multiple of their number.

JAX divides an array only along a dimension that is a multiple of the number of devices. Other variables get a stand-in:
a variable with the same elements, padded with zeros, and one row per device. The inner optimizer is built on the
stand-ins, so its state has their shape and is divided by rows. Files contain state in the shape of the variable.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from keras import ops

from keras_shardopt.backends import for_backend
from keras_shardopt.backends.active import placement
from keras_shardopt.backends.stored_parts import OwnParts, Part
from keras_shardopt.numerics import Tensor, Variable, dtype_of, overwrites_variable
from keras_shardopt.sharding.report import MemoryReport, item_size, laid_out_report, size_of
from keras_shardopt.sharding.separability import are_elementwise_inside, keep_exclusions
from keras_shardopt.sharding.shards import OneProgramShards, OneProgramState, flattened, stand_in_for
from keras_shardopt.update.context import CrossShardProtocol

# JAX only (otherwise None): divides a variable among devices.
_layouts: Any = for_backend({"jax": "keras_shardopt.backends.jax.placement"})

_MAX_OVER_IDEAL = 1.02
"""If no replica holds more than this multiple of an equal share, variables are not padded."""


class PaddedLayout(OneProgramShards):
    """Divides state equally among devices. It pads each variable with fewer zeros than there are devices."""

    def __init__(self, optimizer: CrossShardProtocol, variables: Sequence[Variable]) -> None:
        super().__init__(optimizer, variables, _layouts.shard_counts(variables)[1])
        self.state = _State(self, {})
        may_pad = placement.outside_strategy(lambda: self._may_pad(optimizer))
        self._divided = [i for i in _undivided(self.variables) if may_pad[i]]
        self.stand_ins = [self._stand_in(i) if i in self._divided else v for i, v in enumerate(self.variables)]
        keep_exclusions(optimizer, self.variables, self.inside)

    def _may_pad(self, optimizer: CrossShardProtocol) -> list[bool]:
        """Return, for each variable, whether padding and another shape leave its updates unchanged."""
        try:
            return are_elementwise_inside(optimizer, self.variables, part_rank=2)
        except ValueError:  # updates depend on several variables, so none can be padded
            return [False for _ in self.variables]

    def _stand_in(self, i: int) -> Variable:
        variable = self.variables[i]
        rows = _rows(flattened(variable), self.num_replicas)
        # Create the stand-in outside the distribution, because a `LayoutMap` would give it the variable's layout.
        stand_in = placement.outside_strategy(lambda: stand_in_for(variable, rows.shape, lambda *_, **__: rows))
        placement.place([stand_in], "sharded")
        return stand_in

    def bind_state(self, optimizer: CrossShardProtocol) -> None:
        slots, _ = self._find_slots(optimizer)
        self.state = _State(self, slots)

    def _own_slice(self, i: int, grad: Tensor) -> Tensor:
        is_in_rows = tuple(grad.shape) == tuple(self.stand_ins[i].shape)
        return grad if is_in_rows else _rows(flattened(grad, self.variables[i]), self.num_replicas)

    def axes_inside(self, variables: Sequence[Variable], axes: Sequence[int | None]) -> list[int | None]:
        return [0 if self._position(v) in self._divided else axis for v, axis in zip(variables, axes)]

    def _fill_stand_ins(self) -> None:
        for i in self._divided:
            self.stand_ins[i].assign(_rows(flattened(self.variables[i]), self.num_replicas))

    def _assign_from_stand_ins(self, positions: Collection[int]) -> None:
        for i in positions:
            rows = _layouts.by_rows(ops.convert_to_tensor(self.stand_ins[i]), False)
            self.variables[i].assign(_unpadded(rows, self.variables[i]))

    def finalize(self, inner: Any, variables: Sequence[Variable]) -> None:
        self._fill_stand_ins()
        inner.finalize_variable_values(self.inside(variables))
        self._assign_from_stand_ins(self._divided)


class _State(OneProgramState):
    """State in rows: each device has one row of the matrix of a padded variable."""

    def stored(self, variable: Variable) -> np.ndarray:
        value = super().stored(variable)
        return _unpadded(value, self._weight(variable)) if self.is_divided(variable) else value

    def own_parts(self, variable: Variable, process: tuple[int, int]) -> OwnParts:
        boxes = super().own_parts(variable, process)
        if not self.is_divided(variable):
            return boxes
        length, size = variable.shape[1], size_of(self._weight(variable))
        parts = []
        for (row, column), values in boxes.parts:
            for r, elements in enumerate(values, row):
                start = r * length + column
                parts.append(Part((start,), elements[: max(0, size - start)]))
        return OwnParts(self.stored_shape(variable), boxes.dtype, [part for part in parts if part.values.size])

    def assign_stored(self, variable: Variable, array: Any) -> None:
        if self.is_divided(variable):
            flat = ops.reshape(ops.convert_to_tensor(np.asarray(array), dtype_of(variable)), (-1,))
            variable.assign(_rows(flat, self._shards.num_replicas))
        else:
            super().assign_stored(variable, array)

    def memory_report(self, state: Sequence[Variable]) -> MemoryReport:
        report = laid_out_report(state)
        whole = sum(math.prod(self.stored_shape(v)) * item_size(v) for v in state)
        return MemoryReport(report.held, whole, report.replicated)


def _rows(flat: Tensor, num_devices: int) -> Tensor:
    """Return the elements of a vector, padded with zeros, as a matrix with one row per device."""
    length = -(-flat.shape[0] // num_devices)
    missing = length * num_devices - flat.shape[0]
    # Give every layout explicitly, because XLA would otherwise move elements between devices in the reshape.
    rows = ops.reshape(ops.pad(_layouts.by_rows(flat, False), (0, missing)), (num_devices, length))
    return _layouts.by_rows(rows, True)


def _unpadded(rows: Any, variable: Variable) -> Any:
    """Return the elements of such a matrix, without padding, in the shape of `variable`."""
    return rows.reshape(-1)[: size_of(variable)].reshape(tuple(variable.shape))


def needs_padding(variables: Sequence[Variable]) -> bool:
    """Whether a device would hold clearly more than an equal share of the state without padding."""
    parts, num_devices = _layouts.shard_counts(variables)
    sizes = [size_of(v) * item_size(v) for v in variables]
    return sum(size / each for size, each in zip(sizes, parts)) * num_devices > _MAX_OVER_IDEAL * sum(sizes)


def _undivided(variables: Sequence[Variable]) -> list[int]:
    """Return the positions of variables that a layout cannot divide among all devices."""
    parts, num_devices = _layouts.shard_counts(variables)
    return [
        i
        for i, (v, each) in enumerate(zip(variables, parts))
        if each < num_devices and size_of(v) > 1 and not overwrites_variable(v)
    ]
