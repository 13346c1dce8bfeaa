"""Batches that every process has whole, and works on a part of: contiguous rows, in the order of the processes."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import tree

from keras_shardopt.data.arrays import rows_of

_CHECKED_ELEMENTS = 2**16
"""How many elements of an array its checksum is made of, at most."""

_NOTED_ELEMENTS = 2**7
"""How many of each batch, so that it costs nothing."""


def rows_of_parts(num_rows: int, num_parts: int) -> list[int]:
    """How many rows each part has: the first ones have one more where they do not divide."""
    rows, rest = divmod(num_rows, num_parts)
    return [rows + 1] * rest + [rows] * (num_parts - rest)


def part_of_batch(batch: Any, rows: Sequence[int], index: int) -> Any:
    """The rows of one part. A part without rows gets the first row, to go through the model with.

    Raises:
        ValueError: if the arrays of the batch have different numbers of rows.
    """
    total, start = sum(rows), sum(rows[:index])
    stop = start + rows[index]
    mine = slice(start, stop) if stop > start else slice(0, 1)

    def part(nest: Any) -> Any:
        # Not `tree.map_structure`, which takes longer than the slices.
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
                "A batch that is divided among processes must have as many rows in each of its arrays. "
                f"Received: one of {total} rows, with an array of the shape {tuple(shape)}. "
                "Let each process load its own batches: `keras_shardopt.data_parallel(auto_shard=False)`."
            )
        return nest[mine]

    return part(batch)


def fingerprint(batch: Any) -> int:
    """A checksum of a few elements."""
    return checksum(batch, _NOTED_ELEMENTS)


def checksum(batch: Any, num_elements: int = _CHECKED_ELEMENTS) -> int:
    """A number that differs where batches differ; of large arrays elements at equal distances are looked at."""
    found = 0
    for leaf in tree.flatten(batch):
        if hasattr(leaf, "to_numpy"):  # of pandas, whose tables have no `dtype`
            leaf = leaf.to_numpy()
        elif hasattr(leaf, "tocsr"):
            leaf = leaf.toarray()
        if not hasattr(leaf, "dtype"):
            continue
        flat = leaf.reshape(-1) if hasattr(leaf, "reshape") else keras.ops.reshape(leaf, (-1,))
        step = -(-flat.shape[0] // num_elements) | 1  # odd, so as not to stay in one column
        values = np.ascontiguousarray(_to_numpy(flat[::step]))
        content = repr(values.tolist()).encode() if values.dtype.hasobject else values.tobytes()
        found = zlib.crc32(content, zlib.crc32(repr((tuple(leaf.shape), str(values.dtype))).encode(), found))
    return found


def _to_numpy(array: Any) -> Any:
    try:
        return np.asarray(array)  # a tenth of the time of what Keras does
    except (TypeError, RuntimeError):  # on another device, or of a dtype that NumPy lacks
        return keras.ops.convert_to_numpy(array)


def first_rows(data: Any) -> Any:
    """Of arrays the first rows, which say more than a batch that each process has drawn; None of other data."""
    if not all(leaf is None or len(getattr(leaf, "shape", ())) for leaf in tree.flatten(data)):
        return None
    return rows_of(data, slice(64))
