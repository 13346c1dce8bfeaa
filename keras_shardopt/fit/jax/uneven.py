"""Uneven batches in a program that runs the model on each replica: no layer receives a padded row.

A part is the rows of one replica. In one program, all parts have equal array shapes, so smaller parts are padded. A
layer that reduces over rows, such as `BatchNormalization`, would count the padding. So each replica takes a branch that
is compiled for its number of rows. A batch has at most three such numbers, zero included. Replicas in different
branches cannot communicate, so replicas sum the counts by which losses divide before the branches.

A synchronized `BatchNormalization` exchanges statistics in the forward pass. Models with such a layer get padded rows,
and the layer masks them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import keras

from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.backends.jax.communicator import MappedAxis
from keras_shardopt.backends.models import layers_of
from keras_shardopt.fit.batch_normalization import synchronized_statistics
from keras_shardopt.fit.jax.convolutions import in_layout_of_kernels
from keras_shardopt.numerics import Tensor
from keras_shardopt.update.parts import CountingPart, PartOfBatch
from keras_shardopt.update.trainer_context import BatchShare, batch_shared


def rows_of(part: Any, all_rows: int, num_parts: int) -> Any:
    """Return the number of rows of a replica's part of a batch: ceil(all_rows / num_parts), fewer in the last parts."""
    rows = -(-all_rows // num_parts)
    return rows if rows * num_parts == all_rows else jax.numpy.clip(all_rows - part * rows, 0, rows)


def without_padding(
    function: Callable[[int, Any], Any], part: Tensor, all_rows: int, num_parts: int, data: Any, shapes: Any
) -> Any:
    """Call `function` with the row count and the rows of a part of a batch. A part without rows has one padding row.

    Args:
        function: must not communicate. Its results are padded to `shapes`.
        part: the index of the part in the batch, also as a traced value.
        all_rows: the number of rows in the batch.
        num_parts: the number of parts in the batch.
        data: the rows of the part, with padding.
        shapes: the shapes of the results for the largest part.
    """
    rows = -(-all_rows // num_parts)
    counts = sorted({min(max(all_rows - i * rows, 0), rows) for i in range(num_parts)}, reverse=True)
    if len(counts) == 1:
        return function(rows, data)

    def branch(count: int) -> Callable[[Any], Any]:
        return lambda data: jax.tree.map(
            _padded_to, function(count, jax.tree.map(lambda leaf: leaf[: max(count, 1)], data)), shapes
        )

    mine = rows_of(part, all_rows, num_parts)
    number = sum((mine < count).astype("int32") for count in counts[:-1])
    return jax.lax.switch(number, [branch(count) for count in counts], data)


def _padded_to(array: Tensor, like: Any) -> Tensor:
    if array.shape == like.shape:
        return array
    return jax.numpy.pad(array, [(0, size - had) for had, size in zip(array.shape, like.shape)])


def share_of_part(count: int, all_rows: int, part: Communicator) -> BatchShare:
    """Return the row counts of one replica and of the batch. A replica without rows gets one row of padding."""
    return BatchShare(count, all_rows, part, ends_early=not count, rows_here=count or 1)


def on_replica_rows(model: Any, replicas: MappedAxis, all_rows: int, function: Callable[[Any], Any], data: Any) -> Any:
    """Call `function` with this replica's rows of a batch, and return the result. `data` also has padding rows.

    Losses in `function` divide by totals over the whole batch, such as its row count `all_rows`.
    """
    size, index = replicas.num_replicas, replicas.replica_id
    is_even = all_rows % size == 0
    if is_even or synchronized_statistics(model):
        if not is_even:
            _refuse_statistics_of_padding(model, all_rows, size)
        with batch_shared(BatchShare(rows_of(index, all_rows, size), all_rows, replicas, ends_early=not is_even)):
            return function(data)

    def counting(count: int, data: Any) -> tuple[list[Tensor], Any]:
        part = CountingPart(index, size)
        with batch_shared(share_of_part(count, all_rows, part)):
            found = function(data)
        return part.counts, found

    def working(count: int, data: Any) -> Any:
        part = PartOfBatch(index, size, counted=counted)
        with batch_shared(share_of_part(count, all_rows, part)):
            return function(data)

    of_counts, shapes = jax.eval_shape(functools.partial(counting, -(-all_rows // size)), data)
    counted: list[Tensor] = []
    # First run the model for the counts by which losses divide, such as the sum of a mask. XLA removes unused results.
    if of_counts:
        counts = without_padding(lambda *own: counting(*own)[0], index, all_rows, size, data, of_counts)
        counted = replicas.all_reduce(counts, "sum")
    return in_layout_of_kernels(lambda data: without_padding(working, index, all_rows, size, data, shapes))(data)


def _refuse_statistics_of_padding(model: Any, all_rows: int, num_replicas: int) -> None:
    for layer in layers_of(model):
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable and not layer.synchronized:
            raise ValueError(
                "If the batch size is not a multiple of the number of replicas, and the optimizer needs per-replica "
                "gradients, either all `BatchNormalization` layers must be synchronized, or none. Received: "
                f"{layer.name!r}, unsynchronized next to synchronized layers, with {all_rows} rows on {num_replicas} "
                "replicas. Call `keras_shardopt.synchronize_batch_normalization(model)`, or change the batch size."
            )
