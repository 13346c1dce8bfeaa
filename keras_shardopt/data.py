"""This process's part of the data.

Hides for each kind of data how it is split so that the processes together see every row once: by rows for arrays and
`DataLoader`, by batches for what comes in batches. Which framework a `DataLoader`, dataset or tensor belongs to is
looked up among what the program has imported: any of them may be used on any backend.

Private names of PyTorch and TensorFlow touched here (test_data.py holds them):
    `DataLoader._iterator` - workers that outlive an epoch, which a copy of a loader must not share.
    `Dataset._inputs`, `_seed`, `_seed2`, `_deterministic`, `_map_func` - how a `tf.data` pipeline orders its elements.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import tree

from keras_shardopt import arguments as check
from keras_shardopt._typing import Tensor
from keras_shardopt.replica import framework


@dataclasses.dataclass(frozen=True)
class _Part:
    """Every `num_parts`-th of something, from `index` on."""

    num_parts: int
    index: int

    @property
    def slice(self) -> slice:
        return slice(self.index, None, self.num_parts)

    def size(self, total: int) -> int:
        """How many of `total` things belong to this part."""
        return len(range(self.index, total, self.num_parts))

    def check_enough(self, total: int, things: str) -> None:
        if total < self.num_parts:
            raise ValueError(
                f"There must be at least one of the {things} of `x` for each process. "
                f"Received: {total} {things} for {self.num_parts} processes. Use more data or fewer processes."
            )


def shard_data(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    shuffle: bool = False,
    seed: int | None = None,
) -> Any:
    r"""Gives this process its part of the data: all processes together see every row once.

    Of $N$ processes, process $r$ gets the rows (or, of data that comes in batches, the batches)
    $r,\ r + N,\ r + 2N, \dots$ So with batches of $b$ rows, the $t$-th batches of all processes together are the rows
    $tNb$ to $(t + 1)Nb - 1$: the $t$-th batch of one process with batches of $Nb$.

    Which of how many processes this is comes from the backend: on PyTorch the rank, on JAX `jax.process_index()`, on
    TensorFlow the task in the cluster of the strategy or of `TF_CONFIG`. A single process, which on JAX and TensorFlow
    may drive many devices, gets back what it gave. Call it inside the block of `data_parallel()` or after it, with the
    same data on every process.

    | `x` | returns | split by |
    |---|---|---|
    | arrays | arrays as given: `x`, `(x, y)` or `(x, y, sample_weight)` | rows |
    | arrays, with `batch_size` | a `keras.utils.PyDataset` of batches; with `shuffle` new ones each epoch | rows |
    | `keras.utils.PyDataset` | one of every N-th batch | batches |
    | torch `DataLoader` | a copy with every N-th of the sampler's rows | rows; batches if it has a `batch_sampler` |
    | torch `DataLoader` of an `IterableDataset` | a copy with every N-th row of each worker's stream | rows |
    | `tf.data.Dataset` | `dataset.shard(N, r)` | elements: batches if it is batched, else rows |

    No row is dropped or padded, so that where N does not divide, some processes have one row, and perhaps one batch,
    more than others. (A `drop_last=True` of your own still drops.)

    Order: unless `shuffle` is set, rows and batches stay in theirs. `fit` itself shuffles arrays and the batches of a
    `PyDataset` unless it is told `shuffle=False`; each process then shuffles its own part, which loses nothing, but the
    batches are no longer those of one process. What shuffles inside the data must do so alike everywhere:

    - `PyDataset.on_epoch_begin` and `on_epoch_end` run with Python's, NumPy's and PyTorch's global random numbers
      seeded from `seed` and the epoch, and restored afterwards. What the constructor shuffles must be seeded.
    - The sampler of a `DataLoader` is drawn from in the same way, also one with a `generator`; an epoch is one
      iteration of the loader. An `IterableDataset` must give the same rows everywhere.
    - A `tf.data` pipeline must be deterministic: `.shuffle(..., seed=...)`, and no `deterministic=False`.

    On PyTorch, with the process group open (inside `data_parallel()`), ranks compare what they were given: its kind and
    length, the arguments, the seeds of a `tf.data` pipeline. All of them must call `shard_data` then.

    Args:
        x: arrays, tensors or anything else with `shape` and rows to index, also lists and dicts of them; a
            `keras.utils.PyDataset`, torch `DataLoader` or `tf.data.Dataset`. Those on any backend.
        y: targets, in the same forms as arrays; for arrays only.
        sample_weight: weights, in the same forms; for arrays only.
        batch_size: int >= 1 or None (default). For arrays: the rows of a batch of this process. None leaves batching to
            `fit`.
        shuffle: bool. True reorders rows, or batches, alike on all processes: arrays once, everything else anew each
            epoch. Not for a `tf.data.Dataset` or `IterableDataset`, which have no length to draw from.
        seed: int >= 0 or None. What orders are drawn from, equal on all processes. None means 0.

    Returns:
        See the table.

    Raises:
        TypeError: if `x` is of another kind; if `batch_size`, `shuffle` or `seed` has another type.
        ValueError: if arrays differ in their number of rows; if there are fewer rows (or batches) than processes; if
            `y`, `sample_weight` or `batch_size` come with data that has them already; if a `DataLoader` has a
            `DistributedSampler`; if a `tf.data` pipeline shuffles without a seed. Every process raises alike.

    Example:
        Arrays:

        >>> import keras, numpy as np, keras_shardopt as ks
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile(ks.CrossShard(keras.optimizers.SGD(0.1)), loss="mse")
        >>> x, y = ks.shard_data(np.ones((8, 2)), np.ones((8, 1)))
        >>> validation = ks.shard_data(np.ones((4, 2)), np.ones((4, 1)))
        >>> history = model.fit(x, y, batch_size=4, validation_data=validation, verbose=0)

        Arrays in batches, shuffled anew each epoch:

        >>> batches = ks.shard_data(np.ones((8, 2)), np.ones((8, 1)), batch_size=4, shuffle=True)
        >>> history = model.fit(batches, epochs=2, shuffle=False, verbose=0)

        A `PyDataset`; a torch `DataLoader` or `tf.data.Dataset` takes its place in the same call:

        >>> class Batches(keras.utils.PyDataset):
        ...     def __len__(self):
        ...         return 3
        ...
        ...     def __getitem__(self, index):
        ...         return np.full((4, 2), index), np.ones((4, 1))
        >>> history = model.fit(ks.shard_data(Batches()), epochs=2, shuffle=False, verbose=0)
    """
    _check_arguments(batch_size, shuffle, seed)
    part, seed = _Part(*framework.process()), 0 if seed is None else int(seed)
    of_its_own = _splitter(x)
    _check_all_were_given_alike(x, {"batch_size": batch_size, "shuffle": shuffle, "seed": seed})
    if of_its_own is None:
        return _part_of_arrays(x, y, sample_weight, batch_size, shuffle, seed, part)
    for argument, value in (("y", y), ("sample_weight", sample_weight), ("batch_size", batch_size)):
        if value is not None:
            raise ValueError(
                f"`{argument}` is for arrays: other data holds targets, weights and batches itself. "
                f"Received: `{argument}` with {check.with_article(x)}. Leave it out."
            )
    if _is_a_part(x):
        raise ValueError(
            "Data must be split once. Received: what `shard_data` has returned. Use that, or pass the whole data."
        )
    return x if part.num_parts == 1 and not shuffle else of_its_own(x, shuffle, seed, part)


def _check_arguments(batch_size: Any, shuffle: Any, seed: Any) -> None:
    for argument, value, least in (("batch_size", batch_size, 1), ("seed", seed, 0)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"`{argument}` must be an int or None. Received: {argument}={value!r}")
        if value < least:
            raise ValueError(f"`{argument}` must be >= {least}. Received: {argument}={value}")
    if not isinstance(shuffle, bool):
        raise TypeError(f"`shuffle` must be a bool. Received: shuffle={shuffle!r}")


def _splitter(x: Any) -> Callable[[Any, bool, int, _Part], Any] | None:
    """What splits data that is more than arrays."""
    if isinstance(x, keras.utils.PyDataset):
        return _PartOfPyDataset
    torch_data, tensorflow = sys.modules.get("torch.utils.data"), sys.modules.get("tensorflow")
    if torch_data is not None and isinstance(x, torch_data.DataLoader):
        return _part_of_loader
    if tensorflow is not None and hasattr(tensorflow, "data") and isinstance(x, tensorflow.data.Dataset):
        return _part_of_tf_dataset
    return None


def _check_all_were_given_alike(x: Any, arguments: dict[str, Any]) -> None:
    size: Any = [tuple(getattr(leaf, "shape", ()))[:1] for leaf in tree.flatten(x)]
    if hasattr(x, "dataset"):
        size = len(x.dataset) if hasattr(x.dataset, "__len__") else None
    elif hasattr(x, "cardinality"):
        size = int(x.cardinality()), [(int(s._seed), int(s._seed2)) for s in _steps_of(x) if hasattr(s, "_seed2")]
    elif isinstance(x, keras.utils.PyDataset):
        size = x.num_batches
    facts = framework.gather_objects({"kind": type(x).__name__, "size": size, **arguments})
    for process_id, fact in enumerate(facts):
        if fact != facts[0]:
            raise ValueError(
                "Every process must call `shard_data` with the same data and arguments. "
                f"Received on process 0: {facts[0]}, on process {process_id}: {fact}. "
                "Load the whole data everywhere, and give seeds that do not depend on the process."
            )


def _is_a_part(x: Any) -> bool:
    parts = (_BatchesOfArrays, _PartOfPyDataset, _PartOfSampler, _PartOfStream)
    return any(isinstance(getattr(x, name, x), parts) for name in ("sampler", "batch_sampler", "dataset"))


# -- orders that are the same everywhere ---------------------------------------------------------------------------


def _permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(size)


@contextlib.contextmanager
def _drawing_alike(*key: int, generators: Sequence[Any] = ()) -> Iterator[None]:
    """Seeds everybody's random numbers for the time of the block; `generators` are PyTorch's."""
    seed = int(np.random.SeedSequence(key).generate_state(1)[0])
    torch = sys.modules.get("torch")
    generators = [*generators, *([] if torch is None else [torch.default_generator])]
    before = random.getstate(), np.random.get_state(), [generator.get_state() for generator in generators]
    random.seed(seed)
    np.random.seed(seed)
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        for generator, state in zip(generators, before[2]):
            generator.set_state(state)


# -- arrays --------------------------------------------------------------------------------------------------------


def _part_of_arrays(
    x: Any, y: Any, sample_weight: Any, batch_size: int | None, shuffle: bool, seed: int, part: _Part
) -> Any:
    num_rows = _num_rows({"x": x, "y": y, "sample_weight": sample_weight})
    part.check_enough(num_rows, "rows")
    # As `fit` and PyDataset take them: no trailing None.
    data = (x,) if y is None and sample_weight is None else (x, y) if sample_weight is None else (x, y, sample_weight)
    if batch_size is not None:
        return _BatchesOfArrays(data, num_rows, batch_size, shuffle, seed, part)
    if part.num_parts > 1 or shuffle:
        rows = _permutation(num_rows, seed, 0)[part.slice] if shuffle else part.slice
        data = _rows_of(data, rows)
    return data[0] if len(data) == 1 else data


class _BatchesOfArrays(keras.utils.PyDataset):
    """The batches of this process's rows."""

    def __init__(
        self, data: tuple[Any, ...], num_rows: int, batch_size: int, shuffle: bool, seed: int, part: _Part
    ) -> None:
        super().__init__()
        self._data, self._num_rows, self._batch_size = data, num_rows, batch_size
        self._shuffle, self._seed, self._part = shuffle, seed, part
        self._epoch = 0
        self._draw()

    def _draw(self) -> None:
        order = _permutation(self._num_rows, self._seed, self._epoch) if self._shuffle else np.arange(self._num_rows)
        self._rows = order[self._part.slice]

    def __len__(self) -> int:
        return -(-len(self._rows) // self._batch_size)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"There is no batch {index} of {len(self)}.")
        start = (index % len(self)) * self._batch_size
        batch: tuple[Any, ...] = _rows_of(self._data, self._rows[start : start + self._batch_size])
        return batch

    def on_epoch_end(self) -> None:
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
            "Pass arrays whose first dimension is that of the examples."
        )
    return sizes["x"][0]


def _advice(leaf: Any) -> str:
    if hasattr(leaf, "__next__"):
        return (
            "Of a generator that yields the same on every process, take every n-th batch: "
            "`itertools.islice(generator, process_id, None, num_processes)`."
        )
    if hasattr(leaf, "__getitem__") and hasattr(leaf, "__len__") and not isinstance(leaf, str):
        return "Put a torch `Dataset` into a `DataLoader` first."
    return "Use `numpy.asarray` on a list of rows."


def _rows_of(nest: Any, rows: Any) -> Any:
    return tree.map_structure(lambda leaf: None if leaf is None else _rows_of_one(leaf, rows), nest)


def _rows_of_one(array: Tensor, rows: Any) -> Tensor:
    """The rows of a slice or of an array of positions."""
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
    if library == "h5py":  # reads rising positions only
        return array[np.sort(rows)][np.argsort(np.argsort(rows))]
    return array[rows]


# -- PyDataset -----------------------------------------------------------------------------------------------------


class _PartOfPyDataset(keras.utils.PyDataset):
    """Every n-th batch of another PyDataset."""

    def __init__(self, batches: keras.utils.PyDataset, shuffle: bool, seed: int, part: _Part) -> None:
        super().__init__(
            workers=batches.workers,
            use_multiprocessing=batches.use_multiprocessing,
            max_queue_size=batches.max_queue_size,
        )
        self._batches, self._seed, self._part = batches, seed, part
        self._epoch = 0
        self._order: np.ndarray | None = None
        self._shuffle = shuffle
        total = batches.num_batches
        if total is not None:
            part.check_enough(total, "batches")
        elif shuffle:
            raise ValueError(
                "`shuffle` needs a PyDataset that has a length. Received: shuffle=True, with a PyDataset without end. "
                "Shuffle inside it, alike on every process."
            )
        self._draw()

    def _draw(self) -> None:
        if self._shuffle:
            self._order = _permutation(self._batches.num_batches, self._seed, self._epoch)

    @property
    def num_batches(self) -> int | None:
        """How many batches this process has; None if there is no end."""
        total = self._batches.num_batches
        return None if total is None else self._part.size(total)

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError("This PyDataset has no end, and no length.")
        return self.num_batches

    def __getitem__(self, index: int) -> Any:
        position = self._part.index + index * self._part.num_parts
        return self._batches[position if self._order is None else int(self._order[position])]

    def on_epoch_begin(self) -> None:
        with _drawing_alike(self._seed, self._epoch, 0):
            self._batches.on_epoch_begin()

    def on_epoch_end(self) -> None:
        with _drawing_alike(self._seed, self._epoch, 1):
            self._batches.on_epoch_end()
        self._epoch += 1
        self._draw()


# -- torch DataLoader ----------------------------------------------------------------------------------------------


def _part_of_loader(loader: Any, shuffle: bool, seed: int, part: _Part) -> Any:
    data = sys.modules["torch.utils.data"]
    sampler, batch_sampler = loader.sampler, loader.batch_sampler
    for found in (sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
        if isinstance(found, data.DistributedSampler):
            raise ValueError(
                "A `DataLoader` must give all rows, for `shard_data` to split them. Received: one with a "
                f"{type(found).__name__}, which has split them already, and pads or drops rows where they do not "
                "divide. Leave that sampler out, and say `shuffle=True` to the `DataLoader` instead."
            )
    # A copy and not a new loader: every argument stays, also of a class of one's own. DataLoader forbids to assign.
    mine = copy.copy(loader)
    changed = mine.__dict__
    changed["_iterator"] = None
    if isinstance(loader.dataset, data.IterableDataset):
        if shuffle:
            raise ValueError(
                "`shuffle` is not for a `DataLoader` of an `IterableDataset`, which has rows in its own order only. "
                "Received: shuffle=True. Shuffle inside the dataset, alike on every process."
            )
        # The length for several workers cannot be known: it is each worker's stream that is divided.
        sized = hasattr(loader.dataset, "__len__") and loader.num_workers <= 1
        if sized:
            part.check_enough(len(loader.dataset), "rows")
        changed["dataset"] = (_PartOfSizedStream if sized else _PartOfStream)(loader.dataset, part)
    elif loader.batch_size is None and batch_sampler is not None:
        changed["batch_sampler"] = _PartOfSampler(batch_sampler, "batches", shuffle, seed, part)
    else:
        changed["sampler"] = _PartOfSampler(sampler, "rows", shuffle, seed, part)
        if batch_sampler is not None:
            changed["batch_sampler"] = data.BatchSampler(changed["sampler"], loader.batch_size, loader.drop_last)
    return mine


class _PartOfSampler:
    """Every n-th of what a sampler draws, drawn alike on every process. Each iteration is an epoch."""

    def __init__(self, sampler: Any, things: str, shuffle: bool, seed: int, part: _Part) -> None:
        if not hasattr(sampler, "__len__"):
            raise ValueError(
                "A sampler must have a length, for its part to be known. "
                f"Received: {check.with_article(sampler)} without `__len__`. Add it to the class."
            )
        part.check_enough(len(sampler), things)
        self._sampler, self._shuffle, self._seed, self._part = sampler, shuffle, seed, part
        self._epoch = 0

    def __len__(self) -> int:
        return self._part.size(len(self._sampler))

    def __iter__(self) -> Iterator[Any]:
        found = (self._sampler, getattr(self._sampler, "sampler", None))
        generators = [g for owner in found if (g := getattr(owner, "generator", None)) is not None]
        epoch, self._epoch = self._epoch, self._epoch + 1
        with _drawing_alike(self._seed, epoch, generators=generators):
            drawn = list(self._sampler)
        if self._shuffle:
            drawn = [drawn[i] for i in _permutation(len(drawn), self._seed, epoch)]
        return iter(drawn[self._part.slice])


class _PartOfStream:
    """Every n-th row of an `IterableDataset`. It has the attributes of that, which a `worker_init_fn` may set."""

    _dataset: Any
    _part: _Part

    def __init__(self, dataset: Any, part: _Part) -> None:
        self.__dict__.update(_dataset=dataset, _part=part)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._dataset), self._part.index, None, self._part.num_parts)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copying and pickling look for is ours
            raise AttributeError(name)
        return getattr(self.__dict__["_dataset"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __reduce__(self) -> Any:
        return type(self), (self._dataset, self._part)


class _PartOfSizedStream(_PartOfStream):
    def __len__(self) -> int:
        return self._part.size(len(self._dataset))


# -- tf.data -------------------------------------------------------------------------------------------------------


def _part_of_tf_dataset(dataset: Any, shuffle: bool, seed: int, part: _Part) -> Any:
    del seed
    if shuffle:
        raise ValueError(
            "`shuffle` is not for a `tf.data.Dataset`. Received: shuffle=True. "
            "Use `dataset.shuffle(buffer_size, seed=...)`, before it is batched, with the same seed on every process."
        )
    tf = sys.modules["tensorflow"]
    _check_order_is_the_same_everywhere(tf, dataset)
    cardinality = int(dataset.cardinality())
    if cardinality >= 0:
        part.check_enough(cardinality, "elements")
    options = tf.data.Options()
    options.deterministic = True
    # Or a strategy of several workers would split it once more.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options).shard(part.num_parts, part.index)


def _check_order_is_the_same_everywhere(tf: Any, dataset: Any) -> None:
    for step in _steps_of(dataset):
        if _is_unseeded(getattr(step, "_seed", 1), getattr(step, "_seed2", 1)) or _shuffles_inside(tf, step):
            raise ValueError(
                "A `tf.data.Dataset` must give its elements in the same order on every process, or rows are lost and "
                "others used twice. Received: one that shuffles without a seed. Use `.shuffle(buffer_size, seed=...)`, "
                "or `keras.utils.set_random_seed` before it is made."
            )
        if getattr(step, "_deterministic", None) == "false":
            raise ValueError(
                "A `tf.data.Dataset` must give its elements in the same order on every process, or rows are lost and "
                "others used twice. Received: one with `deterministic=False`. Leave that out."
            )


def _steps_of(dataset: Any) -> Iterator[Any]:
    """A `tf.data` pipeline's dataset, and those that it is made of."""
    yield dataset
    for before in dataset._inputs():
        yield from _steps_of(before)


def _shuffles_inside(tf: Any, step: Any) -> bool:
    """Whether the function of an `interleave` or `flat_map` makes datasets that shuffle without a seed."""
    function: Any = getattr(getattr(step, "_map_func", None), "function", None)
    operations = [] if function is None else function.graph.get_operations()
    shuffles = [op for op in operations if "ShuffleDataset" in op.type]
    return any(_is_unseeded(*[tf.get_static_value(seed) for seed in op.inputs[2:4]]) for op in shuffles)


def _is_unseeded(seed: Any, seed2: Any) -> bool:
    return seed is not None and seed2 is not None and int(seed) == 0 and int(seed2) == 0
