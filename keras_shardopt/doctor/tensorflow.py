"""Provides an all-reduce over the replicas of TensorFlow's strategy in one `tf.function`, to measure its time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def all_reduce(num_floats: int) -> Callable[[], None]:
    """Return a function that sums a vector of `num_floats` floats over all replicas, and waits for the result."""
    strategy = tf.distribute.get_strategy()
    vectors = strategy.experimental_distribute_values_from_function(lambda context: tf.ones(num_floats))

    # Use `identity` to place the vector on a device. If a worker has one device, the all-reduce needs this.
    def on_replica(vector: tf.Tensor) -> tf.Tensor:
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(vector))[:1]

    @tf.function
    def program(vectors: Any) -> Any:
        return strategy.experimental_local_results(strategy.run(on_replica, args=(vectors,)))

    def run() -> None:
        for part in program(vectors):
            part.numpy()

    return run
