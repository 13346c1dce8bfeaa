"""The batches of a model on JAX: rows that the devices cannot divide, and those of several processes.

Private names of Keras touched here (a test holds each of them):
    `keras.src.backend.jax.trainer._distribute_data` - puts a batch on the devices.
    `keras.src.backend.jax.trainer.JAXEpochIterator` - what `fit` and `evaluate` iterate over.
    `JAXEpochIterator._get_iterator`, `__next__`, `EpochIterator.__iter__`, `reset`, `_num_batches` - its batches, the
        beginning and the end of an epoch, and how many batches there are.
    `EpochIterator.data_adapter`, and `keras.src.trainers.data_adapters.array_data_adapter.ArrayDataAdapter` - where
        batches come from, and how many there are.
    `keras.src.trainers.data_adapters.data_adapter_utils.PartialBatchList` (Keras 3.16 and later) - batches that one
        execution takes one after the other.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import zlib
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

from keras_shardopt.backends.jax.communicator import batch_size_of
from keras_shardopt.backends.jax.placement import placement
from keras_shardopt.backends.jax.processes import MADE_HERE, gather_objects, tell
from keras_shardopt.backends.keras_callers import caller_instance
from keras_shardopt.backends.models import is_prepared, layers_of, optimizers_of
from keras_shardopt.data.shared_draws import SharedDraws, wait_for_batch_order
from keras_shardopt.data.split_data import is_from_shard_data, is_split
from keras_shardopt.data.whole_batches import checksum, fingerprint, first_rows
from keras_shardopt.fit.calls import num_rows, warn_of_unequal_start
from keras_shardopt.fit.sharing import check_alike, check_batches, check_kinds, sharing_of, warn_of_same_parts
from keras_shardopt.fit.stateful import batch_sizes, fit_states, stateful_layers
from keras_shardopt.numerics import Tensor
from keras_shardopt.wrapping.chain import shared_variables

_TAKES_UNEVEN = "_keras_shardopt_takes_uneven"
SPLITS_OWN_PART = "_keras_shardopt_splits_own_part"
_NEXT_BATCH = "takes the next batch of a prepared model"

_distribute_in_keras = jax_trainer._distribute_data
_KerasEpochIterator = jax_trainer.JAXEpochIterator


def take_uneven() -> None:
    """From now on batches need not divide under the active distribution."""
    distribution = keras.distribution.distribution()
    if distribution is not None:
        vars(distribution)[_TAKES_UNEVEN] = True


def _check_divides(num_rows: int) -> None:
    """Raises ValueError where `data_parallel` has divided the rows of batches, and these rows do not divide."""
    distribution = keras.distribution.distribution()
    if distribution is None or MADE_HERE not in vars(distribution) or takes_uneven(distribution):
        return
    num_replicas = batch_size_of(distribution) // jax.process_count()
    if num_rows % num_replicas:
        raise ValueError(
            "The number of rows of every batch must divide by the number of replicas. "
            f"Received: a batch of {num_rows} rows, for {num_replicas} replicas. Call `keras_shardopt.prepare(model)` "
            "after `compile`, and any number of rows will do; or leave the last rows out."
        )


def takes_uneven(distribution: Any) -> bool:
    """Whether batches need not divide under this distribution, which has several replicas."""
    return distribution is not None and _TAKES_UNEVEN in vars(distribution) and batch_size_of(distribution) > 1


def is_together() -> bool:
    """Whether several processes go through the batches of a prepared model together."""
    return jax.process_count() > 1 and takes_uneven(keras.distribution.distribution())


@jax.tree_util.register_pytree_node_class
class FilledUp:
    """A batch in which the first row is repeated at the end, so that the devices can divide it.

    How many rows count is no value but part of the structure, so that a step which is traced with a batch knows it.
    """

    def __init__(self, data: Any, num_rows: int) -> None:
        self._data = data
        self._num_rows = num_rows

    def rows(self) -> Any:
        """The rows that count. Within one program each device still has its own: XLA fills up by itself, and masks."""
        return jax.tree.map(lambda leaf: leaf[: self._num_rows], self._data)

    def tree_flatten(self) -> tuple[tuple[Any], int]:
        """See `jax.tree_util.register_pytree_node_class`."""
        return (self._data,), self._num_rows

    @classmethod
    def tree_unflatten(cls, num_rows: int, data: tuple[Any]) -> FilledUp:
        """See `jax.tree_util.register_pytree_node_class`."""
        return cls(*data, num_rows)


def is_filled_up(data: Any) -> bool:
    """Whether a batch, or a part of it, is."""
    return any(isinstance(leaf, FilledUp) for leaf in jax.tree.leaves(data, is_leaf=_is_filled_up))


def rows_that_count(data: Any) -> Any:
    """A batch as a step has it, without what fills it up."""
    return jax.tree.map(lambda leaf: leaf.rows() if _is_filled_up(leaf) else leaf, data, is_leaf=_is_filled_up)


def _is_filled_up(leaf: Any) -> bool:
    return isinstance(leaf, FilledUp)


_fills_up: contextvars.ContextVar[bool] = contextvars.ContextVar("fills_up", default=False)


@contextlib.contextmanager
def filling_up() -> Iterator[None]:
    """Within it batches that Keras puts on the devices itself are filled up."""
    token = _fills_up.set(True)
    try:
        yield
    finally:
        _fills_up.reset(token)


def on_devices(data: Any) -> Any:
    """A batch with which each device gets its rows, if devices divide batches here; on one process."""
    divides = jax.process_count() == 1 and takes_uneven(keras.distribution.distribution())
    return _distribute_data(data, fills_up=True) if divides else data


def _distribute_data(data: Any, *args: Any, fills_up: bool | None = None, **kwargs: Any) -> Any:
    """Stands in for Keras' function of that name. `data` is None where this process has no batch left."""
    fills_up = _fills_up.get() if fills_up is None else fills_up
    distribution = keras.distribution.distribution()
    if not takes_uneven(distribution):
        # Of several batches that Keras 3.16 has stacked the first dimension counts the batches.
        if not (kwargs.get("is_super_batch") or any(args[1:])):
            _check_divides(num_rows(data))
        return _distribute_in_keras(data, *args, **kwargs)
    rows = 0 if data is None else num_rows(data)
    everywhere = [rows]
    if jax.process_count() > 1:
        everywhere = tell(_NEXT_BATCH, rows)
    if not any(everywhere):
        return None
    if is_sparse(data):
        return _sparse_on_all_devices(data, distribution)
    if len(set(everywhere)) > 1 or sum(everywhere) % batch_size_of(distribution):
        data = data if len(everywhere) == 1 else _joined(data, rows)
        return (_filled_up if fills_up else _on_all_devices)(data, distribution)
    # Without the entries that are None (no sample weights), on which Keras fails here.
    structure = jax.tree.structure(data)
    leaves = [_distribute_in_keras(leaf) for leaf in jax.tree.leaves(data)]
    return jax.tree.unflatten(structure, leaves)


def _on_all_devices(data: Any, distribution: Any) -> Any:
    """Every device gets all rows, and repeats the work of the others: for steps that know of nothing else."""
    return _laid_out(data, distribution, PartitionSpec())


def is_sparse(data: Any) -> bool:
    """Whether a batch has sparse arrays, which cannot be divided into rows."""
    return any(isinstance(leaf, JAXSparse) for leaf in keras.tree.flatten(data))


def _sparse_on_all_devices(data: Any, distribution: Any) -> Any:
    if jax.process_count() > 1:
        raise ValueError(
            "Sparse batches cannot be divided among several processes on JAX. Received: a sparse batch, and "
            f"{jax.process_count()} processes. {DENSE_ADVICE}, or use the devices of one process."
        )
    return _on_all_devices(data, distribution)


DENSE_ADVICE = "Make the batches dense (`tf.sparse.to_dense(x)`, `x.toarray()` or `x.todense()`)"


def _filled_up(data: Any, distribution: Any) -> Any:
    """Each device gets its rows of a batch that is filled up, where it does not divide."""
    if is_sparse(data):
        return _sparse_on_all_devices(data, distribution)
    rows = num_rows(data)
    divided = PartitionSpec(distribution.batch_dim_name)
    num_missing = -rows % batch_size_of(distribution)
    if not num_missing:
        return _laid_out(data, distribution, divided)
    leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
    if not all(len(leaf.shape) > 0 and leaf.shape[0] == rows for leaf in leaves):
        return _on_all_devices(data, distribution)

    return FilledUp(_laid_out(padded(data, num_missing, np), distribution, divided), rows)


def padded(data: Any, num_missing: int, numpy: Any = jax.numpy) -> Any:
    """The batch with its first row repeated at the end: a row of zeros may be outside of what the model can take.

    Args:
        data: the batch.
        num_missing: how many rows are added.
        numpy: what concatenates: `jax.numpy` within a step, NumPy before one.

    Raises:
        ValueError: if the batch is sparse.
    """
    if is_sparse(data):
        raise ValueError(
            "On JAX each replica's own gradients need dense batches, whose rows can be divided. "
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
    """Each device gets its rows of what every process has."""
    sharding = NamedSharding(distribution.device_mesh.backend_mesh, layout)

    def put(leaf: Any) -> Tensor:
        leaf = np.asarray(leaf)
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

    return jax.tree.map(put, data)


def _joined(data: Any, num_rows: int) -> Any:
    """The rows of all processes, in the order of their ids. One may have no batch, and not know what one looks like."""
    parts = gather_objects(jax.tree.map(np.asarray, data) if num_rows else None)
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *[part for part in parts if part is not None])


class EpochIterator(_KerasEpochIterator):  # type: ignore[misc, valid-type]
    """Ends on all processes together: one without a batch left goes on with the rows of the others."""

    def __init__(self, x: Any, *args: Any, **kwargs: Any) -> None:
        self._model = model = caller_instance()  # Keras does not say for which one this is
        data = (x, kwargs.get("y"), kwargs.get("sample_weight"))
        self._is_together = is_together()
        self._trains = "class_weight" in kwargs  # or None, which Keras gives where it trains and nowhere else
        self._is_whole = self._is_together and _takes_whole(model, *data)
        self._is_compared = False
        self._fills_up = False
        self._draws = SharedDraws() if self._is_whole else None
        if self._is_together:
            is_meant = self._is_whole or not self._trains or model is None or sharing_of(model).auto_shard
            self._check_kind(data, is_meant or is_from_shard_data(*data))
        with self._drawing() if hasattr(x, "__next__") else contextlib.nullcontext():
            super().__init__(x, *args, **kwargs)  # Keras looks at the first batches of a generator
        # Keras may build a model from the first batch, and then there is a `reset`. In `predict`, which gives no `y`,
        # there are both only where the model is not built.
        self._fills_up = "y" not in kwargs and self._can_fill_up and all(layer.built for layer in layers_of(model))
        if self._is_whole:
            wait_for_batch_order(self.data_adapter)
        self._has_arrays = isinstance(self.data_adapter, ArrayDataAdapter)  # which draw when a batch is taken
        if self._has_arrays and not kwargs.get("shuffle"):
            self._draws = None
        self._check_sizes()
        self._agree_on_length()

    def _check_kind(self, data: Any, is_meant: bool) -> None:
        """Finds processes of which some have all data and others parts; and parts that are equal, unless meant."""
        told = gather_objects((self._is_whole, 0 if is_meant else checksum(first_rows(data[:2]))), "starts on data")
        check_kinds([is_whole for is_whole, _ in told])
        if told[0][1] and len(set(told)) == 1:
            warn_of_same_parts()

    def _drawing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._draws is None else self._draws.drawing()

    def __iter__(self) -> Any:
        if self._is_together and self._trains and is_prepared(self._model):
            _start_equal(self._model)  # callbacks have changed rates or weights, perhaps in some processes only
        if self._draws is not None:
            self._draws.forget()
        return super().__iter__()

    def __next__(self) -> Any:
        with contextlib.nullcontext() if self._has_arrays else self._drawing():
            return super().__next__()

    def _check_sizes(self) -> None:
        """Finds batches that will not divide, where their sizes are known, before Keras takes the weights away."""
        sizes = batch_sizes(self) if self._has_arrays else []
        for size in sizes:
            _check_divides(size)
        if sizes and self._can_fill_up and (self._is_whole or not self._is_together):
            layers = stateful_layers(self._model)
            for size in sizes:
                fit_states(layers, [size])  # one program, of which all rows are one batch

    @property
    def _can_fill_up(self) -> bool:
        # Keras may stack several batches (3.16 and later).
        is_single = self.steps_per_execution == 1 or not hasattr(data_adapter_utils, "PartialBatchList")
        return is_single and self._model is not None and is_prepared(self._model)

    def reset(self) -> None:
        """Starts anew, with batches drawn alike in all processes."""
        with contextlib.nullcontext() if self._has_arrays else self._drawing():
            super().reset()
        self._agree_on_length()
        self._fills_up = self._can_fill_up

    def _agree_on_length(self) -> None:
        if self._is_together and not self._is_whole:
            lengths = gather_objects(self.data_adapter.num_batches, "starts an epoch of a prepared model")
            self._num_batches = None if None in lengths else max(lengths)

    def _get_iterator(self) -> Iterator[Any]:
        if not takes_uneven(keras.distribution.distribution()):
            return super()._get_iterator()
        batches = self.parts() if self._is_whole else self.batches()
        if self._is_whole and not self._is_compared:  # now, as in a moment Keras takes the weights out of the model
            first = next(batches, None)
            batches = itertools.chain([] if first is None else [first], batches)
        # From 3.16 on Keras takes what comes for as many batches as `steps_per_execution` says, unless it is in a list.
        if self.steps_per_execution == 1 or not hasattr(data_adapter_utils, "PartialBatchList"):
            return batches
        lists = iter(lambda: list(itertools.islice(batches, self.steps_per_execution)), [])
        return map(data_adapter_utils.PartialBatchList, lists)

    def _place(self, data: Any, distribution: Any) -> Any:
        """Of a batch that all processes have, each device gets its rows."""
        if self._fills_up or num_rows(data) % batch_size_of(distribution) == 0:
            return _filled_up(data, distribution)
        return _on_all_devices(data, distribution)

    def batches(self) -> Iterator[Any]:
        """Those of all processes together."""
        batches = iter(self.data_adapter.get_jax_iterator())
        while (batch := _distribute_data(next(batches, None), fills_up=self._fills_up)) is not None:
            yield batch

    def parts(self) -> Iterator[Any]:
        """The batches that all processes have."""
        distribution = keras.distribution.distribution()
        batches = iter(self.data_adapter.get_jax_iterator())
        for step in itertools.count():
            with self._drawing():
                batch = next(batches, None)
            if not self._is_compared:
                self._is_compared = True
                mine = self.data_adapter.num_batches, 0 if batch is None else checksum(batch)
                facts = gather_objects(mine, "compares its first batch")
                lengths, first_batches = zip(*facts)
                check_alike(lengths, first_batches)
            mine = (0, 0) if batch is None else (num_rows(batch), fingerprint(batch))
            told = tell(_NEXT_BATCH, zlib.crc32(repr(mine).encode()) >> 1)
            if len(set(told)) > 1:
                check_batches(gather_objects(mine, "compares a batch"), step)
            if not mine[0]:
                return
            yield self._place(batch, distribution)


def _takes_whole(model: Any, *data: Any) -> bool:
    """Whether all processes are given the same data, of which each works on a part of every batch."""
    if model is None or not is_prepared(model) or not sharing_of(model).auto_shard:
        return False
    return not vars(model).get(SPLITS_OWN_PART, False) and not is_split(*data)


def _start_equal(model: Any) -> None:
    """Lets all processes begin an epoch with the same values, which are process 0's where they differ."""
    variables, state = list(model.variables), state_of(model)
    # One that has not built its model yet differs in more than values, which the optimizer reports.
    numbers = tell("compares the values of a prepared model", len(variables) + len(state))
    if len(set(numbers)) > 1 or not variables:
        return
    prints = placement.fingerprints([*variables, *state])
    differs = (prints != prints[0]).any(axis=0)
    if differs.any():
        warn_of_unequal_start([v.path for v, each in zip([*variables, *state], differs) if each])
        placement.broadcast_state(variables, state)


def state_of(model: Any) -> list[Any]:
    """The state of the model's optimizers that all replicas have alike."""
    optimizers = [optimizer for optimizer in optimizers_of(model) if optimizer.built]
    return [variable for optimizer in optimizers for variable in shared_variables(optimizer)]
