"""The parts of variables that each process saves in a sharded checkpoint, and how variables read them again."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from keras import ops

from keras_shardopt.backends import for_backend
from keras_shardopt.numerics import Variable, dtype_of


class Part(NamedTuple):
    """A part of an array, on the host."""

    start: tuple[int, ...]
    """The index of the part's first element: one number per dimension, or one number in the flattened array."""

    values: np.ndarray


class OwnParts(NamedTuple):
    """The parts of an array that this process saves."""

    shape: tuple[int, ...] | None
    """The shape of the whole array. None if only another process has the array."""

    dtype: str

    parts: list[Part]

    is_flat: bool = True
    """Whether each part's `start` is an index in the flattened array."""


def even_range(size: int, process: tuple[int, int]) -> tuple[int, int]:
    """Return the start and stop of a process's share of `size` elements.

    Args:
        size: the number of elements.
        process: the number of processes, and the index of this one.
    """
    num_processes, index = process
    if size < num_processes:  # process 0 saves such a small array whole
        return (0, size if index == 0 else 0)
    return size * index // num_processes, size * (index + 1) // num_processes


_buffers: dict[tuple[np.dtype[Any], int], list[np.ndarray]] = {}
"""Arrays of completed saves, by dtype and size. The next save reuses them, because new memory takes longer."""


_copies: weakref.WeakValueDictionary[int, np.ndarray] = weakref.WeakValueDictionary()
"""All live arrays that `host_copy` has made, by `id`, to count their bytes."""


def host_copy(tensor: Any) -> np.ndarray:
    """Return a copy of a tensor in host memory."""
    values = np.asarray(ops.convert_to_numpy(tensor))
    free = _buffers.get((values.dtype, values.size))
    if not free:
        copy = values if values.flags.owndata else np.array(values)
        _copies[id(copy)] = copy
        return copy
    buffer = free.pop().reshape(values.shape)  # a view of an array that `_copies` already counts
    np.copyto(buffer, values)
    return buffer


def bytes_of_copies() -> int:
    """Return the bytes of host memory that copies for checkpoints hold now in this process."""
    return sum(copy.nbytes for copy in _copies.values())


def reuse(parts: Iterable[Part]) -> None:
    """Keep the arrays of these parts as memory for the next copies. The caller must not use the arrays any longer."""
    _buffers.clear()
    for part in parts:
        if part.values.flags.c_contiguous and part.values.flags.writeable:
            _buffers.setdefault((part.values.dtype, part.values.size), []).append(part.values)


def free_buffers() -> None:
    """Release the arrays that `reuse` keeps."""
    _buffers.clear()


def even_parts(array: np.ndarray, process: tuple[int, int]) -> OwnParts:
    """Return a copy of a process's share of an array that all processes have."""
    start, stop = even_range(array.size, process)
    is_own = start < stop or (array.size == 0 and process[1] == 0)
    parts = [Part((start,), host_copy(array.reshape(-1)[start:stop]))] if is_own else []
    return OwnParts(array.shape, str(array.dtype), parts)


# On JAX, one array can be divided among processes. Import its module here: it needs the names defined above.
_arrays = for_backend({"jax": "keras_shardopt.backends.jax.stored_parts"})


def own_parts(variable: Variable, process: tuple[int, int]) -> OwnParts:
    """Copy to the host the part of a variable that this process saves. Exactly one process saves each element.

    Args:
        variable: the variable. Each process has all of it, or on PyTorch and JAX perhaps only its shards.
        process: the number of processes, and the index of this one.
    """
    if _arrays is not None:
        return _arrays.own_parts(variable)
    shape, dtype = tuple(variable.shape), dtype_of(variable)
    # Read the value on every process, because on TensorFlow all processes must read some variables together.
    flat = ops.reshape(ops.convert_to_tensor(variable), (-1,))
    start, stop = even_range(math.prod(shape), process)
    if start == stop and process[1]:
        return OwnParts(shape, dtype, [])
    return OwnParts(shape, dtype, [Part((start,), host_copy(flat[start:stop]))])


def assign_stored(variable: Variable, array: Any) -> None:
    """Assign an array of a checkpoint to a variable. Only the elements that this process needs are read from files."""
    if _arrays is not None:
        _arrays.assign_stored(variable, array)
    else:
        variable.assign(np.asarray(array))
