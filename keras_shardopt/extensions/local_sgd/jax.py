"""Local SGD steps on JAX: one program in which each replica updates its rows of the state, in a `shard_map`.

Private names of Keras touched here (a test holds each of them):
    `Model.compute_loss_and_updates`, `_update_metrics_variables` - the two halves of the trainer's step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import keras
from jax.sharding import PartitionSpec

from keras_shardopt.backends.jax.communicator import MappedAxis, batch_size_of, seed_offset
from keras_shardopt.backends.models import has_built_in_step, mix_in
from keras_shardopt.extensions.local_sgd.apart import Rows
from keras_shardopt.extensions.local_sgd.looks import ShowsMean, local_updates_in, resume_apart
from keras_shardopt.fit.calls import num_rows
from keras_shardopt.fit.jax.batches import padded
from keras_shardopt.fit.jax.halves import gradients_of_rows, metrics_of_losses
from keras_shardopt.fit.jax.step import TrainStep
from keras_shardopt.fit.jax.uneven import on_own_rows, rows_of
from keras_shardopt.fit.stateful import states_of_replica
from keras_shardopt.update.losses import share_losses
from keras_shardopt.update.reducing import ReducingOptimizer
from keras_shardopt.update.trainer_context import BatchShare, batch_shared


def _check(model: Any, reducer: Any) -> None:
    rule = "With `LocalSGD` JAX's `fit` runs each replica's whole step by itself."
    if jax.process_count() > 1:
        raise ValueError(
            f"{rule} Received: {jax.process_count()} processes. Use the devices of one process, or PyTorch, or "
            "leave `LocalSGD` out."
        )
    if model.optimizer is not reducer or not has_built_in_step(model):
        raise ValueError(
            f"{rule} Received: {model.optimizer!r}, for {type(model).__name__}. Use the built-in `train_step`, and "
            "`CrossShard(..., extensions=[LocalSGD(...)])` outermost."
        )


class _StacksRows(keras.Model):
    """A model whose training steps take the rows of all replicas."""

    def make_train_function(self, *args: Any, **kwargs: Any) -> None:
        """Make the function after the state has a row for each replica."""
        has_replicas = batch_size_of(keras.distribution.distribution()) > 1
        for local in local_updates_in([self.optimizer]):  # none after another `compile`
            if self.optimizer.built and has_replicas and not local.stacked:
                local.stack()
                self.train_function = None  # it was compiled without rows
        super().make_train_function(*args, **kwargs)


def train_step(model: Any, state: Any, data: Any) -> Any:
    """Run a step of all replicas, each with its rows of the batch, weights and state.

    Args:
        model: the model.
        state: the state of Keras' own step.
        data: the batch.
    """
    optimizer, distribution = model.optimizer, keras.distribution.distribution()
    (local,), axis = local_updates_in([optimizer]), distribution.batch_dim_name
    size, all_rows = batch_size_of(distribution), num_rows(data)
    num_missing = -all_rows % size
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    share_losses(model)
    weights, others, optimizer_state, metrics = state
    place = {id(v): i for i, v in enumerate(optimizer.variables)}
    of, stacked_at = [id(v) for v in cast(Rows, local.seen).of], [place[id(v)] for v in local.stacked]
    # Inside the `shard_map`, a variable with rows has its row's value. The variable itself stays unchanged until read.
    shared_at = [i for i, v in enumerate(optimizer.variables) if id(v) not in of and i not in set(stacked_at)]
    is_seed = [v.name == "seed_generator_state" for v in model.non_trainable_variables]

    def on_one(rows: Any, shared: Any, others: Any, metrics: Any, data: Any) -> Any:
        own = {key: row[0] for key, row in zip(of, rows)}
        values = dict(zip(shared_at, shared))
        replicas = MappedAxis(axis)
        other = seed_offset(replicas.replica_id)
        mine = rows_of(replicas.replica_id, all_rows, size)
        before = [own[id(v)] for v in model.trainable_variables]
        inputs = [
            own.get(id(v), value) + other if seed else own.get(id(v), value)
            for v, value, seed in zip(model.non_trainable_variables, others, is_seed)
        ]
        inside = [
            own[id(v)] if id(v) in own else values.get(i, jax.numpy.zeros(v.shape, v.dtype))
            for i, v in enumerate(optimizer.variables)
        ]
        step = functools.partial(gradients_of_rows, model, before, inputs, metrics, inside)
        with states_of_replica(model, replicas.replica_id, size, all_rows):
            grads, loss, outputs, changed = on_own_rows(model, replicas, all_rows, step, data)
        with batch_shared(BatchShare(mine, all_rows, replicas, ends_early=bool(num_missing))):
            after, updated = optimizer.stateless_apply(inside, grads, before)
        changed = [old if new is None else new for old, new in zip(inputs, changed)]
        changed = [
            new if id(v) not in own or seed else jax.numpy.where(mine > 0, new, old)  # unchanged without rows
            for v, old, new, seed in zip(model.non_trainable_variables, inputs, changed, is_seed)
        ]
        changed, updated = local.settled(model, (before, inputs, inside, metrics), (after, changed, updated, metrics))
        own.update(zip(map(id, model.trainable_variables), after))
        own.update({id(v): updated[i] for i, v in enumerate(optimizer.variables) if id(v) in own and id(v) in place})
        found = []
        for v, new, seed in zip(model.non_trainable_variables, changed, is_seed):
            found.append(new - other if seed else new)
            if id(v) in own:
                own[id(v)] = found[-1]
        statistics = [own[id(v)] for v in local.statistics]
        count, rounds = updated[place[id(local.count)]], updated[place[id(local.last_rounds)]]
        share = mine if optimizer.accumulation is None else _share_of_window(optimizer, updated)
        if local.skips:
            iterations = place[id(optimizer.iterations)]
            share = jax.numpy.where(updated[iterations] != inside[iterations], share, 0)
        is_round = (rounds[0] == count) & (count != inside[place[id(local.count)]])  # False inside the next window
        joined = functools.partial(local.join_statistics, replicas, row_share=jax.numpy.asarray(share))
        statistics = jax.lax.cond(is_round, joined, lambda values: values, statistics)
        own.update(zip(map(id, local.statistics), statistics))
        loss = jax.lax.pmean(loss, axis)
        return [own[key][None] for key in of], [updated[i] for i in shared_at], found, loss, outputs

    whole, divided = PartitionSpec(), PartitionSpec(axis)
    run = jax.shard_map(
        on_one,
        mesh=distribution.device_mesh.backend_mesh,
        in_specs=(divided, whole, whole, whole, divided),
        out_specs=(divided, whole, whole, whole, divided),
        check_vma=False,
    )
    rows, shared, changed, loss, outputs = run(
        [optimizer_state[i] for i in stacked_at],
        [optimizer_state[i] for i in shared_at],
        others,
        metrics,
        padded((x, y, sample_weight), num_missing),
    )
    optimizer_state = list(optimizer_state)
    for i, value in [*zip(stacked_at, rows), *zip(shared_at, shared)]:
        optimizer_state[i] = value
    kept = set(of)
    others = [old if id(v) in kept else new for v, old, new in zip(model.non_trainable_variables, others, changed)]
    weights = [
        optimizer_state[place[id(anchor)]].astype(v.dtype)
        for v, anchor in zip(model.trainable_variables, local.anchors)
    ]
    outputs = jax.tree.map(lambda leaf: leaf[:all_rows], outputs)
    # Metrics are computed from all rows as one batch, so each is exact, whether or not it is a sum over rows.
    metrics = metrics_of_losses(model, (weights, others, metrics), outputs, (x, y, sample_weight))
    y_pred, _ = outputs
    logs, metrics = model._update_metrics_variables(metrics, loss, x, y, y_pred, sample_weight)
    return logs, (weights, others, optimizer_state, metrics)


def _share_of_window(optimizer: ReducingOptimizer, values: Any) -> Any:
    with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, values))):
        return optimizer.accumulation.share


class RoundsStep(TrainStep):
    """A local SGD step: each replica continues from its own weights."""

    stacks_windows = False

    def prepare(self) -> None:
        """Raise ValueError if it cannot run: several processes, a custom step, or an optimizer around `CrossShard`."""
        _check(self.model, next(reducer for reducer in self.reducers if local_updates_in([reducer])))
        mix_in(self.model, ShowsMean)
        mix_in(self.model, _StacksRows)

    def before_step(self) -> None:
        """Resume from each replica's own weights."""
        if any(local.stacked for local in local_updates_in([self.model.optimizer])):
            resume_apart([self.model.optimizer])

    def train(self, real: Callable[..., Any], state: Any, data: Any) -> Any:
        """See `TrainStep.train`."""
        alone = batch_size_of(keras.distribution.distribution()) == 1
        return real(state, data) if alone else train_step(self.model, state, data)
