"""Stateful RNNs on several replicas: each replica keeps the states of its own rows from batch to batch.

Keras creates states for the rows in `batch_shape`, and keeps them only in the layer: not in `model.variables` or files.
On all backends, `batch_shape` can have the rows of a whole batch; replicas then divide the states. If each replica has
its own variables or copies (as under a `MirroredStrategy`), `batch_shape` can also have the rows of one replica.

Private names of Keras touched here (a test checks that each exists):
    `RNN._create_state_variables`, `_expected_batch_size` - creates the states; the required number of rows of a call.
    `EpochIterator.data_adapter`, `steps_per_epoch`, and `has_partial_batch`, `partial_batch_size`, `batch_size` and
        `num_batches` of `keras.src.trainers.data_adapters.array_data_adapter.ArrayDataAdapter` - sizes of its batches.
    `Variable._value`, `_shape` - the value and shape of a variable, used if no stateless scope replaces them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

from keras_shardopt.backends.active import placement
from keras_shardopt.backends.models import ids_of_states, layers_of, states_of
from keras_shardopt.data.whole_batches import rows_of_parts
from keras_shardopt.numerics import Tensor


def stateful_layers(model: Any) -> list[Any]:
    """Return the RNNs of a model that keep their states from batch to batch."""
    return [layer for layer in layers_of(model) if isinstance(layer, keras.layers.RNN) and layer.stateful]


def fit_states(layers: Sequence[Any], rows: Sequence[int], here: Sequence[int] = ()) -> None:
    """Give each replica the states of its rows. Raise ValueError if the states do not match the rows of the batch.

    Args:
        layers: stateful layers. Unbuilt layers are skipped; they get correct states when built.
        rows: the number of rows of the batch on each replica. All must be equal. States for the rows of one replica
            stay as they are; states for the rows of all replicas are divided.
        here: the indices of the replicas in this process; empty if states cannot be divided.
    """
    for layer in layers:
        if layer.states is None:
            continue
        num_states = rows_of_states(layer)
        if all(num == num_states for num in rows):
            continue
        if len(set(rows)) > 1 or num_states != sum(rows) or not here:
            by_replica = f", by replica {list(rows)}" if len(rows) > 1 else ""
            raise ValueError(explained(layer, f"a batch of {sum(rows)} rows{by_replica}"))
        before = [placement.replica_values(state) for state in keras.tree.flatten(layer.states)]
        layer._create_state_variables(rows[0])
        layer._expected_batch_size = rows[0]
        for state, copies in zip(keras.tree.flatten(layer.states), before):
            parts = [copy[i * rows[0] : (i + 1) * rows[0]] for i, copy in zip(here, copies)]
            placement.assign_replica_values(state, parts)


def rows_of_states(layer: Any) -> int:
    """Return the number of rows of the states of a built stateful layer."""
    found: int = keras.tree.flatten(layer.states)[0].shape[0]
    return found


def explained(layer: Any, received: str, rows: str = "of a whole batch") -> str:
    """Return the error message for a batch whose rows do not match the states of a layer.

    `received` describes the batch. `rows` completes the advice "Give `batch_shape` the number of rows ...".
    """
    return (
        "A stateful layer has one state per row of a batch, so all batches, and all replicas, must have the same "
        f"number of rows. Received: {received}, with {rows_of_states(layer)} states in layer {layer.name!r}. Give "
        f"`keras.Input(batch_shape=...)` the number of rows {rows}, use a `batch_size` that is a multiple of the "
        "number of replicas, and leave out the rows of a smaller last batch."
    )


def batch_sizes(iterator: Any) -> list[int]:
    """Return the distinct row counts of an epoch's batches, if these are available before Keras loads the batches."""
    adapter = iterator.data_adapter
    if not isinstance(adapter, ArrayDataAdapter):  # other adapters may drop a smaller last batch
        return [] if adapter.batch_size is None else [adapter.batch_size]
    sizes = [adapter.batch_size] if adapter.num_batches > adapter.has_partial_batch else []
    if adapter.has_partial_batch and not iterator.steps_per_epoch:
        sizes.append(adapter.partial_batch_size)
    return sizes


@contextlib.contextmanager
def states_of_replica(model: Any, index: Tensor, num_replicas: int, all_rows: int) -> Iterator[None]:
    """In this block, give stateful layers only the states of one replica's rows.

    `index` is the replica's index, a traced value. Raise ValueError unless the states have `all_rows` rows, and
    `num_replicas` divides this number.
    """
    layers = [layer for layer in stateful_layers(model) if layer.states is not None]
    others = ids_of_states(model) - {id(state) for layer in layers for state in states_of(layer)}
    if others:
        names = [layer.name for layer in layers_of(model) if any(id(state) in others for state in states_of(layer))]
        raise ValueError(
            "With `replica_clipnorm`, `replica_transform`, `extensions` or `gradient_accumulation_steps`, JAX can "
            "divide only the states of Keras RNNs among replicas. Received: `states` in layer "
            f"{', '.join(map(repr, names))}. Leave these options out."
        )
    fit_states(layers, [all_rows] if all_rows % num_replicas == 0 else rows_of_parts(all_rows, num_replicas))
    rows = all_rows // num_replicas
    states = keras.tree.flatten([layer.states for layer in layers])
    before = [(state, state._value, state._shape) for state in states]
    try:
        for state, value, shape in before:
            state._shape = (rows, *shape[1:])
            state._value = keras.ops.slice(value, (index * rows, *[0] * (len(shape) - 1)), state._shape)
        for layer in layers:
            layer._expected_batch_size = rows
        yield
    finally:
        for state, value, shape in before:
            state._value, state._shape = value, shape
        for layer in layers:
            layer._expected_batch_size = all_rows
