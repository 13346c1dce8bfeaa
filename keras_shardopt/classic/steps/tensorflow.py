"""Training steps on TensorFlow: a `tf.function` that runs on each replica of the strategy.

In a step, `keras.losses` return means over the rows of a replica, as on the other backends. TensorFlow's default in a
strategy would also divide by the number of replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_shardopt.backends.communicator import GradientState
from keras_shardopt.backends.patches import install
from keras_shardopt.backends.tensorflow.communicator import ReplicaContext
from keras_shardopt.backends.tensorflow.processes import local_replicas
from keras_shardopt.numerics import Tensor, Variable
from keras_shardopt.update.trainer_context import BatchShare, batch_shared

GRADIENT_STATE = GradientState.LOCAL
"""The state of gradients in these steps: not yet reduced over replicas, with any strategy."""


def compile_step(
    function: Callable[..., Tensor], variables: Sequence[Variable], jit_compile: bool | None
) -> Callable[..., Tensor]:
    """Compile a training step. It runs on the replicas of the current strategy."""
    del variables
    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync > 1:
        install("losses")

    def on_replica(batch: Any, constants: dict[str, Any]) -> Tensor:
        if strategy.num_replicas_in_sync == 1:
            return function(*batch, **constants)
        replicas = ReplicaContext(strategy, tf.distribute.get_replica_context())
        mine = _num_rows(batch)
        with batch_shared(BatchShare(mine, mine * strategy.num_replicas_in_sync, replicas)):
            return function(*batch, **constants)

    def step(batch: Any, **constants: Any) -> Tensor:
        losses = strategy.run(on_replica, args=(batch, constants))
        return strategy.reduce(tf.distribute.ReduceOp.MEAN, losses, axis=None)

    traced = (
        step
        if jit_compile is False
        else tf.function(step, autograph=False, jit_compile=bool(jit_compile), reduce_retracing=True)
    )

    def run(*batch: Any, **constants: Any) -> Tensor:
        with strategy.scope():
            return traced(keras.tree.map_structure(lambda value: _divided(value, strategy), batch), **constants)

    return run


def _num_rows(batch: Any) -> Any:
    tensor = next(value for value in keras.tree.flatten(batch) if value.shape.rank)
    return tf.shape(tensor)[0] if tensor.shape[0] is None else tensor.shape[0]


def _divided(value: Any, strategy: tf.distribute.Strategy) -> Any:
    """Split the rows of a tensor among the replicas, unless the tensor is already split."""
    if isinstance(value, tf.distribute.DistributedValues):
        return value
    value = tf.convert_to_tensor(value)
    if strategy.num_replicas_in_sync == 1 or not value.shape.rank:
        return value
    first, num_local = local_replicas(strategy)
    if value.shape[0] % num_local:
        raise ValueError(
            "The number of rows must be divisible by the number of replicas. "
            f"Received: a batch of shape {tuple(value.shape)}, for {num_local} replicas. Drop the last rows."
        )
    parts = tf.split(value, num_local)
    return strategy.experimental_distribute_values_from_function(
        lambda context: parts[context.replica_id_in_sync_group - first]
    )
