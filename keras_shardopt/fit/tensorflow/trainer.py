"""The class that `prepare(model)` mixes in on TensorFlow: methods of Keras's trainer for uneven batches.

Private names of Keras touched here (a test checks that each exists):
    `keras.src.backend.tensorflow.trainer.TFEpochIterator` - the iterator of `fit`; its `distribute_strategy` divides
        the dataset of its `data_adapter`.
    `Model._maybe_symbolic_build` of the TensorFlow trainer - builds the model from the first batch, before training.
    `Model._make_function` of the TensorFlow trainer - returns a compiled function that runs a step on an iterator.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as tensorflow_trainer
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

from keras_shardopt.backends.keras_callers import caller_instance
from keras_shardopt.backends.models import has_built_in_step, is_prepared, mix_in, optimizers_of
from keras_shardopt.backends.tensorflow.placement import check_mirrored, mirror, move_into_strategy, num_mirrored
from keras_shardopt.backends.tensorflow.processes import processes
from keras_shardopt.data.whole_batches import rows_of_parts
from keras_shardopt.fit.batch_logs import BatchLogs
from keras_shardopt.fit.callbacks import callbacks_of_call
from keras_shardopt.fit.prepared import PreparedModel, separate_logs
from keras_shardopt.fit.stateful import batch_sizes, fit_states, stateful_layers
from keras_shardopt.fit.tensorflow import workers
from keras_shardopt.fit.tensorflow.batches import spec_of, unpacked, without_none
from keras_shardopt.fit.tensorflow.step import OTHER_ROWS, TrainStep, calling, step_of_call
from keras_shardopt.numerics import Optimizer
from keras_shardopt.update.losses import own_additional_losses
from keras_shardopt.wrapping.chain import chain_of


def prepare(model: Any) -> None:
    """Replace the model's steps by steps whose losses and metrics cover the rows of all replicas."""
    if all(num_mirrored(variable) == 1 for variable in model.trainable_variables):
        check_mirrored(model.trainable_variables, processes.num_replicas_of_last_scope)
    object.__setattr__(model, _LOGS, BatchLogs(model))
    mix_in(model, PreparedOnTensorFlow)
    TrainStep.of(model).prepare()
    # Drop compiled functions, because they call the replaced methods.
    model.train_function = model.test_function = model.predict_function = None


_LOGS = "_keras_shardopt_batch_logs"
_KerasEpochIterator = tensorflow_trainer.TFEpochIterator


class PreparedOnTensorFlow(PreparedModel):
    """A model that all replicas of a strategy train together."""

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        logs = vars(self)[_LOGS]
        with workers.calling(self, "fit", *args, **kwargs) as call, _step_of_call(self, TrainStep.of(self)):
            logs.is_fitting = True
            try:
                return call(super().fit, *args, **kwargs)
            finally:
                logs.is_fitting = False

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        on_all = workers.calling(self, "evaluate", *args, **kwargs)
        with separate_logs(self), on_all as call, _step_of_call(self, TrainStep.of(self)):
            return call(super().evaluate, *args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        with workers.calling(self, "predict", *args, **kwargs) as call, _step_of_call(self, TrainStep(self, [])):
            return call(super().predict, *args, **kwargs)

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        with workers.calling(self, "train_on_batch", *args, **kwargs):
            return super().train_on_batch(*args, **kwargs)

    def test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        with workers.calling(self, "test_on_batch", *args, **kwargs):
            return super().test_on_batch(*args, **kwargs)

    def predict_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        with workers.calling(self, "predict_on_batch", *args, **kwargs):
            return super().predict_on_batch(*args, **kwargs)

    def train_step(self, data: Any) -> Any:
        return TrainStep.of(self).train(super().train_step, data)

    def test_step(self, data: Any) -> Any:
        return TrainStep.of(self).test(super().test_step, data)

    def predict_step(self, data: Any) -> Any:
        return workers.outputs_of_all(self, super().predict_step(unpacked(data)), data)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss with the `add_loss` values that the layers have now.

        Replicas are threads that take turns whenever losses exchange row counts. A layer keeps the losses of the latest
        forward pass, so after an exchange it can have those of another replica.
        """
        with own_additional_losses(self.losses):
            return super().compute_loss(*args, **kwargs)

    def reset_metrics(self) -> None:
        vars(self)[_LOGS].forget()
        super().reset_metrics()

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        # To get shapes, Keras takes the first batch and averages the replicas' parts. This fails for uneven parts, and
        # training would miss that batch or get batches in another order. So take shapes from the dataset's spec.
        strategy = self.distribute_strategy
        with strategy.scope():
            move_into_strategy([part for optimizer in optimizers_of(self) for part in chain_of(optimizer)])
        step = step_of_call(self)
        if iterator is not None and (strategy.num_replicas_in_sync > 1 or step.divides_batches):
            dataset = iterator.data_adapter.get_tf_dataset()
            if isinstance(dataset, tf.distribute.DistributedDataset):
                step.check_dataset(dataset)
                local = strategy.experimental_local_results
                data_batch = keras.tree.map_structure(lambda value: local(value)[0], next(iter(dataset)))
            else:
                # The spec has the number of rows of one replica, because a layer may require this number.
                data_batch = spec_of(dataset.element_spec, step.num_parts_of(strategy.num_replicas_in_sync))
            iterator = None
        super()._maybe_symbolic_build(iterator=iterator, data_batch=data_batch)
        with strategy.scope():
            mirror([variable for metric in self.metrics for variable in metric.variables])
        if TrainStep.of(self).divides_batches and data_batch is not None:
            self._symbolic_build(data_batch=data_batch)  # without a strategy, Keras would build it in the traced step
        if data_batch is not None and not has_built_in_step(self):
            _build_optimizers(self, data_batch)

    def _make_function(self, step_function: Callable[..., Any]) -> Callable[..., Any]:
        num_replicas = self.distribute_strategy.num_replicas_in_sync
        step = TrainStep.of(self)
        function = step.function(functools.partial(super()._make_function, step_function))
        if num_replicas == 1 and not step.divides_batches:
            return function
        function = functools.partial(_explaining_empty_parts, function, num_replicas)
        is_of_workers = workers.are_several(self)
        shows_all = functools.partial(_with_logs_of_all, self, step_function == self.train_step)
        if self.steps_per_execution == 1 and not is_of_workers:
            return functools.partial(shows_all, function)

        # With `steps_per_execution` > 1, Keras compiles a loop over a dataset's iterator, which fails with batches of
        # several replicas. Pass a Python iterator instead: its batches are taken one at a time, without that loop.
        def several_steps(iterator: Iterator[Any]) -> Any:
            iterator = workers.packed_batches(self, iterator) if is_of_workers else iterator
            batches = list(itertools.islice(iterator, 1))
            if not batches:
                raise StopIteration
            return function(itertools.chain(batches, itertools.islice(iterator, self.steps_per_execution - 1)))

        # With several workers, each step already aggregates the logs, so do not wrap the function in `shows_all`. That
        # wrapper reads metrics only if a callback of this worker needs them, but all workers must read them together.
        return several_steps if is_of_workers else functools.partial(shows_all, several_steps)


@contextlib.contextmanager
def _step_of_call(model: Any, step: TrainStep) -> Iterator[None]:
    """In this block, which runs `fit` or `evaluate`, use `step`. At the end, restore the callbacks of an outer call."""
    step.begin_call()
    with calling(step), callbacks_of_call(model):
        yield


def _with_logs_of_all(model: Any, trains: bool, function: Callable[[Any], Any], iterator: Any) -> Any:
    """Call `function(iterator)`. Its logs are means of per-replica metrics, so return metrics over all rows instead."""
    logs = vars(model)[_LOGS]
    is_read = logs.are_read(trains)
    found = function(iterator)
    if not is_read:
        return logs.last(trains, found)
    metrics = model.get_metrics_result()  # outside of a step, TensorFlow aggregates metric variables over replicas
    if not isinstance(found, dict) or metrics.keys() != found.keys():
        return found
    means = [metric for metric in model.metrics if isinstance(metric, keras.metrics.Mean)]
    if any(not float(keras.ops.convert_to_numpy(mean.count)) for mean in means):
        return found  # a custom step has returned losses and has updated no metric
    logs.show(trains, metrics)
    return metrics


class _EpochIterator(_KerasEpochIterator):  # type: ignore[misc, valid-type]
    """Copies each batch before dividing it, because a step could overwrite NumPy arrays that share its memory."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an instance of this class or, with several workers, a `WorkersIterator`."""
        return workers.WorkersIterator(*args, **kwargs) if workers.is_running() else super().__new__(cls)

    def __init__(self, distribute_strategy: Any = None, *args: Any, **kwargs: Any) -> None:
        self._model = caller_instance()  # found on the call stack, because Keras does not pass the model
        super().__init__(_Dividing(self, distribute_strategy), *args, **kwargs)
        self._distribute_strategy = distribute_strategy  # breaks the reference cycle through `_Dividing`


class _Dividing:
    """Replaces the strategy in Keras's iterator. Keras calls only its method `experimental_distribute_dataset`."""

    def __init__(self, iterator: _EpochIterator, strategy: tf.distribute.Strategy) -> None:
        self._iterator, self._strategy = iterator, strategy

    def experimental_distribute_dataset(self, dataset: tf.data.Dataset) -> Any:
        step = step_of_call(self._iterator._model)
        divides = step.divides_batches or self._strategy.num_replicas_in_sync > 1
        if divides and not isinstance(self._iterator.data_adapter, ArrayDataAdapter):
            dataset = dataset.map(lambda *batch: tf.nest.map_structure(_copied, batch))
        if step.divides_batches:
            return step.distribute(self._strategy, dataset)
        if divides and is_prepared(self._iterator._model):
            self._fit_states()
            dataset = without_none(dataset)
        return self._strategy.experimental_distribute_dataset(dataset)

    def _fit_states(self) -> None:
        layers, iterator = stateful_layers(self._iterator._model), self._iterator
        num_replicas = self._strategy.num_replicas_in_sync
        with self._strategy.scope():
            for size in batch_sizes(iterator) if layers else ():
                fit_states(layers, rows_of_parts(size, num_replicas), range(num_replicas))


def _copied(value: Any) -> Any:
    is_number = isinstance(value, tf.Tensor) and (value.dtype.is_floating or value.dtype.is_integer)
    return tf.raw_ops.DeepCopy(x=value) if is_number else value


def _build_optimizers(model: Any, data_batch: Any) -> None:
    """Build the optimizers of a custom `train_step` before it runs, because replicas cannot create variables in it."""
    strategy = model.distribute_strategy
    unbuilt = [optimizer for optimizer in optimizers_of(model) if not optimizer.built]
    variables_of: dict[int, list[Any]] = {}

    def apply(optimizer: Optimizer, grads: Any, trainable_variables: Any = None) -> None:
        variables_of[id(optimizer)] = list(trainable_variables or [])

    def apply_gradients(optimizer: Optimizer, grads_and_vars: Any) -> Any:
        variables_of[id(optimizer)] = [variable for _, variable in grads_and_vars]
        return optimizer.iterations

    if strategy.num_replicas_in_sync == 1 or not unbuilt:
        return
    for optimizer in unbuilt:  # replace methods of the instances; `vars` avoids Keras's tracking of attributes
        vars(optimizer).update(
            apply=functools.partial(apply, optimizer), apply_gradients=functools.partial(apply_gradients, optimizer)
        )
    try:
        step = tf.function(lambda data: strategy.run(model.train_step, args=(data,)), autograph=False)
        step.get_concrete_function(data_batch)
    finally:
        for optimizer in unbuilt:
            del vars(optimizer)["apply"], vars(optimizer)["apply_gradients"]
    with strategy.scope():
        for optimizer in unbuilt:
            if variables_of.get(id(optimizer)):
                optimizer.build(variables_of[id(optimizer)])


def _explaining_empty_parts(function: Callable[[Any], Any], num_replicas: int, iterator: Any) -> Any:
    """Call `function(iterator)`. Replace TensorFlow's errors about replicas without rows by clear ones."""
    try:
        return function(iterator)
    except tf.errors.InvalidArgumentError as error:
        other_rows = re.search(rf"A stateful layer .*{OTHER_ROWS}.* last batch\.", str(error))
        if other_rows:
            raise ValueError(other_rows[0]) from error
        # Explain only errors with the shape of an empty array, "[0, ...". An index error has "is not in [0, ...".
        if "[0," not in str(error) or "is not in [0," in str(error):
            raise
        raise ValueError(
            "A batch must have a row for each replica if a layer cannot run on zero rows, such as a convolution on "
            f"TensorFlow. Received: a batch with fewer than {num_replicas} rows, perhaps the last batch. Use another "
            "`batch_size`, or leave the last rows out."
        ) from error
