"""Runs `fit` under a `MultiWorkerMirroredStrategy`, which Keras's trainer does not support.

Keras splits the logs of replicas with methods that this strategy lacks, and lets the strategy divide the data. Here,
each worker iterates over batches in Python, as processes do on other backends. If all workers load the same batches,
each uses its rows of every batch; otherwise each uses batches of its data. Workers communicate before every batch, so
all raise an error if one worker runs a different method or has different data.

Private names of Keras touched here (a test checks that each exists):
    `keras.src.backend.tensorflow.trainer._collective_all_reduce_multi_worker` - whether Keras splits logs in this way.
    `keras.src.backend.tensorflow.trainer.TFEpochIterator` - the iterator of `fit`: its `_get_iterator`,
        `_distributed_dataset` and `data_adapter`.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as tensorflow_trainer
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

from keras_shardopt.backends.tensorflow.communicator import ReplicaContext
from keras_shardopt.backends.tensorflow.placement import reading_is_collective
from keras_shardopt.backends.tensorflow.processes import (
    announce,
    gather_objects,
    local_replicas,
    naming_workers,
    num_workers,
    processes,
)
from keras_shardopt.data.shared_draws import SharedDraws, count_call, wait_for_batch_order
from keras_shardopt.data.whole_batches import rows_of_parts
from keras_shardopt.fit.calls import call_printing, num_rows
from keras_shardopt.fit.equal_start import optimizer_state, start_equal
from keras_shardopt.fit.shared_epoch import NEXT_BATCH, SharedEpoch
from keras_shardopt.fit.sharing import gathers_rows, splits_separate_part, takes_whole
from keras_shardopt.fit.tensorflow.batches import common_spec, is_packed, packed, rows_from, spec_of


@dataclasses.dataclass(frozen=True)
class _Call:
    """A running call of a model's method, such as `fit`."""

    model: Any
    name: str
    gathers: bool
    """Whether the call is a `predict` that returns the rows of all workers."""

    splits_separate_part: bool
    """Whether the call is a `fit` that splits off validation data from data already divided among workers."""

    @property
    def is_alone(self) -> bool:
        """Whether each worker runs the call without the others."""
        return self.name.startswith("predict") and not self.gathers


_running: contextvars.ContextVar[_Call | None] = contextvars.ContextVar("running", default=None)
_GATHERS = "_keras_shardopt_gathers"


def are_several(model: Any) -> bool:
    """Whether several workers train this model together."""
    return num_workers(model.distribute_strategy) > 1


def is_running() -> bool:
    """Whether a call such as `fit` of a model passed to `prepare` runs on several workers."""
    return _running.get() is not None


_takes_apart_in_keras = tensorflow_trainer._collective_all_reduce_multi_worker


def _splits_logs(strategy: tf.distribute.Strategy) -> bool:
    """Whether Keras must split logs by replica. False while `calling` runs a method, because logs are then equal."""
    return not is_running() and bool(_takes_apart_in_keras(strategy))


@contextlib.contextmanager
def calling(model: Any, name: str, *args: Any, **kwargs: Any) -> Iterator[Callable[..., Any]]:
    """In this block, all workers run the method `name`. Yield a function that calls it, and prints on worker 0 only."""
    if not are_several(model):
        yield functools.partial(call_printing, True)
        return
    gathers = name == "predict" and gathers_rows(model, args, kwargs)
    if name.startswith("predict") and vars(model).get(_GATHERS) is not gathers:
        object.__setattr__(model, _GATHERS, gathers)
        model.predict_function = None  # drop it, because it was traced for the previous value of `gathers`
    call = _Call(model, name, gathers, name == "fit" and splits_separate_part(args, kwargs))
    token = _running.set(call)
    try:
        with model.distribute_strategy.scope(), naming_workers(model.distribute_strategy):
            if not call.is_alone:
                announce(f"calls `{name}` of a prepared model")
            yield functools.partial(call_printing, processes.process()[1] == 0)
    finally:
        _running.reset(token)
        count_call()


class _NoSharding:
    """Replaces the strategy in Keras's iterator, and leaves the dataset whole: `WorkersIterator` divides each batch."""

    def experimental_distribute_dataset(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Return the dataset unchanged."""
        return dataset


class WorkersIterator(SharedEpoch, tensorflow_trainer.TFEpochIterator):
    """Yields batches until all workers have none left. A worker that ends earlier yields batches without rows."""

    _gather_objects, _announce = staticmethod(gather_objects), staticmethod(announce)

    def __init__(
        self,
        distribute_strategy: Any = None,
        x: Any = None,
        y: Any = None,
        sample_weight: Any = None,
        **kwargs: Any,
    ) -> None:
        call = _running.get()
        assert call is not None
        self._call, self._model = call, call.model
        self._strategy, data = distribute_strategy, (x, y, sample_weight)
        self._first, self._num_local = local_replicas(distribute_strategy)
        self._trains = "class_weight" in kwargs  # Keras passes it, even as None, only for training
        is_together = not (call.is_alone or isinstance(x, tf.distribute.DistributedDataset))
        self._is_whole = is_together and takes_whole(self._model, data, call.splits_separate_part)
        self._draws = SharedDraws(self._is_whole)
        self._last: Any = None
        if not call.is_alone:
            self._check_kind(data)
        if self._is_whole and self._trains:
            _share_seed()
        with self._draws.drawing():  # Keras reads the first batches of a generator here
            super().__init__(_NoSharding(), x, y, sample_weight, **kwargs)
        if self._is_whole:
            wait_for_batch_order(self.data_adapter)
        self._is_divided = isinstance(self._distributed_dataset, tf.distribute.DistributedDataset)  # user divided it
        self._is_separate = not (self._is_whole or self._is_divided or call.is_alone)
        self._spec = None if self._is_divided else spec_of(self._distributed_dataset.element_spec)
        if not (call.is_alone or self._is_divided):
            self._spec = common_spec(gather_objects(self._spec, "compares the kinds of its tensors"))
        self._agree_on_length()

    def _start_equal(self) -> None:
        variables = [*self._model.variables, *optimizer_state(self._model)]
        variables = [v for v in variables if not reading_is_collective([v])]
        start_equal(variables, announce, _take_from_worker_0)

    def _get_iterator(self) -> Any:
        if self._is_divided:
            return self._distributed_dataset
        # For arrays and datasets, create TensorFlow's iterator here, as Keras does, because the creation of an iterator
        # draws the order of rows. (Keras also creates an iterator that it never uses.)
        drawn = isinstance(self.data_adapter, (ArrayDataAdapter, TFDatasetAdapter))
        batches = iter(self._distributed_dataset) if drawn else self.data_adapter.get_numpy_iterator()
        if self._call.is_alone:
            return map(self._divided, batches)
        if self._is_whole:
            return map(self._rows_of, self._whole_batches(batches))
        return self._separate_batches(batches)

    def _separate_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield this worker's batches, then batches without rows until no worker has a batch left."""
        while True:
            batch = next(batches, None)
            if not any(announce(NEXT_BATCH, 0 if batch is None else int(num_rows(batch)))):
                return
            yield self._divided(batch)

    def _rows_of(self, batch: Any) -> Any:
        """Return this worker's rows of a batch that all workers load whole."""
        rows = rows_of_parts(int(num_rows(batch)), self._strategy.num_replicas_in_sync)
        return self._packed(batch, rows[self._first : self._first + self._num_local], start=sum(rows[: self._first]))

    def _divided(self, batch: Any) -> Any:
        rows = 0 if batch is None else int(num_rows(batch))
        return self._packed(batch, rows_of_parts(rows, self._num_local))

    def _packed(self, batch: Any, rows: list[int], start: int = 0) -> Any:
        batch = self._last = _tensors_of(self._spec, self._last if batch is None else batch)
        return _packed_parts(self._strategy, batch, rows, self._spec, start)


def _packed_parts(strategy: Any, batch: Any, rows: list[int], spec: Any, start: int = 0) -> Any:
    """Pack a batch for the replicas of this worker: `rows[i]` rows for replica i, beginning with row `start`."""
    bounds = itertools.accumulate(rows, initial=start)
    return packed(strategy, [rows_from(batch, begin, end) for begin, end in itertools.pairwise(bounds)], spec)


def packed_batches(model: Any, iterator: Any) -> Iterator[Any]:
    """Yield batches in the form that `packed` returns. Plain tensors, as in `train_on_batch`, are packed first."""
    for batch in iterator:
        is_divided = any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in keras.tree.flatten(batch))
        if not is_divided:
            batch = tf.nest.map_structure(lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf), batch)
            spec = common_spec(gather_objects(spec_of(batch), "gives a batch"))
            _, num_local = local_replicas(model.distribute_strategy)
            rows = rows_of_parts(int(num_rows(batch)), num_local)
            batch = _packed_parts(model.distribute_strategy, batch, rows, spec)
        yield batch


def _take_from_worker_0(variables: list[Any]) -> None:
    is_first = processes.process()[1] == 0
    values = [keras.ops.convert_to_numpy(v) for v in variables] if is_first else None
    for variable, value in zip(variables, gather_objects(values, "takes the values of worker 0")[0]):
        variable.assign(value)


def _tensors_of(spec: Any, batch: Any) -> Any:
    """Return a batch as tensors. If `batch` is None, return a batch without rows."""
    if batch is None:
        return tf.nest.map_structure(_no_rows, spec)
    flat = tf.nest.flatten(spec)
    return tf.nest.pack_sequence_as(
        spec, [_tensor_of(s, leaf) for s, leaf in zip(flat, keras.tree.flatten(batch), strict=True)]
    )


def _tensor_of(spec: Any, leaf: Any) -> Any:
    if spec is None or isinstance(leaf, tf.__internal__.CompositeTensor):
        return None if spec is None else leaf
    return tf.convert_to_tensor(leaf, spec.dtype)


def _no_rows(spec: Any) -> Any:
    if spec is None:
        return None
    return tf.zeros([0, *[size or 1 for size in spec.shape[1:]]], spec.dtype)


def _share_seed() -> None:
    """Set TensorFlow's global seed on all workers to that of worker 0, because TensorFlow shuffles arrays with it."""
    seeds: list[int | None] = []

    @tf.function
    def read() -> None:
        seeds.append(tf.compat.v1.get_default_graph().seed)

    read.get_concrete_function()
    everyones = gather_objects(seeds[0], "compares random seeds")
    if everyones[0] is None or len(set(everyones)) > 1:
        drawn = gather_objects(int.from_bytes(os.urandom(3), "big"), "compares random seeds")
        tf.random.set_seed(drawn[0] if everyones[0] is None else everyones[0])


def logs_of_all(model: Any, logs: Any, replicas: ReplicaContext) -> Any:
    """Return metrics over all replicas, so callbacks make the same decision on all workers. Average other logs."""
    is_built = all(getattr(metric, "built", True) for metric in model.metrics)
    if is_built and isinstance(logs, dict) and logs.keys() == model.get_metrics_result().keys():
        values: list[tuple[Any, Any]] = []
        for op in ("sum", "mean"):
            separate = [v for v in model.metrics_variables if v.aggregation == op and reading_is_collective([v])]
            # On a worker with one device, the value of a variable is on no device. `identity` places it on a device.
            values_here = [tf.identity(tf.convert_to_tensor(v.value)) for v in separate]
            values += zip(separate, replicas.all_reduce(values_here, op))
        with keras.StatelessScope(values):
            return model.get_metrics_result()
    flat = [tf.convert_to_tensor(log) for log in keras.tree.flatten(logs)]
    return keras.tree.pack_sequence_as(logs, replicas.all_reduce(flat, "mean"))


def outputs_of_all(model: Any, outputs: Any, data: Any) -> Any:
    """Return a replica's outputs in `predict`. If `predict` gathers, the outputs contain the rows of all workers."""
    if not are_several(model):
        return outputs
    strategy, context = model.distribute_strategy, tf.distribute.get_replica_context()
    gathers = vars(model).get(_GATHERS)
    if gathers:
        flat = ReplicaContext(strategy, context).all_gather(keras.tree.flatten(outputs))
        outputs = keras.tree.pack_sequence_as(outputs, flat)
    elif is_packed(data):
        return outputs
    # Each replica now has all rows, but Keras concatenates the results of this process's replicas. So only the first of
    # these replicas returns the rows.
    is_first = tf.equal(context.replica_id_in_sync_group, local_replicas(strategy)[0])
    return keras.tree.map_structure(lambda rows: rows[: tf.where(is_first, tf.shape(rows)[0], 0)], outputs)
