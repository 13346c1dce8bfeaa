"""The methods that `prepare(model)` replaces in Keras' JAX trainer.

Under a `keras.distribution` one program computes gradients, metrics and batch statistics of the whole batch. Two cases
are missing: uneven batches, and optimizers that need each replica's own gradients. An uneven batch is padded, and
steps slice the padding off again: XLA can shard an uneven number of rows. For per-replica gradients, the forward pass,
backward pass and reduction run in a `shard_map`. The update and the metrics stay outside.

Several processes draw the same batches, and each puts its part of every batch on its devices. If their data is already
divided, each process feeds its own rows instead. Processes exchange their row counts before every batch. Otherwise
processes with different numbers of rows or batches would wait for each other forever.

Private names of Keras touched here (a test holds each of them):
    `Model._symbolic_build` (until 3.15), `_maybe_symbolic_build`, `_get_unbuilt_components` (on JAX from Keras 3.16
        on) - builds the model from the first batch of this process; whether anything is to be built.
    `Trainer._get_jax_state`, `_jax_state` - takes values out of the variables of a model, for steps; what to put back.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
from jax.sharding import NamedSharding, PartitionSpec

from keras_shardopt.backends.jax.placement import assigning_alone, let_assign_alone, placement
from keras_shardopt.backends.jax.processes import naming_lost_processes, predicting_together, tell
from keras_shardopt.backends.models import has_built_in_step, layers_of, override_method
from keras_shardopt.data.own_parts import is_own_part
from keras_shardopt.data.shared_draws import note_end_of_call
from keras_shardopt.fit.jax.batches import (
    SPLITS_OWN_PART,
    EpochIterator,
    filling_up,
    is_filled_up,
    is_together,
    on_devices,
    rows_that_count,
    state_of,
    take_uneven,
    takes_uneven,
    watch_batches,
)
from keras_shardopt.fit.jax.step import step_of
from keras_shardopt.fit.overrides import call_silently, refuse_groups
from keras_shardopt.fit.sharing import sharing_of, splits_own_part


def prepare(model: Any, reducers_of: Callable[[Any], list[Any]]) -> None:
    """Support uneven batches, and replace the model's step if its optimizer needs per-replica gradients."""
    watch_batches()
    take_uneven()
    object.__setattr__(model, "_keras_shardopt_reducers_of", reducers_of)
    step = step_of(model)
    reducer, *_ = step.reducers
    # The reducer must be outermost: an outer wrapper would read one replica's gradients in each micro-batch.
    stacks = reducer.accumulation is not None and step.stacks_windows
    stacks = stacks and reducer.state_finder.may_be_local  # otherwise global gradients are accumulated
    if stacks and reducer is model.optimizer and has_built_in_step(model):
        reducer.accumulation.stack()
    step.prepare()
    reducer.pipeline.transport.stack()
    override_method(model, "train_step", _train_step)
    override_method(model, "test_step", _test_step)
    for name in ("fit", "evaluate", "predict"):
        override_method(model, name, _silent_unless_chief)
    override_method(model, "fit", _fit)
    override_method(model, "reset_metrics", _reset_metrics)
    override_method(model, "predict", _predict)
    override_method(model, "predict_step", _predict_step)
    for name in ("train_on_batch", "test_on_batch"):
        override_method(model, name, _on_batch)
    override_method(model, "predict_on_batch", _predict_on_batch)
    override_method(model, "_get_jax_state", _get_jax_state)
    override_method(model, "make_train_function", _make_train_function)
    override_method(model, "make_test_function", _make_test_function)
    override_method(model, "load_weights", _load_weights)
    _let_assign_alone(model)
    if hasattr(model, "_maybe_symbolic_build"):
        override_method(model, "_maybe_symbolic_build", _maybe_symbolic_build)
    else:
        override_method(model, "_symbolic_build", _symbolic_build)
    # Functions compiled before call the replaced methods.
    model.train_function = model.test_function = model.predict_function = None


def _make_train_function(model: Any, real: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    _renew(model, "train_step")
    with step_of(model).compiler_options():
        real(*args, **kwargs)


def _make_test_function(model: Any, real: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    _renew(model, "test_step")
    with step_of(model).compiler_options():
        real(*args, **kwargs)


def _renew(model: Any, name: str) -> None:
    """Replace a step by an equivalent new function: otherwise JAX would reuse the trace of an earlier `compile`."""
    step = vars(model).get(name)
    if isinstance(step, functools.partial):
        object.__setattr__(model, name, functools.partial(step.func, *step.args))


# In Keras' order.
_TAKEN = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")


def _get_jax_state(model: Any, real: Callable[..., Any], purge_model_variables: bool = False, **which: bool) -> Any:
    """Remember the values that Keras takes out of variables: a failed first step of an epoch must not lose them."""
    if which.get("optimizer_variables"):
        step_of(model).before_step()
    taken = real(purge_model_variables=purge_model_variables, **which)
    if purge_model_variables:
        model._jax_state = dict(zip([name for name in _TAKEN if which.get(name)], taken))
    return taken


def _put_back(model: Any) -> None:
    """Restore the values that a call took out of variables, unless the failed step has donated their buffers."""
    if not any(value.is_deleted() for value in keras.tree.flatten(getattr(model, "_jax_state", None) or {})):
        model.jax_state_sync()


def _silent_unless_chief(model: Any, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    take_uneven()  # the distribution may have been set after `prepare`
    try:
        with naming_lost_processes():
            return real(*args, **kwargs) if jax.process_index() == 0 else call_silently(real, *args, **kwargs)
    except BaseException:
        _put_back(model)
        raise
    finally:
        note_end_of_call()


def _fit(model: Any, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    spans_processes = jax.process_count() > 1 and keras.distribution.distribution() is not None
    if spans_processes:
        tell("begins `fit` of a prepared model")
    object.__setattr__(model, SPLITS_OWN_PART, splits_own_part(args, kwargs))
    try:
        with assigning_alone() if spans_processes else contextlib.nullcontext():
            history = real(*args, **kwargs)
    finally:
        object.__delattr__(model, SPLITS_OWN_PART)
    if spans_processes:
        _let_assign_alone(model)
        tell("leaves `fit` of a prepared model")
    return history


def _load_weights(model: Any, real: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Load weights on one process or all. Keras creates an optimizer for it; JAX would make that a collective."""
    _let_assign_alone(model)
    if jax.process_count() == 1:
        real(*args, **kwargs)
    else:
        placement.outside_strategy(lambda: real(*args, **kwargs))


def _let_assign_alone(model: Any) -> None:
    if jax.process_count() > 1:
        let_assign_alone([*model.variables, *state_of(model)])


def _reset_metrics(model: Any, real: Callable[[], None]) -> None:
    """Check at the start of an epoch that all processes are here. Otherwise JAX would fail with an unclear error."""
    if SPLITS_OWN_PART in vars(model) and is_together():
        tell("starts an epoch of a prepared model")
    real()


def _predict(model: Any, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return all rows on each process if all have the same data. Keras' method, otherwise used, raises there."""
    x = kwargs.get("x", args[0] if args else None)
    sharing = sharing_of(model)
    if not (sharing.gather and sharing.auto_shard) or is_own_part(x):
        return real(*args, **kwargs)
    with predicting_together():
        return real(*args, **kwargs)


def _on_batch(model: Any, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with filling_up(), _forgetting_failure(model), naming_lost_processes():
        return real(*args, **kwargs)


@contextlib.contextmanager
def _forgetting_failure(model: Any) -> Iterator[None]:
    """Drop `_jax_state` if a call fails: this call leaves values in variables, and older ones must not replace them."""
    try:
        yield
    except BaseException:
        model._jax_state = None
        raise


def _predict_on_batch(model: Any, real: Callable[[Any], Any], x: Any) -> Any:
    is_built = all(layer.built for layer in layers_of(model))  # if False, Keras builds the model from these rows
    with _forgetting_failure(model), naming_lost_processes():
        return real(on_devices(x) if is_built else x)


def _test_step(model: Any, real: Callable[..., Any], state: Any, data: Any) -> Any:
    return step_of(model).test(real, state, rows_that_count(data))


def _predict_step(model: Any, real: Callable[..., Any], state: Any, data: Any) -> Any:
    del model
    outputs, others = real(state, rows_that_count(data))
    if is_together() or is_filled_up(data):
        everywhere = NamedSharding(keras.distribution.distribution().device_mesh.backend_mesh, PartitionSpec())
        outputs = jax.lax.with_sharding_constraint(outputs, everywhere)
    return outputs, others


def _maybe_symbolic_build(model: Any, real: Callable[..., None], iterator: Any = None, data_batch: Any = None) -> None:
    """Build from a batch of all processes, because this process may have none."""
    if isinstance(iterator, EpochIterator) and takes_uneven(keras.distribution.distribution()):
        if not any(model._get_unbuilt_components()):
            return
        data_batch = next(iterator.parts() if iterator._is_whole else iterator.batches(), None)
    _symbolic_build(model, real, iterator, data_batch)


def _symbolic_build(model: Any, real: Callable[..., None], iterator: Any = None, data_batch: Any = None) -> None:
    """Build from the shapes of the rows without padding."""
    del model
    data_batch = jax.eval_shape(rows_that_count, data_batch) if is_filled_up(data_batch) else data_batch
    real(iterator=iterator, data_batch=data_batch)


def _train_step(model: Any, real: Callable[..., Any], state: Any, data: Any) -> Any:
    """Run the trainer's step, or the step that the optimizer needs."""
    step = step_of(model)
    refuse_groups(step.reducers)  # another `compile` may have set them
    return step.train(real, state, rows_that_count(data))
