"""Divides batches into parts on TensorFlow. Each replica gets the rows of its parts, and the row count of the batch.

A `tf.distribute.Strategy` cannot do this, because its division of a batch depends on the number of replicas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_shardopt.fit.calls import num_rows
from keras_shardopt.fit.tensorflow.batches import restored, rows_from, spec_of, tensors_of

_PREFIX = "keras_shardopt parts: "
_ALL_ROWS = "keras_shardopt rows"
# An element of a divided dataset is a dict: a key and the flat tensors of a batch. `_SPECS[key]` is the nested
# structure of these tensors.
_SPECS: dict[str, Any] = {}


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of one replica's parts of a batch. A replica without rows gets one row, because a model needs input."""

    batch: Any
    all_rows: tf.Tensor
    """The number of rows of the batch on all replicas together."""

    def of_replica(self, num_parts: int) -> Any:
        """Return only the rows that belong to this replica, perhaps none."""
        context = tf.distribute.get_replica_context()
        replica, each = context.replica_id_in_sync_group, num_parts // context.num_replicas_in_sync
        start, stop = (start_of_part(self.all_rows, num_parts, (replica + i) * each) for i in (0, 1))
        return rows_from(self.batch, 0, stop - start)


def divide_dataset(strategy: tf.distribute.Strategy, dataset: tf.data.Dataset, num_parts: int) -> Any:
    """Divide a dataset of whole batches among the replicas. The result has one element per replica and batch."""
    num_replicas = strategy.num_replicas_in_sync
    spec = spec_of(dataset.element_spec)

    def rows(batch: Sequence[Any], replica: Any) -> Any:
        tensors = tensors_of(batch)
        return _rows_of_replica(restored(spec, tensors), spec, num_parts, num_replicas, tf.cast(replica, tf.int32))

    def of_replicas(*batch: Any) -> tf.data.Dataset:
        return tf.data.Dataset.range(num_replicas).map(lambda replica: rows(batch, replica))

    if num_replicas == 1:
        return dataset.map(lambda *batch: rows(batch, 0))
    return strategy.distribute_datasets_from_function(lambda _: dataset.flat_map(of_replicas))


def divide_batch(strategy: tf.distribute.Strategy, batch: Any, num_parts: int) -> Any:
    """Divide one batch of `train_on_batch` among the replicas."""
    batch = tf.nest.map_structure(
        lambda leaf: leaf if leaf is None or tf.is_tensor(leaf) else tf.convert_to_tensor(leaf), batch
    )
    spec, num_replicas = spec_of(batch), strategy.num_replicas_in_sync
    parts = [_rows_of_replica(batch, spec, num_parts, num_replicas, tf.constant(i)) for i in range(num_replicas)]
    if num_replicas == 1:
        return parts[0]
    return tf.nest.map_structure(
        lambda *leaves: strategy.experimental_distribute_values_from_function(
            lambda context: leaves[context.replica_id_in_sync_group]
        ),
        *parts,
    )


def is_divided(data: Any) -> bool:
    """Whether `divide_dataset` or `divide_batch` created `data`."""
    return isinstance(data, dict) and _ALL_ROWS in data


def rows_of(data: Any) -> Rows:
    """Return this replica's rows from the data that Keras passes to a step.

    Raises:
        ValueError: if `divide_dataset` or `divide_batch` did not create the data.
    """
    if not is_divided(data):
        raise ValueError(
            "`VirtualReplicas` needs `fit`, `evaluate`, `train_on_batch` or `test_on_batch` of a model passed to "
            "`keras_shardopt.prepare`, because these methods divide batches into parts. Received: a direct call of a "
            "step. Remove `VirtualReplicas`."
        )
    ((key, tensors),) = [(key, value) for key, value in data.items() if key != _ALL_ROWS]
    return Rows(restored(_SPECS[key], tensors), data[_ALL_ROWS])


def start_of_part(all_rows: tf.Tensor, num_parts: int, part: Any) -> tf.Tensor:
    """Return the first row of a part of a batch. If rows do not divide evenly, the first parts have one more."""
    return part * (all_rows // num_parts) + tf.minimum(part, all_rows % num_parts)


def _rows_of_replica(batch: Any, spec: Any, num_parts: int, num_replicas: int, replica: tf.Tensor) -> Any:
    all_rows, each = tf.convert_to_tensor(num_rows(batch)), num_parts // num_replicas
    start = start_of_part(all_rows, num_parts, replica * each)
    stop = start_of_part(all_rows, num_parts, (replica + 1) * each)
    has_rows = stop > start
    mine = rows_from(batch, tf.where(has_rows, start, 0), tf.where(has_rows, stop, 1))
    key = f"{_PREFIX}{spec}"
    _SPECS[key] = spec
    return {key: tuple(tensors_of(mine)), _ALL_ROWS: all_rows}
