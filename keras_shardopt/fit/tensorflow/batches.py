"""How a batch of one worker reaches its replicas: as a scalar that holds its tensors, whatever their shapes.

Workers number their collectives in the order in which they trace functions, so all must trace the same ones at the same
time. Their parts of a batch have different numbers of rows, for which TensorFlow would trace anew on some workers only.
The scalar, an Optional, looks the same everywhere; the step takes the tensors out of it, with shapes that leave open
what differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_shardopt.backends.tensorflow.processes import local_replicas

_PREFIX = "keras_shardopt: "
# The specs of batches, by the text that is given to a step with each of them: another text, another trace.
_SPECS: dict[str, Any] = {}


def spec_of(batch: Any, num_parts: int | None = None) -> Any:
    """The specs of the tensors of a batch, or of an element of a dataset.

    Args:
        batch: the batch, or the `element_spec` of a dataset.
        num_parts: the specs are those of the first of so many parts. None: with any number of rows.
    """
    return tf.nest.map_structure(lambda leaf: _spec_of_leaf(leaf, num_parts), batch)


def _spec_of_leaf(leaf: Any, num_parts: int | None) -> Any:
    if not hasattr(leaf, "shape"):
        return None  # None, as a dataset has it: a `NoneTensorSpec`, or the empty Optional that Keras puts there
    spec = leaf if isinstance(leaf, tf.TypeSpec) else tf.type_spec_from_value(leaf)
    shape = spec.shape
    if shape.rank:
        rows = None if num_parts is None or shape[0] is None else -(-shape[0] // num_parts)
        shape = tf.TensorShape([rows, *shape[1:]])
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return type(spec)(shape, spec.dtype)


def common_spec(specs: Sequence[Any]) -> Any:
    """One spec for the batches of all processes.

    Raises:
        ValueError: if these are made of different tensors.
    """
    try:
        return tf.nest.map_structure(_common, *specs)
    except (TypeError, ValueError):
        given = "; ".join(f"process {i}: {spec}" for i, spec in enumerate(specs) if spec != specs[0] or i == 0)
        raise ValueError(
            f"The batches of all processes must be made of the same kinds of tensors. Received: {given}. "
            "Give every process data of the same structure, dtypes and ranks."
        ) from None


def _common(*specs: Any) -> Any:
    if all(spec == specs[0] for spec in specs):
        return specs[0]
    common = specs[0].most_specific_common_supertype(specs[1:])
    if common is None or common.shape.rank is None:
        raise ValueError
    return common


def rows_from(batch: Any, start: Any, stop: Any) -> Any:
    """Some rows of a batch of tensors, from and to ints or scalar tensors."""

    def part(leaf: Any) -> Any:
        if leaf is None or not leaf.shape.rank:
            return leaf
        if isinstance(leaf, tf.SparseTensor):
            rest = leaf.dense_shape[1:]
            begin, size = (
                tf.concat([[tf.cast(n, "int64")], of], 0) for n, of in ((start, rest * 0), (stop - start, rest))
            )
            rows = tf.sparse.slice(leaf, begin, size)
            rows.set_shape([None, *leaf.shape[1:]])  # in a graph it would not be known
            return rows
        return leaf[start:stop]

    return tf.nest.map_structure(part, batch)


def tensors_of(batch: Any) -> list[Any]:
    """The tensors of a batch, in their order."""
    return [leaf for leaf in tf.nest.flatten(batch) if not isinstance(leaf, (type(None), tf.experimental.Optional))]


def restored(spec: Any, tensors: Any) -> Any:
    """The batch with these tensors, and None for each None of its spec."""
    left = iter(tensors)
    return tf.nest.map_structure(lambda leaf: None if leaf is None else next(left), spec)


def without_none(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """A dataset of tensors only: a strategy cannot divide None. Inside a step, `unpacked` puts each None back."""
    spec = spec_of(dataset.element_spec)
    if None not in tf.nest.flatten(spec):
        return dataset
    key = f"{_PREFIX}{spec}"
    _SPECS[key] = spec
    return dataset.map(lambda *batch: {key: tuple(tensors_of(batch))})


def packed(strategy: tf.distribute.Strategy, parts: Sequence[Any], spec: Any) -> tuple[Any, str]:
    """What a step is given of a batch, of which each replica of this process has one of `parts`."""
    key = f"{_PREFIX}{spec}"
    _SPECS[key] = spec
    first, _ = local_replicas(strategy)
    holders = [tf.raw_ops.OptionalFromValue(components=_without_none(part)) for part in parts]
    values = strategy.experimental_distribute_values_from_function(
        lambda context: holders[context.replica_id_in_sync_group - first]
    )
    return values, key


def is_packed(data: Any) -> bool:
    """Whether this comes from `packed`."""
    return isinstance(data, tuple) and len(data) == 2 and isinstance(data[1], str) and data[1].startswith(_PREFIX)


def unpacked(data: Any) -> Any:
    """The rows of one replica, inside a step; what is not packed comes back as it is."""
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
