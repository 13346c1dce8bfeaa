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


def spec_of(batch: Any) -> Any:
    """What is known of each tensor of a batch, or of an element of a dataset, with any number of rows."""
    return tf.nest.map_structure(_spec_of_leaf, batch)


def _spec_of_leaf(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, (tf.OptionalSpec, tf.experimental.Optional)):
        return None  # what Keras puts into a dataset for no sample weights
    spec = leaf if isinstance(leaf, tf.TypeSpec) else tf.type_spec_from_value(leaf)
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(_any_rows(spec.shape), spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return type(spec)(_any_rows(spec.shape), spec.dtype)


def _any_rows(shape: tf.TensorShape) -> tf.TensorShape:
    return tf.TensorShape([None, *shape[1:]]) if shape.rank else shape


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
