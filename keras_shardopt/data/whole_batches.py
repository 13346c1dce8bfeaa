"""Divides batches that every process loads whole. Process 0 uses the first rows, process 1 the next rows, and so on."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import tree

from keras_shardopt.data.arrays import rows_of

_CHECKED_ELEMENTS = 2**16
"""Maximum number of elements that `checksum` reads from each array."""

_FINGERPRINT_ELEMENTS = 2**7
"""Maximum number of elements that `fingerprint` reads from each array. It is small, because every batch is checked."""


def rows_of_parts(num_rows: int, num_parts: int) -> list[int]:
    """Returns the number of rows of each part of a batch. If they cannot be equal, the first parts have one more."""
    rows, rest = divmod(num_rows, num_parts)
    return [rows + 1] * rest + [rows] * (num_parts - rest)


def part_of_batch(batch: Any, rows: Sequence[int], index: int) -> Any:
    """Returns part `index` of a batch. `rows` has the number of rows of each part.

    A part without rows gets the first row, because the model needs an input. The caller must give this row no weight.
    """
    total, start = sum(rows), sum(rows[:index])
    stop = start + rows[index]
    mine = slice(start, stop) if stop > start else slice(0, 1)

    def part(nest: Any) -> Any:
        # Loop over tuples, lists and dicts here, because `tree.map_structure` takes longer than the slices.
        kind = type(nest)
        if kind is tuple or kind is list:
            return kind([part(each) for each in nest])
        if kind is dict:
            return {name: part(each) for name, each in nest.items()}
        shape = getattr(nest, "shape", None)
        if not shape:
            return tree.map_structure(part, nest) if tree.is_nested(nest) else nest
        if shape[0] != total:
            raise ValueError(
                "All arrays of a batch that is divided among processes must have the same number of rows. "
                f"Received: a batch of {total} rows, with an array of shape {tuple(shape)}. "
                "To load separate batches on each process, use `keras_shardopt.data_parallel(auto_shard=False)`."
            )
        return nest[mine]

    return part(batch)


def fingerprint(batch: Any) -> int:
    """Returns a checksum of a few elements of each array of a batch. It is fast enough to run for every batch."""
    return checksum(batch, _FINGERPRINT_ELEMENTS)


def checksum(batch: Any, num_elements: int = _CHECKED_ELEMENTS) -> int:
    """Returns a checksum of a batch. From a large array, it reads at most `num_elements` evenly spaced elements."""
    found = 0
    for leaf in tree.flatten(batch):
        if hasattr(leaf, "to_numpy"):  # pandas tables have no `dtype`
            leaf = leaf.to_numpy()
        elif hasattr(leaf, "tocsr"):
            leaf = leaf.toarray()
        if not hasattr(leaf, "dtype"):
            continue
        flat = leaf.reshape(-1) if hasattr(leaf, "reshape") else keras.ops.reshape(leaf, (-1,))
        step = -(-flat.shape[0] // num_elements) | 1  # odd, because an even step could skip whole columns of a table
        values = np.ascontiguousarray(_to_numpy(flat[::step]))
        content = repr(values.tolist()).encode() if values.dtype.hasobject else values.tobytes()
        found = zlib.crc32(content, zlib.crc32(repr((tuple(leaf.shape), str(values.dtype))).encode(), found))
    return found


def _to_numpy(array: Any) -> Any:
    try:
        return np.asarray(array)  # ten times as fast as `convert_to_numpy`
    except (TypeError, RuntimeError):  # the array is on another device, or has a dtype that NumPy lacks
        return keras.ops.convert_to_numpy(array)


def first_rows(data: Any) -> Any:
    """Returns the first 64 rows of arrays, before any shuffling. Returns None for other data."""
    if not all(leaf is None or len(getattr(leaf, "shape", ())) for leaf in tree.flatten(data)):
        return None
    return rows_of(data, slice(64))
