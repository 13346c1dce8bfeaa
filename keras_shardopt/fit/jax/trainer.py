"""The class that `prepare(model)` mixes in on JAX.

Under a `keras.distribution`, one program computes gradients, metrics and batch statistics of the whole batch. Keras
lacks two cases: uneven batches, and optimizers that need each replica's own gradients. An uneven batch is padded,
because a transfer to the devices needs equal parts. The step slices the padding off again. XLA shards the remaining
rows. For per-replica gradients, the forward and backward pass run in a `shard_map`. So does the reduction, unless
gradients are accumulated. The update and the metrics stay outside.

Several processes load the same batches, and each puts its rows of every batch on its devices. If their data is already
divided, each process uses its own rows instead. Processes exchange their row counts before every batch. Otherwise
processes with different numbers of rows or batches would wait for each other forever.

Private names of Keras touched here (a test checks that each exists):
    `Model._symbolic_build` (until 3.15), `_maybe_symbolic_build` (from 3.16 on) - builds the model from a batch.
    `Model._get_unbuilt_components` (from 3.16 on) - lists the parts of the model that are not built.
    `Trainer._get_jax_state` - moves values out of the variables of a model into the training state.
    `Trainer._jax_state` - the training state, from which `jax_state_sync` restores the variables.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
from jax.sharding import NamedSharding, PartitionSpec

from keras_shardopt.backends.jax.placement import allow_local_assignment, local_assignments, placement
from keras_shardopt.backends.jax.processes import announce, naming_lost_processes, predicting_together
from keras_shardopt.backends.models import has_built_in_step, layers_of, mix_in
from keras_shardopt.backends.patches import install
from keras_shardopt.data.shared_draws import count_call
from keras_shardopt.fit.calls import call_printing, refuse_groups
from keras_shardopt.fit.equal_start import optimizer_state
from keras_shardopt.fit.jax.batches import (
    SPLITS_SEPARATE_PART,
    EpochIterator,
    allow_uneven,
    allows_uneven,
    is_padded,
    is_together,
    on_devices,
    padding_batches,
    valid_rows,
)
from keras_shardopt.fit.jax.step import TrainStep
from keras_shardopt.fit.prepared import PreparedModel, separate_logs
from keras_shardopt.fit.sharing import gathers_rows, splits_separate_part


def prepare(model: Any) -> None:
    """Make the model accept uneven batches. Replace its step if the optimizer needs per-replica gradients."""
    install("batches")
    allow_uneven()
    step = TrainStep.of(model)
    cross_shard, *_ = step.cross_shards
    # Stack the gradients of all replicas only if `CrossShard` is outermost, because wrappers cannot use stacked arrays.
    stacks = cross_shard.accumulation is not None and step.stacks_windows
    stacks = stacks and cross_shard.state_finder.may_be_local  # otherwise gradients arrive already reduced
    if stacks and cross_shard is model.optimizer and has_built_in_step(model):
        cross_shard.accumulation.stack()
    step.prepare()
    cross_shard.pipeline.transport.stack()
    _let_assign_alone(model)
    mix_in(model, PreparedOnJax)
    # Drop compiled functions, because they call the replaced methods.
    model.train_function = model.test_function = model.predict_function = None


# The names of the parts of Keras's training state, in the order in which Keras returns them.
_TAKEN = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")


class PreparedOnJax(PreparedModel):
    """A model that all replicas and processes train together."""

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        spans_processes = jax.process_count() > 1 and keras.distribution.distribution() is not None
        if spans_processes:
            announce("begins `fit` of a prepared model")
        object.__setattr__(self, SPLITS_SEPARATE_PART, splits_separate_part(args, kwargs))
        try:
            with local_assignments() if spans_processes else contextlib.nullcontext():
                history = _call(self, super().fit, *args, **kwargs)
        finally:
            object.__delattr__(self, SPLITS_SEPARATE_PART)
        if spans_processes:
            _let_assign_alone(self)
            announce("leaves `fit` of a prepared model")
        return history

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        with separate_logs(self):
            return _call(self, super().evaluate, *args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict all rows on each process if all pass the same data. Otherwise run Keras's method, which may raise."""
        with predicting_together() if gathers_rows(self, args, kwargs) else contextlib.nullcontext():
            return _call(self, super().predict, *args, **kwargs)

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        with padding_batches(), _forgetting_failure(self), naming_lost_processes():
            return super().train_on_batch(*args, **kwargs)

    def test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        with padding_batches(), _forgetting_failure(self), naming_lost_processes():
            return super().test_on_batch(*args, **kwargs)

    def predict_on_batch(self, x: Any) -> Any:
        is_built = all(layer.built for layer in layers_of(self))  # otherwise Keras builds the model from these rows
        with _forgetting_failure(self), naming_lost_processes():
            return super().predict_on_batch(on_devices(x) if is_built else x)

    def train_step(self, state: Any, data: Any) -> Any:
        step = TrainStep.of(self)
        refuse_groups(step.cross_shards)  # check again, because `compile` may have set another optimizer
        return step.train(super().train_step, state, valid_rows(data))

    def test_step(self, state: Any, data: Any) -> Any:
        return TrainStep.of(self).test(super().test_step, state, valid_rows(data))

    def predict_step(self, state: Any, data: Any) -> Any:
        outputs, others = super().predict_step(state, valid_rows(data))
        if is_together() or is_padded(data):
            everywhere = NamedSharding(keras.distribution.distribution().device_mesh.backend_mesh, PartitionSpec())
            outputs = jax.lax.with_sharding_constraint(outputs, everywhere)
        return outputs, others

    def make_train_function(self, *args: Any, **kwargs: Any) -> None:
        with _new_function(self, "train_step"), TrainStep.of(self).compiler_options():
            super().make_train_function(*args, **kwargs)

    def make_test_function(self, *args: Any, **kwargs: Any) -> None:
        with _new_function(self, "test_step"), TrainStep.of(self).compiler_options():
            super().make_test_function(*args, **kwargs)

    def load_weights(self, *args: Any, **kwargs: Any) -> None:
        """Load weights on one process or on all.

        Keras creates an optimizer in this call. Under a distribution, JAX would then wait for all other processes, so
        the call runs without the distribution.
        """
        real = super().load_weights
        _let_assign_alone(self)
        if jax.process_count() == 1:
            real(*args, **kwargs)
        else:
            placement.outside_strategy(lambda: real(*args, **kwargs))

    def reset_metrics(self) -> None:
        """Raise ValueError if not all processes begin the epoch. Without this, JAX would fail with an unclear error."""
        if SPLITS_SEPARATE_PART in vars(self) and is_together():
            announce("starts an epoch of a prepared model")
        super().reset_metrics()

    def _get_jax_state(self, purge_model_variables: bool = False, **which: bool) -> Any:
        """Keep the values that Keras moves out of variables, to restore them if the first step of the epoch fails."""
        if which.get("optimizer_variables"):
            TrainStep.of(self).before_step()
        taken = super()._get_jax_state(purge_model_variables=purge_model_variables, **which)
        if purge_model_variables:
            self._jax_state = dict(zip([name for name in _TAKEN if which.get(name)], taken))
        return taken

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Build the model from the batch that all processes have together, because this process may have no rows."""
        if isinstance(iterator, EpochIterator) and allows_uneven(keras.distribution.distribution()):
            if not any(self._get_unbuilt_components()):
                return
            data_batch = next(iterator.parts() if iterator._is_whole else iterator.batches(), None)
        super()._maybe_symbolic_build(iterator=iterator, data_batch=_without_padding(data_batch))

    def _symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        super()._symbolic_build(iterator=iterator, data_batch=_without_padding(data_batch))


def _without_padding(batch: Any) -> Any:
    """Return a batch for building the model. If it is padded, return only the shapes of its arrays without padding."""
    return jax.eval_shape(valid_rows, batch) if is_padded(batch) else batch


@contextlib.contextmanager
def _new_function(model: Any, name: str) -> Iterator[None]:
    """In this block, replace the model's method `name` by a new function. Otherwise JAX reuses an old trace."""
    if name in vars(model):  # keep a step that the user has set
        yield
        return
    object.__setattr__(model, name, functools.partial(getattr(model, name)))
    try:
        yield
    finally:
        object.__delattr__(model, name)


def _put_back(model: Any) -> None:
    """After an error in `fit`, give variables back the values that Keras had moved into the training state.

    If the step that failed has already donated their buffers to JAX, the values are lost: do nothing.
    """
    if not any(value.is_deleted() for value in keras.tree.flatten(getattr(model, "_jax_state", None) or {})):
        model.jax_state_sync()


def _call(model: Any, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    allow_uneven()  # the distribution may have been set after `prepare`
    try:
        with naming_lost_processes():
            return call_printing(jax.process_index() == 0, real, *args, **kwargs)
    except BaseException:
        _put_back(model)
        raise
    finally:
        count_call()


def _let_assign_alone(model: Any) -> None:
    if jax.process_count() > 1:
        allow_local_assignment([*model.variables, *optimizer_state(model)])


@contextlib.contextmanager
def _forgetting_failure(model: Any) -> Iterator[None]:
    """If a call on one batch fails, drop the training state `_jax_state`, because variables still have their values."""
    try:
        yield
    except BaseException:
        model._jax_state = None
        raise
