"""Reports the memory of a replica by kind, such as weights or gradients, as predicted and as measured."""

from __future__ import annotations

import dataclasses
from typing import Any

from keras_shardopt.backends import for_backend, stored_parts
from keras_shardopt.backends.active import placement, processes
from keras_shardopt.backends.models import model_compiled_with
from keras_shardopt.numerics import overwrites_variable
from keras_shardopt.sharding.report import Bytes, MemoryReport, bytes_on_a_replica, item_size, size_of

# PyTorch only (otherwise None): measures the memory of gradients, which exist between steps.
_gradients = for_backend({"torch": "keras_shardopt.backends.torch.bucket_bytes"})


class ReportsMemory:
    """Reports the memory of each replica."""

    built: bool

    def memory_report(self) -> MemoryReport:
        """Return the bytes of optimizer state on each replica, and all memory that training keeps on this replica.

        PyTorch keeps gradients until the next batch: to measure them, call `self.model.optimizer.memory_report()` in
        `on_train_batch_end` of a callback.

        Returns:
            A `MemoryReport` with `held` by replica, `ideal`, `max_over_ideal`, `replicated`, and `kinds`: predicted and
            measured bytes of weights, gradients, state, buffers and host copies. `print` formats it.

        Raises:
            ValueError: before the optimizer is built.

        Example:
            >>> import keras, keras_shardopt as ks
            >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
            >>> model.compile(ks.CrossShard(keras.optimizers.Adam(), shard_state=True), "mse")
            >>> model.optimizer.build(model.trainable_variables)
            >>> report = model.optimizer.memory_report()
            >>> len(report.held), report.held[0] == report.whole
            (1, True)
            >>> report.kinds["weights"]
            Bytes(predicted=40, measured=40)
        """
        if not self.built:
            raise ValueError(
                "No optimizer state exists before the build. Call `optimizer.build(model.trainable_variables)` first."
            )
        optimizer: Any = self
        report: MemoryReport = optimizer._state_report()
        return dataclasses.replace(report, kinds=_kinds(optimizer, report))


def _kinds(optimizer: Any, report: MemoryReport) -> dict[str, Bytes]:
    model, shards, reducer = model_compiled_with(optimizer), optimizer._shards, optimizer.pipeline.reducer
    trainable = [v for v in optimizer._trainable_variables if not overwrites_variable(v)]
    weights = optimizer._trainable_variables if model is None else model.weights
    slices_of_weights = []
    if shards is not None and any(stage.divides_weights for stage in optimizer.extension_stages):
        slices_of_weights = shards.stand_ins
    divided = {id(variable) for variable in shards.variables} if slices_of_weights else ()
    own_weights = [v for v in weights if id(v) not in divided] + slices_of_weights
    sums = [] if optimizer.accumulation is None else optimizer.accumulation.sums.totals
    known = {id(variable) for variable in sums}
    kept = [v for v in optimizer._variables if id(v) not in known] + ([] if shards is None else shards.copies)
    slices, sent = reducer.predicted_bytes()
    gradients, buffers = None, placement.bytes_held(kept)
    if _gradients is not None:
        grads, sending = _gradients.measured(trainable, reducer.buckets)
        gradients, buffers = grads + placement.bytes_held(sums), buffers + sending
    held = report.held[0 if shards is None else shards.replica_id]
    return {
        "weights": Bytes(bytes_on_a_replica(own_weights), placement.bytes_held([*weights, *slices_of_weights])),
        "gradients": Bytes((slices or bytes_on_a_replica(trainable)) + bytes_on_a_replica(sums), gradients),
        "state": Bytes(held, placement.bytes_held(optimizer._state)),
        "buffers": Bytes(None if sent is None else sent + bytes_on_a_replica(kept), buffers),
        "host copies": Bytes(_saved_bytes(optimizer, weights, report), stored_parts.bytes_of_copies()),
    }


def _saved_bytes(optimizer: Any, weights: Any, report: MemoryReport) -> int:
    """Return the bytes that this process copies to save a sharded checkpoint."""
    num_processes, _ = processes.process()
    is_divided = num_processes > 1 and optimizer._holds_slices
    state = report.held[optimizer._shards.replica_id] if is_divided else None
    shared = sum(size_of(v) * item_size(v) for v in weights) + (report.whole if state is None else 0)
    return (state or 0) + -(-shared // num_processes)
