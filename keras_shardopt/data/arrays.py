"""Selects this process's rows of arrays and tensors."""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np
from keras import tree

from keras_shardopt import arguments as check
from keras_shardopt.data.part import Part, permutation


def part_of_arrays(
    x: Any, y: Any, sample_weight: Any, batch_size: int | None, shuffle: bool, seed: int, part: Part
) -> Any:
    """Returns this process's rows: a `PyDataset` of batches if `batch_size` is set, otherwise arrays."""
    num_rows = _num_rows({"x": x, "y": y, "sample_weight": sample_weight})
    part.check_enough(num_rows, "rows")
    # As in the batches of `fit`, omit `y` and `sample_weight` from the end of the tuple if they are None.
    data = (x,) if y is None and sample_weight is None else (x, y) if sample_weight is None else (x, y, sample_weight)
    if batch_size is not None:
        return BatchesOfArrays(data, num_rows, batch_size, shuffle, seed, part)
    if part.num_parts > 1 or shuffle:
        rows = permutation(num_rows, seed, 0)[part.slice] if shuffle else part.slice
        data = rows_of(data, rows)
    return data[0] if len(data) == 1 else data


class BatchesOfArrays(keras.utils.PyDataset):
    """A `PyDataset` of batches with this process's rows. If `shuffle` is set, each epoch has a new order."""

    def __init__(
        self, data: tuple[Any, ...], num_rows: int, batch_size: int, shuffle: bool, seed: int, part: Part
    ) -> None:
        super().__init__()
        self._data, self._num_rows, self._batch_size = data, num_rows, batch_size
        self._shuffle, self._seed, self._part = shuffle, seed, part
        self._epoch = 0
        self._draw()

    def _draw(self) -> None:
        order = permutation(self._num_rows, self._seed, self._epoch) if self._shuffle else np.arange(self._num_rows)
        self._rows = order[self._part.slice]

    def __len__(self) -> int:
        return -(-len(self._rows) // self._batch_size)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"Batch index {index} is out of range ({len(self)} batches).")
        start = (index % len(self)) * self._batch_size
        batch: tuple[Any, ...] = rows_of(self._data, self._rows[start : start + self._batch_size])
        return batch

    def on_epoch_end(self) -> None:
        """Draws the order of the rows in the next epoch."""
        self._epoch += 1
        if self._shuffle:
            self._draw()


def _num_rows(arguments: dict[str, Any]) -> int:
    sizes: dict[str, list[int]] = {}
    for argument, nest in arguments.items():
        for leaf in tree.flatten(nest):
            if leaf is None:
                continue
            if not (hasattr(leaf, "__getitem__") or hasattr(leaf, "tocsr")) or not len(getattr(leaf, "shape", ())):
                inside = "" if leaf is nest else f" inside {check.with_article(nest)}"
                raise TypeError(
                    f"`{argument}` must be an array with rows (or lists and dicts of arrays), a `keras.utils.PyDataset`"
                    f", a torch `DataLoader` or a `tf.data.Dataset`. Received: {check.with_article(leaf)}{inside}. "
                    + _advice(leaf)
                )
            sizes.setdefault(argument, []).append(int(leaf.shape[0]))
    if "x" not in sizes:
        raise TypeError(f"`x` must hold an array. Received: x={arguments['x']!r}")
    for argument, nest in arguments.items():
        if nest is not None and argument not in sizes:
            raise TypeError(f"`{argument}` must hold an array, or be None. Received: {argument}={nest!r}")
    if len({size for of_argument in sizes.values() for size in of_argument}) > 1:
        raise ValueError(
            f"All arrays must have the same number of rows: {', '.join(f'`{argument}`' for argument in sizes)}. "
            f"Received: {sizes}. "
            "Pass arrays with one entry per example in the first dimension."
        )
    return sizes["x"][0]


def _advice(leaf: Any) -> str:
    if hasattr(leaf, "__next__"):
        return (
            "A generator that yields the same batches on every process can be split by batches: "
            "`itertools.islice(generator, process_id, None, num_processes)`."
        )
    if hasattr(leaf, "__getitem__") and hasattr(leaf, "__len__") and not isinstance(leaf, str):
        return "Put a torch `Dataset` into a `DataLoader` first."
    return "Use `numpy.asarray` on a list of rows."


def rows_of(nest: Any, rows: Any) -> Any:
    """Returns the selected rows of each array in nested lists and dicts. `rows` is a slice or an array of indices."""
    return tree.map_structure(lambda leaf: None if leaf is None else _rows_of_one(leaf, rows), nest)


def _rows_of_one(array: Any, rows: Any) -> Any:
    if hasattr(array, "iloc"):
        return array.iloc[rows]
    if hasattr(array, "tocsr"):
        return array.tocsr()[rows]
    if isinstance(rows, slice):
        return array[rows]
    library = type(array).__module__.partition(".")[0]
    if library == "tensorflow":
        return sys.modules["tensorflow"].gather(array, rows)
    if library == "torch":
        return array[sys.modules["torch"].as_tensor(rows)]
    if library == "h5py":  # it accepts only increasing indices: sort them, and undo the sort on the result
        return array[np.sort(rows)][np.argsort(np.argsort(rows))]
    return array[rows]
