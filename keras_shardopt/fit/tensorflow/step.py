"""One training or test step on TensorFlow of a model passed to `prepare`."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_shardopt.backends.models import has_built_in_step
from keras_shardopt.backends.tensorflow.communicator import ReplicaContext
from keras_shardopt.backends.tensorflow.losses import logged
from keras_shardopt.fit.batch_normalization import synchronized_statistics
from keras_shardopt.fit.calls import num_rows, refuse_groups
from keras_shardopt.fit.model_step import ModelStep
from keras_shardopt.fit.stateful import explained, rows_of_states, stateful_layers
from keras_shardopt.fit.tensorflow import workers
from keras_shardopt.fit.tensorflow.batches import unpacked
from keras_shardopt.update.losses import convert_values, share_losses
from keras_shardopt.update.trainer_context import BatchShare, batch_shared
from keras_shardopt.wrapping.rollback import statistics_in


class TrainStep(ModelStep):
    """Runs Keras's step on a replica's rows. Extensions override some methods."""

    divides_batches = False
    """Whether the method `distribute` divides batches in place of Keras, even with one replica."""

    averages_statistics = True
    """Whether moving statistics become the mean over replicas after each training step."""

    def begin_call(self) -> None:
        """Called when `fit` or `evaluate` begins. Extensions override it to check that the step can run."""

    def num_parts_of(self, num_replicas: int) -> int:
        """Return the number of parts into which a batch is divided. Default: one per replica."""
        return num_replicas

    def distribute(self, strategy: tf.distribute.Strategy, dataset: tf.data.Dataset) -> Any:
        """Divide a dataset among replicas. Called only if `divides_batches`."""
        raise NotImplementedError

    def check_dataset(self, dataset: Any) -> None:
        """Raise ValueError for a dataset that the step cannot use. Called before the model is built."""

    def function(self, make: Callable[[], Callable[[Any], Any]]) -> Callable[[Any], Any]:
        """Return a function that runs compiled steps on the batches of an iterator. Default: Keras's, `make()`."""
        return make()

    def train(self, real: Callable[[Any], Any], data: Any) -> Any:
        """Run `real`, the training step of Keras, on a replica's batch. Return logs."""
        return self._run(real, data, trains=True)

    def test(self, real: Callable[[Any], Any], data: Any) -> Any:
        """Run `real`, the test step of Keras, on a replica's batch. Return logs."""
        return self._run(real, data)

    def _run(self, real: Callable[[Any], Any], data: Any, trains: bool = False) -> Any:
        strategy, data = tf.distribute.get_strategy(), unpacked(data)
        if strategy.num_replicas_in_sync == 1:
            return real(data)
        model = self.model
        refuse_groups(self.cross_shards)  # check again, because `compile` may have set another optimizer
        share_losses(model)
        if not has_built_in_step(model):
            _log_whole_losses(model)
        replicas = ReplicaContext(strategy, tf.distribute.get_replica_context())
        mine = tf.convert_to_tensor(num_rows(data))
        data = _with_checked_states(model, data, mine)
        (all_rows,) = replicas.all_reduce([mine], "sum")
        # On a replica without rows, moving statistics (`BatchNormalization`) become NaN, so restore their old values.
        shared = synchronized_statistics(model)
        statistics = [v for v in statistics_in([model]) if id(v) not in shared]
        before = [tf.identity(keras.ops.convert_to_tensor(v)) for v in statistics]
        with batch_shared(BatchShare(mine, all_rows, replicas, losses_are_divided=True)):
            logs = real(data)
        after = [tf.where(mine > 0, keras.ops.convert_to_tensor(v), value) for v, value in zip(statistics, before)]
        if trains and self.averages_statistics:
            # Keras keeps statistics per replica, and reads those of the first replica, so average the statistics. In
            # float64, the mean of equal values is exact. Values are equal after a skipped update.
            sums = [tf.cast(value, tf.float64) * tf.cast(mine, tf.float64) for value in after]
            sums = replicas.all_reduce([tf.where(mine > 0, each, 0) for each in sums], "sum")
            after = [tf.cast(each / tf.cast(all_rows, tf.float64), v.dtype) for each, v in zip(sums, statistics)]
        for variable, value in zip(statistics, after):
            variable.assign(value)
        return workers.logs_of_all(model, logs, replicas) if replicas.is_multi_process else logs


def _with_checked_states(model: Any, data: Any, num_rows: Any) -> Any:
    """Return the data, with a check in the compiled step that stateful layers have one state per row of the replica."""
    checks = [
        tf.debugging.assert_equal(num_rows, rows_of_states(layer), explained(layer, OTHER_ROWS, "of one replica"))
        for layer in stateful_layers(model)
        if layer.states is not None
    ]
    if not checks:
        return data
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.nest.map_structure(lambda leaf: None if leaf is None else tf.identity(leaf), data)


OTHER_ROWS = "another number of rows on a replica"
"""A text in the error about a stateful layer. The trainer searches for it in errors of TensorFlow."""


def _log_whole_losses(model: Any) -> None:
    """Make each `Mean` metric log the loss of the whole batch if a custom `train_step` passes a loss to the metric."""
    for metric in model.metrics:
        if type(metric).update_state is keras.metrics.Mean.update_state:
            convert_values(metric, _as_logged)


def _as_logged(value: Any, sample_weight: Any) -> tuple[Any, Any]:
    # Keras divides losses by the number of replicas, because it sums gradients. `logged` undoes this in the logs.
    return logged(value), sample_weight


_of_call: contextvars.ContextVar[TrainStep | None] = contextvars.ContextVar("of_call", default=None)


@contextlib.contextmanager
def calling(step: TrainStep) -> Iterator[None]:
    """In this block, which runs `fit`, `evaluate` or `predict`, divide batches with this step."""
    token = _of_call.set(step)
    try:
        yield
    finally:
        _of_call.reset(token)


def step_of_call(model: Any) -> TrainStep:
    """Return the step that `calling` has set for this model; for another model, a plain `TrainStep`."""
    step = _of_call.get()
    return step if step is not None and step.model is model else TrainStep(model, [])
