"""Divides optimizer state among the devices of one program, even if no dimension is a multiple of their number.

JAX divides an array only along a dimension that is a multiple of the number of devices. Other variables get a stand-in:
a variable with the same elements, padded with zeros, and one row per device. The inner optimizer is built on the
stand-ins, so its state has their shape and is divided by rows. Files contain state in the shape of the variable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import ops

from keras_shardopt.backends import for_backend, stored_parts
from keras_shardopt.backends.active import placement
from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.backends.stored_parts import OwnParts, Part
from keras_shardopt.numerics import Gradients, Tensor, Variable, dtype_of, overwrites_variable
from keras_shardopt.sharding.report import MemoryReport, item_size, laid_out_report, size_of
from keras_shardopt.sharding.separability import are_elementwise_inside, keep_exclusions
from keras_shardopt.sharding.shards import OneProgramShards, flattened
from keras_shardopt.update.context import CrossShardProtocol
from keras_shardopt.wrapping.slots import named_like
from keras_shardopt.wrapping.stored_state import whole_value

# JAX only (otherwise None): divides a variable among devices.
_layouts: Any = for_backend({"jax": "keras_shardopt.backends.jax.placement"})

_MAX_OVER_IDEAL = 1.02
"""If no replica holds more than this multiple of an equal share, variables are not padded."""


class PaddedLayout(OneProgramShards):
    """Divides state equally among devices. It pads each variable with fewer zeros than there are devices."""

    lays_out = True

    def __init__(self, optimizer: CrossShardProtocol, variables: Sequence[Variable]) -> None:
        super().__init__(optimizer, variables, _layouts.shard_counts(variables)[1])
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
        rows = self._rows(flattened(variable))
        arguments = {"shape": rows.shape, "dtype": dtype_of(variable)}
        arguments |= {"initializer": lambda *_, **__: rows, "trainable": False, "autocast": False}
        # Create the stand-in outside the distribution, because a `LayoutMap` would give it the variable's layout.
        stand_in = placement.outside_strategy(lambda: named_like(variable, **arguments))
        placement.place([stand_in], "sharded")
        return stand_in

    def _rows(self, flat: Tensor) -> Tensor:
        """Return the elements of a vector, padded with zeros, as a matrix with one row per device."""
        length = -(-flat.shape[0] // self.num_replicas)
        missing = length * self.num_replicas - flat.shape[0]
        # Give every layout explicitly, because XLA would otherwise move elements between devices in the reshape.
        rows = ops.reshape(ops.pad(_layouts.by_rows(flat, False), (0, missing)), (self.num_replicas, length))
        return _layouts.by_rows(rows, True)

    def _unpadded(self, i: int, rows: Any) -> Any:
        return rows.reshape(-1)[: size_of(self.variables[i])].reshape(tuple(self.variables[i].shape))

    def bind_state(self, optimizer: CrossShardProtocol) -> None:
        self._find_slots(optimizer)
        own = {id(v) for v in optimizer._variables}
        placement.place([v for v in optimizer.variables if id(v) not in own], "sharded")

    def slices_of(self, grads: Gradients, variables: Sequence[Variable]) -> list[Tensor | None]:
        """Return the gradients in the shapes of the variables that the inner optimizer updates."""
        inside = self.inside(variables)
        return [
            grad
            if grad is None or stand_in is v or tuple(grad.shape) == tuple(stand_in.shape)
            else self._rows(flattened(grad, v))
            for grad, v, stand_in in zip(grads, variables, inside)
        ]

    def _own_slice(self, i: int, whole: Tensor) -> Tensor:
        return self._rows(whole)

    def axes_inside(self, variables: Sequence[Variable], axes: Sequence[int | None]) -> list[int | None]:
        return [0 if self._position(v) in self._divided else axis for v, axis in zip(variables, axes)]

    def update(self, inner: Any, grads: Gradients, variables: Sequence[Variable], replicas: Communicator) -> None:
        self._fill_stand_ins()
        inner.apply(list(grads), self.inside(variables))
        given = {self._position(v) for v, grad in zip(variables, grads) if grad is not None}
        for i in given & set(self._divided):
            self._assign_from_stand_in(i)

    def _fill_stand_ins(self) -> None:
        for i in self._divided:
            self.stand_ins[i].assign(self._rows(flattened(self.variables[i])))

    def _assign_from_stand_in(self, i: int) -> None:
        rows = _layouts.by_rows(ops.convert_to_tensor(self.stand_ins[i]), False)
        self.variables[i].assign(self._unpadded(i, rows))

    def finalize(self, inner: Any, variables: Sequence[Variable]) -> None:
        self._fill_stand_ins()
        inner.finalize_variable_values(self.inside(variables))
        for i in self._divided:
            self._assign_from_stand_in(i)

    # -- files ---------------------------------------------------------------------------------------------------

    def stored(self, variable: Variable) -> np.ndarray:
        value = whole_value(variable)
        return self._unpadded(self._slots[id(variable)], value) if self.is_divided(variable) else value

    def own_parts(self, variable: Variable, process: tuple[int, int]) -> OwnParts:
        boxes = stored_parts.own_parts(variable, process)
        if not self.is_divided(variable):
            return boxes
        whole = self.variables[self._slots[id(variable)]]
        length, size = variable.shape[1], size_of(whole)
        parts = []
        for (row, column), values in boxes.parts:
            for r, elements in enumerate(values, row):
                start = r * length + column
                parts.append(Part((start,), elements[: max(0, size - start)]))
        return OwnParts(tuple(whole.shape), boxes.dtype, [part for part in parts if part.values.size])

    def assign_stored(self, variable: Variable, array: Any) -> None:
        if self.is_divided(variable):
            variable.assign(
                self._rows(ops.reshape(ops.convert_to_tensor(np.asarray(array), dtype_of(variable)), (-1,)))
            )
        else:
            stored_parts.assign_stored(variable, array)

    def memory_report(self, state: Sequence[Variable]) -> MemoryReport:
        report = laid_out_report(state)
        return MemoryReport(
            report.held, sum(math.prod(self.stored_shape(v)) * item_size(v) for v in state), report.replicated
        )


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
