"""The training step on JAX of a model passed to `prepare`, with per-replica gradients if the optimizer needs them.

Private names of Keras touched here (a test checks that each exists):
    `Model._update_metrics_variables` - the second half of the trainer's step.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import keras
from jax.sharding import PartitionSpec

from keras_shardopt.backends.communicator import GlobalView
from keras_shardopt.backends.gradient_scope import claim_reduction
from keras_shardopt.backends.jax.communicator import MappedAxis, divided_along, num_batch_shards, seed_offset
from keras_shardopt.backends.jax.runtime import OWN_GRADIENTS
from keras_shardopt.backends.models import has_built_in_step
from keras_shardopt.backends.scopes import assigning_nothing
from keras_shardopt.fit.calls import num_rows
from keras_shardopt.fit.jax.batches import padded
from keras_shardopt.fit.jax.halves import gradients_of_rows, metrics_of_losses, with_zeros, without_replica_state
from keras_shardopt.fit.jax.uneven import on_replica_rows, rows_of
from keras_shardopt.fit.model_step import ModelStep
from keras_shardopt.fit.stateful import states_of_replica
from keras_shardopt.numerics import Tensor
from keras_shardopt.update.losses import share_losses
from keras_shardopt.update.step import Step
from keras_shardopt.update.trainer_context import BatchShare, batch_shared, row_share


class Computed(NamedTuple):
    """The results of a step's first half: forward pass, backward pass, and reduction of gradients over replicas."""

    grads: Any
    """With `stacks`, the stacked gradients of all replicas. Otherwise their sums or means, `Step.found_inf`,
    `Step.notes`, and perhaps `Step.own`."""

    loss: Any
    y_pred: Any
    others: Any
    """The values of the non-trainable variables."""

    metrics: Any
    data: tuple[Any, Any, Any]


class TrainStep(ModelStep):
    """Runs Keras's step. If the optimizer needs per-replica gradients, computes these in a `shard_map` first."""

    stacks_windows = True
    """Whether gradient accumulation can keep one sum per replica, stacked along a first dimension of an array."""

    is_reduced = False
    """Whether `computed` reduces gradients even with accumulation, so accumulation sums reduced gradients."""

    def before_step(self) -> None:
        """Called in training, before Keras takes values out of variables. Does nothing unless overridden."""

    def compiler_options(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which Keras compiles the steps. An extension can set options of the compiler in it."""
        return contextlib.nullcontext()

    def test(self, real: Callable[..., Any], state: Any, data: Any) -> Any:
        """Run a step of `evaluate`: by default `real`, the step of Keras."""
        return real(state, data)

    def is_needed(self, distribution: Any, stacks: bool) -> bool:
        """Whether to compute each replica's own gradients. `stacks`: whether accumulation keeps them per replica."""
        needs_local = any(each.state_finder.needs_local_gradients for each in self.cross_shards)
        return num_batch_shards(distribution) > 1 and (stacks or needs_local)

    def train(self, real: Callable[..., Any], state: Any, data: Any) -> Any:
        """Run a step of `fit` (`real` is Keras's step). Return the logs and the new training state."""
        model, cross_shards = self.model, self.cross_shards
        distribution = keras.distribution.distribution()
        stacks = any(each.accumulation is not None and each.accumulation.stacked_along for each in cross_shards)
        if not self.is_needed(distribution, stacks):
            return real(state, data)
        if not has_built_in_step(model):
            raise ValueError(
                "This optimizer needs the gradients of each replica, but JAX cannot divide a custom `train_step` among "
                f"replicas. Received: {type(model).__name__}.train_step with {cross_shards[0]!r}. Use the built-in "
                "`train_step`, or call `optimizer.stateless_apply` inside a `jax.shard_map`."
            )
        if cross_shards[0].accumulation is not None and not stacks and not self.is_reduced:
            raise ValueError(
                "`gradient_accumulation_steps` together with `replica_clipnorm` or `replica_transform` needs a "
                "`CrossShard` as the outermost optimizer when `prepare` is called. "
                f"Received: optimizer={model.optimizer!r}. "
                "Leave out the wrappers around `CrossShard`, or call `prepare(model)` after `compile`."
            )
        weights, _, optimizer_state, _ = state
        share_losses(model)
        data = keras.utils.unpack_x_y_sample_weight(data)
        grads, loss, y_pred, others, metrics, (x, y, sample_weight) = self.computed(distribution, state, data, stacks)
        if stacks:
            size, all_rows = num_batch_shards(distribution), num_rows(data)
            rows = rows_of(jax.numpy.arange(size), all_rows, size)
            with batch_shared(BatchShare(rows, all_rows, GlobalView(size, "under a `keras.distribution`"))):
                weights, optimizer_state = model.optimizer.stateless_apply(optimizer_state, grads, weights)
        else:
            grads, found_inf, notes, *own = grads
            reduced = Step(grads, model.trainable_variables, is_reduced=self.is_reduced, found_inf=found_inf)
            reduced = reduced.replace(notes=notes, own=own[0] if own else None)
            with claim_reduction(cross_shards), cross_shards[0].pipeline.resuming(reduced):
                weights, optimizer_state = model.optimizer.stateless_apply(optimizer_state, grads, weights)
        logs, metrics = model._update_metrics_variables(metrics, loss, x, y, y_pred, sample_weight)
        return logs, (weights, others, optimizer_state, metrics)

    def computed(self, distribution: Any, state: Any, data: Any, stacks: bool) -> Computed:
        """Run the forward and backward pass, reduce gradients (unless `stacks`), and update the metrics of losses."""
        grads, loss, outputs, others = _per_replica(self.model, self.cross_shards[0], distribution, state, data, stacks)
        metrics = metrics_of_losses(self.model, (state[0], others, state[3]), outputs, data)
        return Computed(grads, loss, outputs[0], others, metrics, data)


def _per_replica(
    model: Any, cross_shard: Any, distribution: Any, state: Any, data: Any, stacks: bool
) -> tuple[Any, ...]:
    """Run the forward and backward pass of each replica on its rows.

    Returns:
        A tuple: `Computed.grads`; the loss of the whole batch; the predictions of all rows and their masks; and
        non-trainable variables. Moving statistics are means over replicas, because each replica normalizes with its own
        rows.
    """
    axis, num_replicas = distribution.batch_dim_name, num_batch_shards(distribution)
    variables, all_rows = model.trainable_variables, num_rows(data)
    is_seed = [v.name == "seed_generator_state" for v in model.non_trainable_variables]
    axes = cross_shard.pipeline.reducer.dividing_axes(variables)
    weights, others, optimizer_state, metrics = state
    value_of = dict(zip(map(id, model.optimizer.variables), optimizer_state))
    carried = [value_of[id(variable)] for variable in cross_shard.pipeline.carried]
    optimizer_state = without_replica_state(cross_shard, model.optimizer.variables, optimizer_state)

    def local(weights: Any, others: Any, optimizer_state: Any, metrics: Any, carried: Any, data: Any) -> Any:
        optimizer_state = with_zeros(model.optimizer.variables, optimizer_state)
        replicas = MappedAxis(axis)
        mine = rows_of(replicas.replica_id, all_rows, num_replicas)
        other = seed_offset(replicas.replica_id)
        inputs = [v + other if seed else v for v, seed in zip(others, is_seed)]
        step = functools.partial(gradients_of_rows, model, weights, inputs, metrics, optimizer_state)
        with states_of_replica(model, replicas.replica_id, num_replicas, all_rows):
            grads, loss, outputs, changed = on_replica_rows(model, replicas, all_rows, step, data)
        optimizer_scope = keras.StatelessScope(state_mapping=list(zip(model.optimizer.variables, optimizer_state)))
        share = BatchShare(mine, all_rows, replicas, ends_early=all_rows % num_replicas > 0)
        with batch_shared(share), optimizer_scope:
            own_step = Step(grads, variables, row_share=row_share())
            grads = _stacked(cross_shard, own_step) if stacks else _reduced(model, cross_shard, own_step, carried, axes)
        changed = [
            before if after is None else after - other if seed else _mean_change(before, after, mine, all_rows, axis)
            for before, after, seed in zip(others, changed, is_seed)
        ]
        return grads, jax.lax.pmean(loss, axis), outputs, changed

    whole, divided = PartitionSpec(), PartitionSpec(axis)
    run = jax.shard_map(
        local,
        mesh=distribution.device_mesh.backend_mesh,
        axis_names={axis},  # XLA divides the computation along the other axes, as the model's layout requires
        in_specs=(whole, whole, whole, whole, divided, divided),
        out_specs=(divided if stacks else (divided_along(axes, axis), whole, whole, divided), whole, divided, whole),
        check_vma=False,
    )
    data = padded(data, -all_rows % num_replicas)
    grads, loss, outputs, changed = run(weights, others, optimizer_state, metrics, carried, data)
    return grads, loss, jax.tree.map(lambda leaf: leaf[:all_rows], outputs), changed


def _stacked(cross_shard: Any, step: Step) -> Any:
    """Return this replica's gradients with a first dimension of 1, along which `shard_map` stacks all replicas."""
    return [grad[None] for grad in cross_shard.accumulation.own(step).grads]


def _reduced(model: Any, cross_shard: Any, step: Step, carried: Any, axes: Any) -> Any:
    """Reduce the gradients in `step` over replicas. Return the fields of the resulting `Step` that have changed.

    `carried` has the values that this replica keeps between steps, such as rounding errors of compression. `axes` has
    the dimension along which each gradient is divided among replicas, or None.
    """
    # Take the scale of the outermost optimizer, because a wrapper around the `CrossShard` can scale the loss too.
    scale, own = model.optimizer.scale_loss(1.0), [value[0] for value in carried]
    step = step.replace(loss_scale=scale, own=own, axes=axes)
    with assigning_nothing(OWN_GRADIENTS):
        reduced = cross_shard.pipeline.reduce(step)
    return reduced.grads, reduced.found_inf, dict(reduced.notes), [value[None] for value in reduced.own or ()]


def _mean_change(before: Tensor, after: Tensor, mine: Tensor, all_rows: int, axis: str) -> Tensor:
    """Return a variable's value, changed by the mean of the replicas' changes. A replica's weight is its row count.

    `mine` is the row count of this replica, and `all_rows` the row count of the batch.
    """
    if not jax.numpy.issubdtype(after.dtype, jax.numpy.floating):
        return after
    # Average the changes, not the values, so an unchanged value keeps all its bits. A replica without rows adds 0.
    change = jax.numpy.where(mine > 0, after - before, 0) * (mine / all_rows)
    return before + jax.lax.psum(change, axis).astype(before.dtype)
