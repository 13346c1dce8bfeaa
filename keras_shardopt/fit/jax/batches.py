"""Batches on JAX that do not divide evenly among devices, or that several processes share.

Private names of Keras touched here (a test checks that each exists):
    `keras.src.backend.jax.trainer._distribute_data` - puts a batch on the devices.
    `keras.src.backend.jax.trainer.JAXEpochIterator` - the iterator of `fit` and `evaluate`.
    `JAXEpochIterator._get_iterator`, `EpochIterator.reset` - its batches, and the end of an epoch.
    `EpochIterator.data_adapter`, and `keras.src.trainers.data_adapters.array_data_adapter.ArrayDataAdapter` - the
        source of batches.
    `keras.src.trainers.data_adapters.data_adapter_utils.PartialBatchList` (Keras 3.16 and later) - the list of batches
        for `steps_per_execution` steps.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import keras
import numpy as np
from jax.experimental.sparse import JAXSparse
from jax.sharding import NamedSharding, PartitionSpec
from keras.src.backend.jax import trainer as jax_trainer
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

from keras_shardopt.backends.jax.communicator import num_batch_shards
from keras_shardopt.backends.jax.placement import placement
from keras_shardopt.backends.jax.processes import MADE_HERE, announce, gather_objects
from keras_shardopt.backends.keras_callers import caller_instance
from keras_shardopt.backends.models import is_prepared, layers_of
from keras_shardopt.data.shared_draws import SharedDraws, wait_for_batch_order
from keras_shardopt.fit.calls import num_rows
from keras_shardopt.fit.equal_start import optimizer_state, start_equal
from keras_shardopt.fit.shared_epoch import NEXT_BATCH, SharedEpoch
from keras_shardopt.fit.sharing import takes_whole
from keras_shardopt.fit.stateful import batch_sizes, fit_states, stateful_layers
from keras_shardopt.numerics import Tensor

_ALLOWS_UNEVEN = "_keras_shardopt_allows_uneven"
SPLITS_SEPARATE_PART = "_keras_shardopt_splits_own_part"

_distribute_in_keras = jax_trainer._distribute_data
_KerasEpochIterator = jax_trainer.JAXEpochIterator


def allow_uneven() -> None:
    """Allow batches that do not divide evenly among devices, from now on, under the active `keras.distribution`."""
    distribution = keras.distribution.distribution()
    if distribution is not None:
        vars(distribution)[_ALLOWS_UNEVEN] = True


def _check_divides(num_rows: int) -> None:
    """Raise ValueError if rows do not divide evenly among replicas, and `prepare` was not called."""
    distribution = keras.distribution.distribution()
    if distribution is None or MADE_HERE not in vars(distribution) or allows_uneven(distribution):
        return
    num_replicas = num_batch_shards(distribution) // jax.process_count()
    if num_rows % num_replicas:
        raise ValueError(
            "The number of replicas must divide the number of rows of every batch. "
            f"Received: a batch of {num_rows} rows, for {num_replicas} replicas. Call `keras_shardopt.prepare(model)` "
            "after `compile` to allow any number of rows, or leave the last rows out."
        )


def allows_uneven(distribution: Any) -> bool:
    """Whether this distribution has several replicas and allows uneven batches."""
    return distribution is not None and _ALLOWS_UNEVEN in vars(distribution) and num_batch_shards(distribution) > 1


def is_together() -> bool:
    """Whether several processes train together under a distribution that allows uneven batches."""
    return jax.process_count() > 1 and allows_uneven(keras.distribution.distribution())


@jax.tree_util.register_pytree_node_class
class PaddedBatch:
    """A batch padded with copies of its first row. Compiled steps use the static row count to remove the padding."""

    def __init__(self, data: Any, num_rows: int) -> None:
        self._data = data
        self._num_rows = num_rows

    def rows(self) -> Any:
        """Return the batch without padding rows. XLA can divide any number of rows among devices in a step."""
        return jax.tree.map(lambda leaf: leaf[: self._num_rows], self._data)

    def tree_flatten(self) -> tuple[tuple[Any], int]:
        """Return the arrays, and the number of rows without padding, as JAX requires of a pytree node."""
        return (self._data,), self._num_rows

    @classmethod
    def tree_unflatten(cls, num_rows: int, data: tuple[Any]) -> PaddedBatch:
        """Create a batch from the results of `tree_flatten`."""
        return cls(*data, num_rows)


def is_padded(data: Any) -> bool:
    """Whether a batch is, or contains, a `PaddedBatch`."""
    return any(isinstance(leaf, PaddedBatch) for leaf in jax.tree.leaves(data, is_leaf=_is_padded_batch))


def valid_rows(data: Any) -> Any:
    """Return a batch without the rows that pad it."""
    return jax.tree.map(lambda leaf: leaf.rows() if _is_padded_batch(leaf) else leaf, data, is_leaf=_is_padded_batch)


def _is_padded_batch(leaf: Any) -> bool:
    return isinstance(leaf, PaddedBatch)


_pads: contextvars.ContextVar[bool] = contextvars.ContextVar("pads_batches", default=False)


@contextlib.contextmanager
def padding_batches() -> Iterator[None]:
    """In this block, pad each batch that Keras puts on the devices if it does not divide evenly among them."""
    token = _pads.set(True)
    try:
        yield
    finally:
        _pads.reset(token)


def on_devices(data: Any) -> Any:
    """Divide the rows of a batch among devices, if one process runs all devices and uneven batches are allowed."""
    divides = jax.process_count() == 1 and allows_uneven(keras.distribution.distribution())
    return _distribute_data(data, pads=True) if divides else data


def _distribute_data(data: Any, *args: Any, pads: bool | None = None, **kwargs: Any) -> Any:
    """Replaces Keras's function that puts a batch on the devices. `data` is None if this process has no batch left."""
    pads = _pads.get() if pads is None else pads
    distribution = keras.distribution.distribution()
    if not allows_uneven(distribution):
        # Skip this check for stacks of several batches (Keras 3.16), because their first dimension is not the rows.
        if not (kwargs.get("is_super_batch") or any(args[1:])):
            _check_divides(num_rows(data))
        return _distribute_in_keras(data, *args, **kwargs)
    rows = 0 if data is None else num_rows(data)
    everywhere = [rows]
    if jax.process_count() > 1:
        everywhere = announce(NEXT_BATCH, rows)
    if not any(everywhere):
        return None
    if is_sparse(data):
        return _sparse_on_all_devices(data, distribution)
    if len(set(everywhere)) > 1 or sum(everywhere) % num_batch_shards(distribution):
        data = data if len(everywhere) == 1 else _joined(data, rows)
        return (_divided_on_devices if pads else _on_all_devices)(data, distribution)
    # Leave out entries that are None (no sample weights), because Keras's function fails on them.
    structure = jax.tree.structure(data)
    leaves = [_distribute_in_keras(leaf) for leaf in jax.tree.leaves(data)]
    return jax.tree.unflatten(structure, leaves)


def _on_all_devices(data: Any, distribution: Any) -> Any:
    """Put all rows on every device, for a step that cannot divide the batch. All devices then compute the same."""
    return _laid_out(data, distribution, PartitionSpec())


def is_sparse(data: Any) -> bool:
    """Whether a batch has sparse arrays. Their rows cannot be divided among devices."""
    return any(isinstance(leaf, JAXSparse) for leaf in keras.tree.flatten(data))


def _sparse_on_all_devices(data: Any, distribution: Any) -> Any:
    if jax.process_count() > 1:
        raise ValueError(
            "Sparse batches cannot be divided among several processes on JAX. Received: a sparse batch, and "
            f"{jax.process_count()} processes. {DENSE_ADVICE}, or use the devices of one process."
        )
    return _on_all_devices(data, distribution)


DENSE_ADVICE = "Make the batches dense (`tf.sparse.to_dense(x)`, `x.toarray()` or `x.todense()`)"


def _divided_on_devices(data: Any, distribution: Any) -> Any:
    """Divide the rows of a batch among the devices. Pad the batch if it does not divide evenly."""
    if is_sparse(data):
        return _sparse_on_all_devices(data, distribution)
    rows = num_rows(data)
    divided = PartitionSpec(distribution.batch_dim_name)
    num_missing = -rows % num_batch_shards(distribution)
    if not num_missing:
        return _laid_out(data, distribution, divided)
    leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
    if not all(len(leaf.shape) > 0 and leaf.shape[0] == rows for leaf in leaves):
        return _on_all_devices(data, distribution)

    return PaddedBatch(_laid_out(padded(data, num_missing, np), distribution, divided), rows)


def padded(data: Any, num_missing: int, numpy: Any = jax.numpy) -> Any:
    """Return the batch followed by `num_missing` copies of its first row, because zeros could be invalid input.

    `numpy` is `jax.numpy` in a compiled step, and NumPy before a step. Raises ValueError if the batch is sparse.
    """
    if is_sparse(data):
        raise ValueError(
            "On JAX, per-replica gradients need dense batches, because sparse rows cannot be divided. "
            f"Received: a sparse batch of {num_rows(data)} rows. {DENSE_ADVICE}, or leave out `extensions`, "
            "`replica_clipnorm`, `replica_transform`, compression and accumulation."
        )
    if not num_missing:
        return data

    def filled(leaf: Any) -> Any:
        leaf = numpy.asarray(leaf)
        return numpy.concatenate([leaf, numpy.repeat(leaf[:1], num_missing, axis=0)])

    return jax.tree.map(filled, data)


def _laid_out(data: Any, distribution: Any, layout: PartitionSpec) -> Any:
    """Put data on the devices, divided according to `layout`. Every process must have all of the data."""
    sharding = NamedSharding(distribution.device_mesh.backend_mesh, layout)

    def put(leaf: Any) -> Tensor:
        leaf = np.asarray(leaf)
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

    return jax.tree.map(put, data)


def _joined(data: Any, num_rows: int) -> Any:
    """Return the rows of all processes, in the order of the processes. `num_rows` is 0 if this process has no batch."""
    parts = gather_objects(jax.tree.map(np.asarray, data) if num_rows else None)
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *[part for part in parts if part is not None])


class EpochIterator(SharedEpoch, _KerasEpochIterator):  # type: ignore[misc, valid-type]
    """Yields batches until all processes have none left. A process without a batch takes part with zero rows."""

    _gather_objects, _announce = staticmethod(gather_objects), staticmethod(announce)

    def __init__(self, x: Any, *args: Any, **kwargs: Any) -> None:
        self._model = model = caller_instance()  # found on the call stack, because Keras does not pass the model
        data = (x, kwargs.get("y"), kwargs.get("sample_weight"))
        self._is_together = is_together()
        self._trains = "class_weight" in kwargs  # Keras passes it, even as None, only for training
        self._is_whole = self._is_together and model is not None and is_prepared(model)
        self._is_whole = self._is_whole and takes_whole(model, data, vars(model).get(SPLITS_SEPARATE_PART, False))
        self._is_separate = self._is_together and not self._is_whole
        self._pads = False
        self._draws = SharedDraws(self._is_whole)
        if self._is_together:
            self._check_kind(data)
        with self._draws.drawing(hasattr(x, "__next__")):
            super().__init__(x, *args, **kwargs)  # Keras reads the first batches of a generator here
        # Keras builds the model from the first batch, so do not pad that batch. `reset` sets `_pads` for later batches.
        # But `predict` (without `y`) of a built model does not call `reset`, so set `_pads` here.
        self._pads = "y" not in kwargs and self._can_pad and all(layer.built for layer in layers_of(model))
        if self._is_whole:
            wait_for_batch_order(self.data_adapter)
        # An `ArrayDataAdapter` shuffles when `parts` reads its first batch.
        self._has_arrays = isinstance(self.data_adapter, ArrayDataAdapter)
        if self._has_arrays and not kwargs.get("shuffle"):
            self._draws = SharedDraws(is_shared=False)
        self._check_sizes()
        self._agree_on_length()

    def _start_equal(self) -> None:
        if self._is_together and is_prepared(self._model):
            variables, state = list(self._model.variables), optimizer_state(self._model)
            start_equal([*variables, *state], announce, lambda _: placement.broadcast_state(variables, state))

    def _check_sizes(self) -> None:
        """Raise ValueError for invalid batch sizes, before Keras moves the weights out of the model's variables."""
        sizes = batch_sizes(self) if self._has_arrays else []
        for size in sizes:
            _check_divides(size)
        if sizes and self._can_pad and not self._is_separate:
            layers = stateful_layers(self._model)
            for size in sizes:
                fit_states(layers, [size])  # one program runs all rows, so states need as many rows as a batch

    @property
    def _can_pad(self) -> bool:
        # From Keras 3.16 on, `steps_per_execution` batches are stacked, and a stack cannot be padded.
        is_single = self.steps_per_execution == 1 or not hasattr(data_adapter_utils, "PartialBatchList")
        return is_single and self._model is not None and is_prepared(self._model)

    def reset(self) -> None:
        """Prepare the next epoch. Its batches can be padded, because the model is built."""
        super().reset()
        self._pads = self._can_pad

    def _get_iterator(self) -> Iterator[Any]:
        if not allows_uneven(keras.distribution.distribution()):
            return super()._get_iterator()
        batches = self.parts() if self._is_whole else self.batches()
        # Compare the first batch across processes now, before Keras moves the weights into the training state.
        if self._is_whole and not self._is_compared:
            first = next(batches, None)
            batches = itertools.chain([] if first is None else [first], batches)
        # Keras 3.16 treats each item as a stack of `steps_per_execution` batches, unless it is a list of batches.
        if self.steps_per_execution == 1 or not hasattr(data_adapter_utils, "PartialBatchList"):
            return batches
        lists = iter(lambda: list(itertools.islice(batches, self.steps_per_execution)), [])
        return map(data_adapter_utils.PartialBatchList, lists)

    def _place(self, data: Any, distribution: Any) -> Any:
        """Put a batch on the devices, divided by rows if possible. All processes must have the whole batch."""
        if self._pads or num_rows(data) % num_batch_shards(distribution) == 0:
            return _divided_on_devices(data, distribution)
        return _on_all_devices(data, distribution)

    def batches(self) -> Iterator[Any]:
        """Yield batches that join the rows of all processes, if each process has its own data."""
        batches = iter(self.data_adapter.get_jax_iterator())
        while (batch := _distribute_data(next(batches, None), pads=self._pads)) is not None:
            yield batch

    def parts(self) -> Iterator[Any]:
        """Yield batches that each process loads whole, divided among devices. Raise if batches of processes differ."""
        distribution = keras.distribution.distribution()
        for batch in self._whole_batches(iter(self.data_adapter.get_jax_iterator())):
            yield self._place(batch, distribution)
