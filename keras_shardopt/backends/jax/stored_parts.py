"""The parts of JAX arrays that each process saves in a sharded checkpoint.

Private names of Keras touched here (a test checks that each exists):
    `Variable._value` - the array of a variable.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from keras_shardopt.backends.jax.placement import local_shards
from keras_shardopt.backends.stored_parts import OwnParts, Part, even_range, host_copy
from keras_shardopt.numerics import Variable


def own_parts(variable: Variable) -> OwnParts:
    """Copy the shards that this process saves. Processes with copies of the same shard each save a part of it."""
    value = variable.value
    boxes: dict[tuple[tuple[int, int], ...], set[int]] = {}
    for device, index in value.sharding.devices_indices_map(value.shape).items():
        boxes.setdefault(_box(index, value.shape), set()).add(device.process_index)
    parts: dict[Any, Part] = {}
    for shard in local_shards(value):
        box = _box(shard.index, value.shape)
        if box not in parts:  # take only one of several copies in this process
            parts[box] = _share(shard.data, box, sorted(boxes[box]))
    own = [part for part in parts.values() if part.values.size or not value.size]
    return OwnParts(value.shape, str(value.dtype), own, is_flat=False)


def assign_stored(variable: Variable, array: Any) -> None:
    """Assign an array of a checkpoint to a variable. If processes hold shards, each reads only its shards."""
    value = variable.value
    if value.is_fully_addressable or value.is_fully_replicated:
        variable.assign(np.asarray(array))
    else:
        read = functools.partial(_read, array, value.dtype)
        variable._value = jax.make_array_from_callback(value.shape, value.sharding, read)


def _box(index: Sequence[slice], shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the start and stop of a shard along each dimension."""
    return tuple(s.indices(size)[:2] for s, size in zip(index, shape))


def _share(data: Any, box: Sequence[tuple[int, int]], holders: Sequence[int]) -> Part:
    """Return this process's share of a shard. `box` is the shard's place, and `holders` the processes with a copy."""
    start = [first for first, _ in box]
    own = [slice(None)] * len(box)
    place = (len(holders), holders.index(jax.process_index()))
    axis = int(np.argmax(data.shape)) if box else 0
    first, last = even_range(data.shape[axis] if box else 1, place)
    if box:
        own[axis] = slice(first, last)
        start[axis] += first
    values = host_copy(data[tuple(own)])
    return Part(tuple(start), values if first < last or not data.size else values.reshape(-1)[:0])


def _read(array: Any, dtype: Any, index: tuple[slice, ...]) -> np.ndarray:
    return np.asarray(array[index]).astype(dtype)
