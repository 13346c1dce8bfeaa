"""What `prepare(model)` changes in Keras' JAX trainer.

Under a `keras.distribution` one program runs on the whole batch, so gradients, metrics and batch statistics are those
of the whole batch anyway. Two things are missing: a batch that the devices cannot divide equally, and each replica's
own gradients for an optimizer that needs them. The first is filled up, and steps leave out again what fills it up: XLA
divides such rows too. For the second, forward and backward pass run in a `shard_map`, up to the reduced gradients; the
update and the metrics stay outside.

Several processes go through the same batches, drawn alike, and each puts its part of every batch on its devices; or
each feeds rows of its own, where its data is a part already. They exchange their numbers of rows before every
batch: processes with different numbers of rows, or of batches, would otherwise wait for each other for ever.

Private names of Keras touched here (a test holds each of them):
    `Model._symbolic_build` (until 3.15), `_maybe_symbolic_build`, `_get_unbuilt_components` (on JAX from Keras 3.16
        on) - builds the model from the first batch of this process; whether anything is to be built.
    `Model.compute_loss_and_updates`, `_update_metrics_variables` - the two halves of the trainer's step.
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

from keras_shardopt.backends.communicator import GlobalView
from keras_shardopt.backends.gradient_scope import claim_reduction
from keras_shardopt.backends.jax.communicator import MappedAxis, batch_size_of, divided_along, seed_offset
from keras_shardopt.backends.jax.placement import assigning_alone, let_assign_alone, placement
from keras_shardopt.backends.jax.processes import naming_lost_processes, predicting_together, tell
from keras_shardopt.backends.jax.runtime import OWN_GRADIENTS
from keras_shardopt.backends.models import has_built_in_step, layers_of, override_method
from keras_shardopt.backends.scopes import assigning_nothing
from keras_shardopt.data.own_parts import is_own_part
from keras_shardopt.data.shared_draws import note_end_of_call
from keras_shardopt.fit.jax import local_sgd
from keras_shardopt.fit.jax.batches import (
    SPLITS_OWN_PART,
    EpochIterator,
    filling_up,
    is_filled_up,
    is_together,
    on_devices,
    padded,
    rows_that_count,
    state_of,
    take_uneven,
    takes_uneven,
    watch_batches,
)
from keras_shardopt.fit.jax.parts import (
    compiled_alike,
    evaluated_in_parts,
    gradients_of_rows,
    in_parts,
    metrics_of_losses,
    on_every_device,
    with_masks,
    with_zeros,
    without_own,
)
from keras_shardopt.fit.jax.uneven import on_own_rows, rows_of
from keras_shardopt.fit.overrides import call_silently, num_rows, reducers_in, refuse_groups
from keras_shardopt.fit.sharing import sharing_of, splits_own_part
from keras_shardopt.fit.stateful import states_of_replica
from keras_shardopt.fit.virtual_replicas import num_parts_of
from keras_shardopt.numerics import Tensor
from keras_shardopt.update.losses import share_losses
from keras_shardopt.update.step import Step
from keras_shardopt.update.trainer_context import BatchShare, batch_shared, row_share


def prepare(model: Any, reducers_of: Callable[[Any], list[Any]]) -> None:
    """Lets batches be uneven, and gives the model a step that shows its optimizer each replica's gradients."""
    watch_batches()
    take_uneven()
    object.__setattr__(model, "_keras_shardopt_reducers_of", reducers_of)
    reducers = reducers_in(model, reducers_of)
    # Around it nothing may look at gradients in each micro-batch, which would then be one replica's each.
    stacks = reducers[0].accumulation is not None and reducers[0].virtual_replicas is None
    stacks = stacks and reducers[0].local_updates is None  # where each replica adds up its own
    stacks = stacks and reducers[0].state_finder.may_be_local  # otherwise those of the whole batch are added up
    if stacks and reducers[0] is model.optimizer and has_built_in_step(model):
        reducers[0].accumulation.stack()
    local_sgd.prepare(model, reducers)
    reducers[0].pipeline.transport.stack()
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
    # Those that were made before do not know of all this.
    model.train_function = model.test_function = model.predict_function = None


def _make_train_function(model: Any, real: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    _renew(model, "train_step")
    with _options_of_compiler(model):
        real(*args, **kwargs)


def _make_test_function(model: Any, real: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    _renew(model, "test_step")
    with _options_of_compiler(model):
        real(*args, **kwargs)


def _options_of_compiler(model: Any) -> contextlib.AbstractContextManager[None]:
    num_parts = num_parts_of(model, model._keras_shardopt_reducers_of)
    return contextlib.nullcontext() if num_parts is None else compiled_alike(model, num_parts)


def _renew(model: Any, name: str) -> None:
    """JAX takes what it has traced for an equal function: each `compile` must have another one."""
    step = vars(model).get(name)
    if isinstance(step, functools.partial):
        object.__setattr__(model, name, functools.partial(step.func, *step.args))


# In the order in which Keras takes them.
_TAKEN = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")


def _get_jax_state(model: Any, real: Callable[..., Any], purge_model_variables: bool = False, **which: bool) -> Any:
    """Lets the first step of an epoch fail without loss: variables have no values while Keras holds them."""
    if which.get("optimizer_variables"):
        local_sgd.resume(model)
    taken = real(purge_model_variables=purge_model_variables, **which)
    if purge_model_variables:
        model._jax_state = dict(zip([name for name in _TAKEN if which.get(name)], taken))
    return taken


def _put_back(model: Any) -> None:
    """Gives variables the values that a call has taken out of them, unless the step that failed has used them up."""
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
    """On one process or on all: Keras makes an optimizer to see what it has, of which JAX would ask all."""
    _let_assign_alone(model)
    if jax.process_count() == 1:
        real(*args, **kwargs)
    else:
        placement.outside_strategy(lambda: real(*args, **kwargs))


def _let_assign_alone(model: Any) -> None:
    if jax.process_count() > 1:
        let_assign_alone([*model.variables, *state_of(model)])


def _reset_metrics(model: Any, real: Callable[[], None]) -> None:
    """What begins an epoch: where one process only comes here, JAX would fail with words that say nothing."""
    if SPLITS_OWN_PART in vars(model) and is_together():
        tell("starts an epoch of a prepared model")
    real()


def _predict(model: Any, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """On several processes each has all rows in the end, if all have the same data; else Keras' own is refused."""
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
    """A call that leaves values in variables: if it fails, what an earlier call has left must not be put back."""
    try:
        yield
    except BaseException:
        model._jax_state = None
        raise


def _predict_on_batch(model: Any, real: Callable[[Any], Any], x: Any) -> Any:
    is_built = all(layer.built for layer in layers_of(model))  # else Keras builds it from these rows
    with _forgetting_failure(model), naming_lost_processes():
        return real(on_devices(x) if is_built else x)


def _test_step(model: Any, real: Callable[..., Any], state: Any, data: Any) -> Any:
    """By parts where training is, so that its logs have the same bits."""
    data, distribution = rows_that_count(data), keras.distribution.distribution()
    num_parts = num_parts_of(model, model._keras_shardopt_reducers_of)
    if num_parts is None or type(model).test_step is not keras.Model.test_step:
        return real(state, data)
    data = x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    share_losses(model)
    loss, outputs, others, metrics = evaluated_in_parts(model, distribution, state, data, num_parts)
    y, sample_weight, outputs = on_every_device((y, sample_weight, outputs), distribution)
    logs, metrics = model._update_metrics_variables(metrics, loss, x, y, with_masks(*outputs), sample_weight)
    return logs, (state[0], others, metrics)


def _predict_step(model: Any, real: Callable[..., Any], state: Any, data: Any) -> Any:
    del model
    outputs, others = real(state, rows_that_count(data))
    if is_together() or is_filled_up(data):
        everywhere = NamedSharding(keras.distribution.distribution().device_mesh.backend_mesh, PartitionSpec())
        outputs = jax.lax.with_sharding_constraint(outputs, everywhere)
    return outputs, others


def _maybe_symbolic_build(model: Any, real: Callable[..., None], iterator: Any = None, data_batch: Any = None) -> None:
    """Builds from a batch of all processes, as this one may have none."""
    if isinstance(iterator, EpochIterator) and takes_uneven(keras.distribution.distribution()):
        if not any(model._get_unbuilt_components()):
            return
        data_batch = next(iterator.parts() if iterator._is_whole else iterator.batches(), None)
    _symbolic_build(model, real, iterator, data_batch)


def _symbolic_build(model: Any, real: Callable[..., None], iterator: Any = None, data_batch: Any = None) -> None:
    """Builds from the shapes of the rows that count."""
    del model
    data_batch = jax.eval_shape(rows_that_count, data_batch) if is_filled_up(data_batch) else data_batch
    real(iterator=iterator, data_batch=data_batch)


# -- gradients of each replica -------------------------------------------------------------------------------------


def _train_step(model: Any, real: Callable[..., Any], state: Any, data: Any) -> Any:
    """The trainer's step, unless the optimizer needs each replica's own gradients."""
    data = rows_that_count(data)
    reducers = reducers_in(model, model._keras_shardopt_reducers_of)
    distribution = keras.distribution.distribution()
    refuse_groups(reducers)  # perhaps of another `compile`
    num_parts = num_parts_of(model, model._keras_shardopt_reducers_of)
    stacks = any(reducer.accumulation is not None and reducer.accumulation.is_stacked for reducer in reducers)
    needs_local = num_parts is not None or any(reducer.state_finder.needs_local_gradients for reducer in reducers)
    if num_parts is None and (batch_size_of(distribution) == 1 or not (stacks or needs_local)):
        return real(state, data)
    if any(reducer.local_updates is not None for reducer in reducers):
        return local_sgd.train_step(model, state, data)
    if not has_built_in_step(model):
        raise ValueError(
            "A custom `train_step` cannot be taken apart to show the optimizer each replica's gradients. "
            f"Received: {type(model).__name__}.train_step with {reducers[0]!r}. Use the built-in `train_step`, or call "
            "`optimizer.stateless_apply` inside a `jax.shard_map`."
        )
    if reducers[0].accumulation is not None and not stacks and num_parts is None:
        raise ValueError(
            "`gradient_accumulation_steps` together with `replica_clipnorm` or `replica_transform` needs a "
            "`CrossShard` that is outermost and there when `prepare` is called. "
            f"Received: optimizer={model.optimizer!r}. "
            "Leave out what is around it, or call `prepare(model)` after `compile`."
        )
    weights, others, optimizer_state, metrics = state
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    share_losses(model)
    data = (x, y, sample_weight)
    arguments = (model, reducers[0], distribution, state, data)
    if num_parts is None:
        grads, loss, outputs, new_others = _per_replica(*arguments, stacks)
        # Here all rows are one batch again, so every metric is exact, whether or not it is a sum over rows.
        metrics = metrics_of_losses(model, (weights, others, metrics), outputs, data)
        y_pred, _ = outputs
    else:
        grads, loss, y_pred, new_others, metrics = in_parts(*arguments, num_parts)
        y, sample_weight, y_pred = on_every_device((y, sample_weight, y_pred), distribution)
    if stacks:
        all_rows = num_rows(data)
        size = batch_size_of(distribution)
        rows = rows_of(jax.numpy.arange(size), all_rows, size)
        with batch_shared(BatchShare(rows, all_rows, GlobalView(size, "under a `keras.distribution`"))):
            new_weights, optimizer_state = model.optimizer.stateless_apply(optimizer_state, grads, weights)
    else:
        grads, found_inf, notes, *own = grads
        reduced = Step(
            grads,
            model.trainable_variables,
            is_reduced=num_parts is not None,
            found_inf=found_inf,
            notes=notes,
            own=own[0] if own else None,
        )
        with claim_reduction(reducers), reducers[0].pipeline.resuming(reduced):
            new_weights, optimizer_state = model.optimizer.stateless_apply(optimizer_state, grads, weights)
    logs, metrics = model._update_metrics_variables(metrics, loss, x, y, y_pred, sample_weight)
    return logs, (new_weights, new_others, optimizer_state, metrics)


def _per_replica(model: Any, reducer: Any, distribution: Any, state: Any, data: Any, stacks: bool) -> tuple[Any, ...]:
    """Forward and backward pass of each replica on its rows.

    Returns:
        The reduced gradients, divided as state is (if `stacks`, those of all replicas along a first dimension), the
        loss of the whole batch, the predictions of all rows and their masks, and the variables that are not trained:
        moving statistics are the mean of the replicas', as each normalises with its own rows.
    """
    axis = distribution.batch_dim_name
    num_replicas = batch_size_of(distribution)
    all_rows = num_rows(data)
    num_missing = -all_rows % num_replicas
    variables = model.trainable_variables
    is_seed = [v.name == "seed_generator_state" for v in model.non_trainable_variables]

    axes = reducer.pipeline.reducer.dividing_axes(variables)

    weights, others, optimizer_state, metrics = state
    carried = reducer.pipeline.carried_in(model.optimizer.variables, optimizer_state)
    optimizer_state = without_own(reducer, model.optimizer.variables, optimizer_state)

    def local(weights: Any, others: Any, optimizer_state: Any, metrics: Any, carried: Any, data: Any) -> Any:
        optimizer_state = with_zeros(model.optimizer.variables, optimizer_state)
        replicas = MappedAxis(axis)
        mine = rows_of(replicas.replica_id, all_rows, num_replicas)
        other = seed_offset(replicas.replica_id)
        inputs = [v + other if seed else v for v, seed in zip(others, is_seed)]
        step = functools.partial(gradients_of_rows, model, weights, inputs, metrics, optimizer_state)
        with states_of_replica(model, replicas.replica_id, num_replicas, all_rows):
            grads, loss, outputs, changed = on_own_rows(model, replicas, all_rows, step, data)
        optimizer_scope = keras.StatelessScope(state_mapping=list(zip(model.optimizer.variables, optimizer_state)))
        with batch_shared(BatchShare(mine, all_rows, replicas, ends_early=bool(num_missing))), optimizer_scope:
            mine_of_step = Step(grads, variables, row_share=row_share())
            if stacks:
                grads = [grad[None] for grad in reducer.accumulation.own(mine_of_step).grads]
            else:
                # Not the reducer's own scale: what scales the loss may also be around it.
                scale, own = model.optimizer.scale_loss(1.0), [value[0] for value in carried]
                mine_of_step = mine_of_step.replace(loss_scale=scale, own=own, axes=axes)
                with assigning_nothing(OWN_GRADIENTS):
                    reduced = reducer.pipeline.reduce(mine_of_step)
                left = [value[None] for value in reduced.own or ()]
                grads = (reduced.grads, reduced.found_inf, dict(reduced.notes), left)

        def joined(before: Tensor, after: Tensor | None, seed: bool) -> Tensor:
            if after is None:
                return before
            if seed:
                return after - other
            if not jax.numpy.issubdtype(after.dtype, jax.numpy.floating):
                return after
            # The mean of changes, so that what no replica changes keeps every bit; none where there were no rows.
            change = jax.numpy.where(mine > 0, after - before, 0) * (mine / all_rows)
            return before + jax.lax.psum(change, axis).astype(before.dtype)

        changed = [joined(*each) for each in zip(others, changed, is_seed)]
        return grads, jax.lax.pmean(loss, axis), outputs, changed

    whole, divided = PartitionSpec(), PartitionSpec(axis)
    run = jax.shard_map(
        local,
        mesh=distribution.device_mesh.backend_mesh,
        in_specs=(whole, whole, whole, whole, divided, divided),
        out_specs=(divided if stacks else (divided_along(axes, axis), whole, whole, divided), whole, divided, whole),
        check_vma=False,
    )
    grads, loss, outputs, changed = run(weights, others, optimizer_state, metrics, carried, padded(data, num_missing))
    return grads, loss, jax.tree.map(lambda leaf: leaf[:all_rows], outputs), changed
