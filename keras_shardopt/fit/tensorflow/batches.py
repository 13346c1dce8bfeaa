"""Packs the tensors of a replica's batch into one scalar, a `tf.experimental.Optional`, to train on several workers.

TensorFlow numbers collectives when it traces a function, so all workers must trace the same functions in the same
order. With plain tensors, a new number of rows on some workers would cause a trace on these workers only. The type of
the scalar is the same on all workers, because it has unknown sizes for all dimensions that can differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_shardopt.backends.tensorflow.processes import local_replicas

_PREFIX = "keras_shardopt: "
# The `tf.TypeSpec` of batches. The key is a text that a step receives next to its batch; a new text makes TensorFlow
# trace the step again.
_SPECS: dict[str, Any] = {}


def spec_of(batch: Any, num_parts: int | None = None) -> Any:
    """Return the specs of the tensors of a batch, or of a dataset's `element_spec`.

    Row counts in the specs are None (unknown). With `num_parts`, they are those of one of `num_parts` equal parts.
    """
    return tf.nest.map_structure(lambda leaf: _spec_of_leaf(leaf, num_parts), batch)


def _spec_of_leaf(leaf: Any, num_parts: int | None) -> Any:
    if not hasattr(leaf, "shape"):
        return None  # the leaf stands for None: a `NoneTensorSpec`, or the empty Optional that Keras inserts
    spec = leaf if isinstance(leaf, tf.TypeSpec) else tf.type_spec_from_value(leaf)
    shape = spec.shape
    if shape.rank:
        rows = None if num_parts is None or shape[0] is None else -(-shape[0] // num_parts)
        shape = tf.TensorShape([rows, *shape[1:]])
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return type(spec)(shape, spec.dtype)


def common_spec(specs: Sequence[Any]) -> Any:
    """Return one spec for the batches of all processes. Raise ValueError if structures, dtypes or ranks differ."""
    try:
        return tf.nest.map_structure(_common, *specs)
    except (TypeError, ValueError):
        given = "; ".join(f"process {i}: {spec}" for i, spec in enumerate(specs) if spec != specs[0] or i == 0)
        raise ValueError(
            f"The batches of all processes must contain the same kinds of tensors. Received: {given}. "
            "Pass data of the same structure, dtypes and ranks on every process."
        ) from None


def _common(*specs: Any) -> Any:
    if all(spec == specs[0] for spec in specs):
        return specs[0]
    common = specs[0].most_specific_common_supertype(specs[1:])
    if common is None or common.shape.rank is None:
        raise ValueError
    return common


def rows_from(batch: Any, start: Any, stop: Any) -> Any:
    """Return a range of rows of a batch. `start` and `stop` are ints or scalar tensors."""

    def part(leaf: Any) -> Any:
        if leaf is None or not leaf.shape.rank:
            return leaf
        if isinstance(leaf, tf.SparseTensor):
            rest = leaf.dense_shape[1:]
            begin, size = (tf.concat([[n], of], 0) for n, of in ((start, rest * 0), (stop - start, rest)))
            rows = tf.sparse.slice(leaf, begin, size)
            rows.set_shape([None, *leaf.shape[1:]])  # set it again, because the slice loses the static shape in a graph
            return rows
        return leaf[start:stop]

    return tf.nest.map_structure(part, batch)


def tensors_of(batch: Any) -> list[Any]:
    """Return a flat list of the tensors of a batch, without None."""
    return [leaf for leaf in tf.nest.flatten(batch) if not isinstance(leaf, (type(None), tf.experimental.Optional))]


def restored(spec: Any, tensors: Any) -> Any:
    """Return a batch with the structure of `spec`, with these `tensors`, and with None for each None in `spec`."""
    left = iter(tensors)
    return tf.nest.map_structure(lambda leaf: None if leaf is None else next(left), spec)


def without_none(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Return the dataset without entries that are None, because a strategy cannot divide None."""
    spec = spec_of(dataset.element_spec)
    if None not in tf.nest.flatten(spec):
        return dataset
    key = f"{_PREFIX}{spec}"
    _SPECS[key] = spec
    return dataset.map(lambda *batch: {key: tuple(tensors_of(batch))})


def packed(strategy: tf.distribute.Strategy, parts: Sequence[Any], spec: Any) -> tuple[Any, str]:
    """Pack the batches of this process's replicas. Return the packed batches and the key of `spec` in a cache."""
    key = f"{_PREFIX}{spec}"
    _SPECS[key] = spec
    first, _ = local_replicas(strategy)
    holders = [tf.raw_ops.OptionalFromValue(components=_without_none(part)) for part in parts]
    values = strategy.experimental_distribute_values_from_function(
        lambda context: holders[context.replica_id_in_sync_group - first]
    )
    return values, key


def is_packed(data: Any) -> bool:
    """Whether `data` is a batch that `packed` returned."""
    return isinstance(data, tuple) and len(data) == 2 and isinstance(data[1], str) and data[1].startswith(_PREFIX)


def unpacked(data: Any) -> Any:
    """Inside a step, return the batch of a replica from its packed form. Data that is not packed stays unchanged."""
    if isinstance(data, dict) and any(str(key).startswith(_PREFIX) for key in data):
        ((key, tensors),) = data.items()
        return restored(_SPECS[key], tensors)
    if not is_packed(data):
        return data
    holder, key = data
    spec = _SPECS[key]
    flat = _without_none(spec)
    with tf.device("CPU:0"):
        values = tf.raw_ops.OptionalGetValue(
            optional=holder, output_types=[s.dtype for s in flat], output_shapes=[s.shape for s in flat]
        )
    left = iter(tf.identity(value) for value in values)
    every = tf.nest.flatten(spec, expand_composites=True)
    return tf.nest.pack_sequence_as(spec, [s if s is None else next(left) for s in every], expand_composites=True)


def _without_none(nest: Any) -> list[Any]:
    return [leaf for leaf in tf.nest.flatten(nest, expand_composites=True) if leaf is not None]
