"""`fit` of a prepared model under a `MultiWorkerMirroredStrategy`, for which Keras' trainer was not made.

Keras takes the logs of replicas apart with calls that this strategy does not know, and lets it divide the data. Here
each worker goes through its batches in Python, as processes do on the other backends: the same batches on all workers,
of which each takes its rows, or batches of its own. Before each batch the workers compare what they have, so that
those who do something else, or have other data, all raise.

Private names of Keras touched here (a test holds each of them):
    `keras.src.backend.tensorflow.trainer._collective_all_reduce_multi_worker` - whether logs are taken apart like that.
    `keras.src.backend.tensorflow.trainer.TFEpochIterator` - what `fit` iterates over: its `_get_iterator`,
        `_num_batches`, `_distributed_dataset` and `data_adapter`.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as tensorflow_trainer
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

from keras_shardopt.backends.models import optimizers_of
from keras_shardopt.backends.tensorflow.communicator import ReplicaContext
from keras_shardopt.backends.tensorflow.placement import placement, reading_is_collective
from keras_shardopt.backends.tensorflow.processes import (
    gather_objects,
    local_replicas,
    naming_workers,
    num_workers,
    processes,
    tell,
)
from keras_shardopt.data.shared_draws import SharedDraws, count_call, wait_for_batch_order
from keras_shardopt.data.split_data import is_from_shard_data, is_split
from keras_shardopt.data.whole_batches import checksum, fingerprint, first_rows, rows_of_parts
from keras_shardopt.fit.calls import call_silently, num_rows, warn_of_unequal_start
from keras_shardopt.fit.sharing import (
    check_alike,
    check_batches,
    check_kinds,
    sharing_of,
    splits_own_part,
    warn_of_same_parts,
)
from keras_shardopt.fit.tensorflow.batches import common_spec, is_packed, packed, rows_from, spec_of
from keras_shardopt.wrapping.chain import shared_variables


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of a prepared model that runs, such as `fit`."""

    model: Any
    name: str
    gathers: bool
    """Whether it is a `predict` that returns the rows of all workers."""

    splits_own_part: bool
    """Whether it is a `fit` that splits validation data off this worker's own part."""

    @property
    def is_alone(self) -> bool:
        """Whether each worker makes it by itself."""
        return self.name.startswith("predict") and not self.gathers


_running: contextvars.ContextVar[_Call | None] = contextvars.ContextVar("running", default=None)
_GATHERS = "_keras_shardopt_gathers"
_NEXT_BATCH = "takes the next batch of a prepared model"


def are_several(model: Any) -> bool:
    """Whether several workers train this model together."""
    return num_workers(model.distribute_strategy) > 1


def is_running() -> bool:
    """Whether a call of a prepared model of several workers runs."""
    return _running.get() is not None


_takes_apart_in_keras = tensorflow_trainer._collective_all_reduce_multi_worker


def _takes_apart(strategy: tf.distribute.Strategy) -> bool:
    """Stands in for Keras' function of that name. What the steps here return is equal on all replicas, or gathered."""
    return not is_running() and bool(_takes_apart_in_keras(strategy))


@contextlib.contextmanager
def calling(model: Any, name: str, *args: Any, **kwargs: Any) -> Iterator[Callable[..., Any]]:
    """Run a call of `model` on all workers. Yield how to call Keras' method: the first worker prints alone."""
    if not are_several(model):
        yield lambda real, *args, **kwargs: real(*args, **kwargs)
        return
    gathers = name == "predict" and _gathers(model, *args, **kwargs)
    if name.startswith("predict") and vars(model).get(_GATHERS) is not gathers:
        object.__setattr__(model, _GATHERS, gathers)
        model.predict_function = None  # it was traced for the other way
    call = _Call(model, name, gathers, name == "fit" and splits_own_part(args, kwargs))
    token = _running.set(call)
    try:
        with model.distribute_strategy.scope(), naming_workers(model.distribute_strategy):
            if not call.is_alone:
                tell(f"calls `{name}` of a prepared model")
            yield call_silently if processes.process()[1] > 0 else lambda real, *args, **kwargs: real(*args, **kwargs)
    finally:
        _running.reset(token)
        count_call()


def _gathers(model: Any, x: Any = None, *args: Any, **kwargs: Any) -> bool:
    del args, kwargs
    sharing = sharing_of(model)
    return sharing.gather and sharing.auto_shard and not is_split(x)


# -- batches -----------------------------------------------------------------------------------------------------------


class _Keeping:
    """What Keras takes for a strategy that divides a dataset. It is left whole."""

    def experimental_distribute_dataset(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the dataset."""
        return dataset


class WorkersIterator(tensorflow_trainer.TFEpochIterator):
    """Ends on all workers together: one without a batch left goes on with the rows of the others."""

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
        self._call, self._strategy, data = call, distribute_strategy, (x, y, sample_weight)
        self._first, self._num_local = local_replicas(distribute_strategy)
        self._trains = "class_weight" in kwargs  # or None, which Keras gives where it trains and nowhere else
        auto_shard = sharing_of(call.model).auto_shard
        is_part = call.splits_own_part or is_split(*data) or isinstance(x, tf.distribute.DistributedDataset)
        self._is_whole = auto_shard and not call.is_alone and not is_part
        self._draws = SharedDraws() if self._is_whole else None
        self._is_compared = False
        self._last: Any = None
        if not call.is_alone:
            is_meant = self._is_whole or not self._trains or auto_shard
            self._check_kind(data, is_meant or is_from_shard_data(*data))
        if self._is_whole and self._trains:
            _seed_alike()
        with self._drawing():  # Keras looks at the first batches of a generator
            super().__init__(_Keeping(), x, y, sample_weight, **kwargs)
        if self._is_whole:
            wait_for_batch_order(self.data_adapter)
        self._is_divided = isinstance(self._distributed_dataset, tf.distribute.DistributedDataset)  # by the user
        self._spec = None if self._is_divided else spec_of(self._distributed_dataset.element_spec)
        if not (call.is_alone or self._is_divided):
            self._spec = common_spec(gather_objects(self._spec, "compares the kinds of its tensors"))
        self._agree_on_length()

    def _check_kind(self, data: Any, is_meant: bool) -> None:
        """Finds workers of which some have all data and others parts; and parts that are equal, unless meant."""
        told = gather_objects((self._is_whole, 0 if is_meant else checksum(first_rows(data[:2]))), "starts on data")
        check_kinds([is_whole for is_whole, _ in told])
        if told[0][1] and len(set(told)) == 1:
            warn_of_same_parts()

    def _drawing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._draws is None else self._draws.drawing()

    def __iter__(self) -> Any:
        if self._trains:
            _start_equal(self._call.model)  # callbacks have changed rates or weights, perhaps on some workers only
        if self._draws is not None:
            self._draws.forget()
        return super().__iter__()

    def __next__(self) -> Any:
        with self._drawing():
            return super().__next__()

    def reset(self) -> None:
        """Ends an epoch."""
        with self._drawing():
            super().reset()
        self._agree_on_length()

    def _agree_on_length(self) -> None:
        if not (self._is_whole or self._is_divided or self._call.is_alone):
            lengths = gather_objects(self.data_adapter.num_batches, "starts an epoch of a prepared model")
            self._num_batches = None if None in lengths else max(lengths)

    def _get_iterator(self) -> Any:
        if self._is_divided:
            return self._distributed_dataset
        # TensorFlow draws when an iterator is made, and Keras makes one more than it needs.
        drawn = isinstance(self.data_adapter, (ArrayDataAdapter, TFDatasetAdapter))
        batches = iter(self._distributed_dataset) if drawn else self.data_adapter.get_numpy_iterator()
        if self._call.is_alone:
            return map(self._divided, batches)
        return self._whole_batches(batches) if self._is_whole else self._parts_of_all(batches)

    def _parts_of_all(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Each worker has its own batches, and goes on until all have none."""
        while True:
            batch = next(batches, None)
            if not any(tell(_NEXT_BATCH, 0 if batch is None else int(num_rows(batch)))):
                return
            yield self._divided(batch)

    def _whole_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """All workers have the same batches, and each takes its rows."""
        num_replicas = self._strategy.num_replicas_in_sync
        for step in itertools.count():
            with self._drawing():
                batch = next(batches, None)
            if not self._is_compared:
                self._is_compared = True
                mine = self.data_adapter.num_batches, 0 if batch is None else checksum(batch)
                lengths, first_batches = zip(*gather_objects(mine, "compares its first batch"))
                check_alike(lengths, first_batches)
            mine = (0, 0) if batch is None else (int(num_rows(batch)), fingerprint(batch))
            told = tell(_NEXT_BATCH, zlib.crc32(repr(mine).encode()) >> 1)
            if len(set(told)) > 1:
                check_batches(gather_objects(mine, "compares a batch"), step)
            if not mine[0]:
                return
            rows = rows_of_parts(mine[0], num_replicas)
            yield self._packed(batch, rows[: self._first], rows[self._first : self._first + self._num_local])

    def _divided(self, batch: Any) -> Any:
        """A batch of this worker alone, or None."""
        rows = 0 if batch is None else int(num_rows(batch))
        return self._packed(batch, [], rows_of_parts(rows, self._num_local))

    def _packed(self, batch: Any, before: list[int], rows: list[int]) -> Any:
        batch = self._last = _tensors_of(self._spec, self._last if batch is None else batch)
        starts = [sum(before) + sum(rows[:i]) for i in range(len(rows))]
        parts = [rows_from(batch, start, start + number) for start, number in zip(starts, rows)]
        return packed(self._strategy, parts, self._spec)


def packed_batches(model: Any, iterator: Any) -> Iterator[Any]:
    """Batches for a step; those of `train_on_batch`, which are not packed yet, are this worker's own."""
    for batch in iterator:
        is_divided = any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in keras.tree.flatten(batch))
        if not (is_divided or is_packed(batch)):
            batch = tf.nest.map_structure(lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf), batch)
            spec = common_spec(gather_objects(spec_of(batch), "gives a batch"))
            _, num_local = local_replicas(model.distribute_strategy)
            rows = rows_of_parts(int(num_rows(batch)), num_local)
            starts = [sum(rows[:i]) for i in range(num_local)]
            parts = [rows_from(batch, start, start + number) for start, number in zip(starts, rows)]
            batch = packed(model.distribute_strategy, parts, spec)
        yield batch


def _tensors_of(spec: Any, batch: Any) -> Any:
    """A batch as tensors; where a worker has never had one, a batch of no rows."""
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


def _seed_alike() -> None:
    """Lets TensorFlow, which shuffles arrays by its global seed, have the same one on all workers: worker 0's."""
    seeds: list[int | None] = []

    @tf.function
    def look() -> None:
        seeds.append(tf.compat.v1.get_default_graph().seed)

    look.get_concrete_function()
    everyones = gather_objects(seeds[0], "compares random seeds")
    if everyones[0] is None or len(set(everyones)) > 1:
        drawn = gather_objects(int.from_bytes(os.urandom(3), "big"), "compares random seeds")
        tf.random.set_seed(drawn[0] if everyones[0] is None else everyones[0])


# -- steps -------------------------------------------------------------------------------------------------------------


def logs_of_all(model: Any, logs: Any, replicas: ReplicaContext) -> Any:
    """The metrics of all replicas, equal on all workers, or their callbacks would make different decisions.

    What is no metric is the mean of the replicas' logs.
    """
    is_built = all(getattr(metric, "built", True) for metric in model.metrics)
    if is_built and isinstance(logs, dict) and logs.keys() == model.get_metrics_result().keys():
        values: list[tuple[Any, Any]] = []
        for op in ("sum", "mean"):
            apart = [v for v in model.metrics_variables if v.aggregation == op and reading_is_collective([v])]
            # What is read on a worker's only device is said to be on none, and so cannot be reduced.
            own = [tf.identity(tf.convert_to_tensor(v.value)) for v in apart]
            values += zip(apart, replicas.all_reduce(own, op))
        with keras.StatelessScope(values):
            return model.get_metrics_result()
    flat = [tf.convert_to_tensor(log) for log in keras.tree.flatten(logs)]
    return keras.tree.pack_sequence_as(logs, replicas.all_reduce(flat, "mean"))


def outputs_of_all(model: Any, outputs: Any, data: Any) -> Any:
    """Return what each replica of `predict` returns for the outputs of a batch: the rows of all workers, or its own."""
    if not are_several(model):
        return outputs
    strategy, context = model.distribute_strategy, tf.distribute.get_replica_context()
    gathers = vars(model).get(_GATHERS)
    if gathers:
        flat = ReplicaContext(strategy, context).all_gather(keras.tree.flatten(outputs))
        outputs = keras.tree.pack_sequence_as(outputs, flat)
    elif is_packed(data):
        return outputs
    # Keras puts those of the replicas of this process one behind the other, and each has all of them.
    is_first = tf.equal(context.replica_id_in_sync_group, local_replicas(strategy)[0])
    return keras.tree.map_structure(lambda rows: rows[: tf.where(is_first, tf.shape(rows)[0], 0)], outputs)


# -- an equal start ----------------------------------------------------------------------------------------------------


def _start_equal(model: Any) -> None:
    """Lets all workers begin an epoch with the same values, which are worker 0's where they differ."""
    optimizers = [optimizer for optimizer in optimizers_of(model) if optimizer.built]
    state = [variable for optimizer in optimizers for variable in shared_variables(optimizer)]
    variables = [v for v in [*model.variables, *state] if not reading_is_collective([v])]
    numbers = tell("compares the values of a prepared model", len(variables))
    if len(set(numbers)) > 1 or not variables:
        return
    prints = placement.fingerprints(variables)
    differing = [v for v, each in zip(variables, (prints != prints[0]).any(axis=0)) if each]
    if differing:
        is_first = processes.process()[1] == 0
        values = [keras.ops.convert_to_numpy(v) for v in differing] if is_first else None
        values = gather_objects(values, "takes the values of worker 0")[0]
        if is_first:
            warn_of_unequal_start([v.path for v in differing])
        for variable, value in zip(differing, values):
            variable.assign(value)
