"""Defines `shard_data`, and chooses the function that splits each kind of data.

It finds frameworks in `sys.modules` and imports none. So a `DataLoader`, dataset or tensor works on any backend.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeVar, overload

import keras
import numpy as np
from keras import tree

from keras_shardopt import arguments as check
from keras_shardopt.backends.active import processes
from keras_shardopt.backends.patches import install
from keras_shardopt.data.arrays import part_of_arrays
from keras_shardopt.data.part import Part
from keras_shardopt.data.py_dataset import PartOfPyDataset
from keras_shardopt.data.split_data import is_split_dataset, mark_as_split
from keras_shardopt.data.tf_dataset import part_of_tf_dataset, steps_of
from keras_shardopt.data.torch_loader import part_of_loader

X = TypeVar("X")
Y = TypeVar("Y")
Weight = TypeVar("Weight")
Seed: TypeAlias = "int | None"


class _Batches(Protocol):
    """The methods by which type checkers recognize a `keras.utils.PyDataset`, because Keras has no annotations."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...
    def on_epoch_end(self) -> None: ...


@overload
def shard_data(
    x: _Batches, y: None = ..., sample_weight: None = ..., *, shuffle: bool = ..., seed: Seed = ...
) -> keras.utils.PyDataset: ...
@overload
def shard_data(
    x: X, y: None = ..., sample_weight: None = ..., *, batch_size: None = ..., shuffle: bool = ..., seed: Seed = ...
) -> X: ...
@overload
def shard_data(
    x: X, y: Y, sample_weight: None = ..., *, batch_size: None = ..., shuffle: bool = ..., seed: Seed = ...
) -> tuple[X, Y]: ...
@overload
def shard_data(
    x: X, y: Y, sample_weight: Weight, *, batch_size: None = ..., shuffle: bool = ..., seed: Seed = ...
) -> tuple[X, Y, Weight]: ...
@overload
def shard_data(
    x: Any, y: Any = ..., sample_weight: Any = ..., *, batch_size: int, shuffle: bool = ..., seed: Seed = ...
) -> keras.utils.PyDataset: ...
def shard_data(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    shuffle: bool = False,
    seed: int | None = None,
) -> Any:
    r"""Returns this process's part of the data. All processes together get every row once.

    Custom training loops always need it. `fit` of a prepared model splits every batch among the processes, so it needs
    `shard_data` only if each process should load its own part. `fit` does not split data from `shard_data` again, and
    its `batch_size` then counts the rows of one process.

    With $N$ processes, process $r$ gets the rows (or the batches, if the data comes in batches)
    $r,\ r + N,\ r + 2N, \dots$ With batches of $b$ rows, the $t$-th batches of all processes together are the rows
    $tNb$ to $(t + 1)Nb - 1$: the $t$-th batch of one process with batches of $Nb$.

    The backend provides $r$: the rank on PyTorch, `jax.process_index()` on JAX, and on TensorFlow the index of the
    worker in the strategy's cluster or `TF_CONFIG`. A single process gets its data back unchanged, even if it uses many
    devices. Call `shard_data` inside `data_parallel()` or after it, with the same data on every process.

    | `x` | returns | split by |
    |---|---|---|
    | arrays | arrays as given: `x`, `(x, y)` or `(x, y, sample_weight)` | rows |
    | arrays, with `batch_size` | a `keras.utils.PyDataset` of batches; with `shuffle` new ones each epoch | rows |
    | `keras.utils.PyDataset` | a `PyDataset` of every N-th batch | batches |
    | torch `DataLoader` | a copy with every N-th of the sampler's rows | rows; batches if it has a `batch_sampler` |
    | torch `DataLoader` of an `IterableDataset` | a copy with every N-th row of each worker's stream | rows |
    | `tf.data.Dataset` | `dataset.shard(N, r)` | elements: batches of a batched dataset, otherwise rows |

    No row is dropped or padded, except by a `drop_last=True` in your data. If N does not divide the rows, some
    processes have one row, and perhaps one batch, more than others.

    Rows and batches keep their order unless you set `shuffle`. `fit` shuffles arrays and the batches of a `PyDataset`
    unless you pass `shuffle=False` to it. Each process then shuffles its own part: no row is lost, but the batches
    differ from those of one process. Data that shuffles its rows must use the same order on every process:

    - `PyDataset.on_epoch_begin` and `on_epoch_end` run with Python's, NumPy's and PyTorch's global random numbers
      seeded from `seed` and the epoch, and restored afterwards. A `PyDataset` that shuffles in its constructor must
      use a fixed seed there.
    - The sampler of a `DataLoader` draws in the same way, also with a `generator`. Each pass through the loader is an
      epoch. An `IterableDataset` must yield the same rows on every process.
    - A `tf.data` pipeline must be deterministic: `.shuffle(..., seed=...)`, and no `deterministic=False`.

    On PyTorch inside `data_parallel()`, ranks compare the kind and length of the data, the arguments, and the seeds of
    a `tf.data` pipeline. All ranks must then call `shard_data`.

    Args:
        x: arrays or tensors with a first dimension of rows, lists or dicts of arrays, a `keras.utils.PyDataset`, a
            torch `DataLoader`, or a `tf.data.Dataset`. Every kind works on every backend.
        y: arrays, lists or dicts of targets; only if `x` has arrays.
        sample_weight: arrays, lists or dicts of weights; only if `x` has arrays.
        batch_size: int >= 1 or None (default). For arrays: the number of rows per batch on this process. None leaves
            batching to `fit`.
        shuffle: bool. True reorders rows or batches in the same order on all processes: arrays without `batch_size`
            once, other data in each epoch. Not for a `tf.data.Dataset` or `IterableDataset`.
        seed: int >= 0 or None (means 0). The seed of these orders, equal on all processes.

    Returns:
        See the table.

    Raises:
        TypeError: if `x` is of another kind; if `batch_size`, `shuffle` or `seed` has another type.
        ValueError: if arrays differ in their number of rows; if there are fewer rows (or batches) than processes; if
            `y`, `sample_weight` or `batch_size` come with other data than arrays; if a `DataLoader` has a
            `DistributedSampler`; if a `tf.data` pipeline shuffles without a seed. Every process raises the error.

    Example:
        Arrays:

        >>> import keras, numpy as np, keras_shardopt as ks
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile(ks.CrossShard(keras.optimizers.SGD(0.1)), loss="mse")
        >>> x, y = ks.shard_data(np.ones((8, 2)), np.ones((8, 1)))
        >>> validation = ks.shard_data(np.ones((4, 2)), np.ones((4, 1)))
        >>> history = model.fit(x, y, batch_size=4, validation_data=validation, verbose=0)

        Arrays in batches, shuffled in each epoch:

        >>> batches = ks.shard_data(np.ones((8, 2)), np.ones((8, 1)), batch_size=4, shuffle=True)
        >>> history = model.fit(batches, epochs=2, shuffle=False, verbose=0)

        A `PyDataset` (the same call works for a torch `DataLoader` or `tf.data.Dataset`):

        >>> class Batches(keras.utils.PyDataset):
        ...     def __len__(self):
        ...         return 3
        ...
        ...     def __getitem__(self, index):
        ...         return np.full((4, 2), index), np.ones((4, 1))
        >>> history = model.fit(ks.shard_data(Batches()), epochs=2, shuffle=False, verbose=0)
    """
    install("optimizers")  # changes `fit` of Keras to detect ranks that train separately
    _check_arguments(batch_size, shuffle, seed)
    part, seed = Part(*processes.process()), 0 if seed is None else int(seed)
    split = _splitter(x)
    _check_same_on_all_processes(x, {"batch_size": batch_size, "shuffle": shuffle, "seed": seed})
    if split is None:
        mine = part_of_arrays(x, y, sample_weight, batch_size, shuffle, seed, part)
        return mark_as_split(mine) if part.num_parts > 1 else mine
    for argument, value in (("y", y), ("sample_weight", sample_weight), ("batch_size", batch_size)):
        if value is not None:
            raise ValueError(
                f"`{argument}` requires arrays, because other data contains its own targets, weights and batches. "
                f"Received: `{argument}` with {check.with_article(x)}. Leave `{argument}` out."
            )
    if is_split_dataset(x):
        raise ValueError(
            "Data must be split only once. Received: data that `shard_data` has returned. Use that data as it is, or "
            "pass the whole data."
        )
    if part.num_parts == 1:
        return split(x, shuffle, seed, part) if shuffle else x
    return mark_as_split(split(x, shuffle, seed, part))


def _check_arguments(batch_size: Any, shuffle: Any, seed: Any) -> None:
    for argument, value, least in (("batch_size", batch_size, 1), ("seed", seed, 0)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"`{argument}` must be an int or None. Received: {argument}={value!r}")
        if value < least:
            raise ValueError(f"`{argument}` must be >= {least}. Received: {argument}={value}")
    check.flag("shuffle", shuffle)


def _splitter(x: Any) -> Callable[[Any, bool, int, Part], Any] | None:
    """Returns the function that splits data such as `x` among processes, or None for arrays."""
    if isinstance(x, keras.utils.PyDataset):
        return PartOfPyDataset
    torch_data, tensorflow = sys.modules.get("torch.utils.data"), sys.modules.get("tensorflow")
    if torch_data is not None and isinstance(x, torch_data.DataLoader):
        return part_of_loader
    if tensorflow is not None and hasattr(tensorflow, "data") and isinstance(x, tensorflow.data.Dataset):
        return part_of_tf_dataset
    return None


def _check_same_on_all_processes(x: Any, arguments: dict[str, Any]) -> None:
    size: Any = [tuple(getattr(leaf, "shape", ()))[:1] for leaf in tree.flatten(x)]
    if hasattr(x, "dataset"):
        size = len(x.dataset) if hasattr(x.dataset, "__len__") else None
    elif hasattr(x, "cardinality"):
        size = int(x.cardinality()), [(int(s._seed), int(s._seed2)) for s in steps_of(x) if hasattr(s, "_seed2")]
    elif isinstance(x, keras.utils.PyDataset):
        size = x.num_batches
    facts = processes.gather_objects({"kind": type(x).__name__, "size": size, **arguments})
    for process_id, fact in enumerate(facts):
        if fact != facts[0]:
            raise ValueError(
                "Every process must call `shard_data` with the same data and arguments. "
                f"Received on process 0: {facts[0]}, on process {process_id}: {fact}. "
                "Load the whole data on every process, and use seeds that do not depend on the process."
            )
