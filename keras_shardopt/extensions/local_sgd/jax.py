"""Local SGD steps on JAX: in a `shard_map`, each replica updates its own weights and optimizer state.

The optimizer stores these in additional variables (`Rows`): one row, an index of the first dimension, per replica.

Private names of Keras touched here (a test checks that each exists):
    `Model.compute_loss_and_updates`, `_update_metrics_variables` - the two halves of the trainer's step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import keras
from jax.sharding import PartitionSpec

from keras_shardopt.backends.jax.communicator import MappedAxis, num_batch_shards, seed_offset
from keras_shardopt.backends.models import has_built_in_step, mix_in
from keras_shardopt.backends.traffic import recording
from keras_shardopt.extensions.local_sgd.mixins import ShowsMean, resume_local
from keras_shardopt.extensions.local_sgd.replica_values import Rows
from keras_shardopt.extensions.local_sgd.stage import LocalUpdates
from keras_shardopt.extensions.local_sgd.sync import finite_means
from keras_shardopt.fit.calls import num_rows
from keras_shardopt.fit.jax.batches import padded
from keras_shardopt.fit.jax.halves import gradients_of_rows, metrics_of_losses
from keras_shardopt.fit.jax.step import TrainStep
from keras_shardopt.fit.jax.uneven import on_replica_rows, rows_of
from keras_shardopt.fit.stateful import states_of_replica
from keras_shardopt.update.context import CrossShardProtocol
from keras_shardopt.update.losses import share_losses
from keras_shardopt.update.trainer_context import BatchShare, batch_shared


def _check(model: Any, cross_shard: Any) -> None:
    rule = "With `LocalSGD` on JAX, `fit` runs the built-in training step separately on each device of one process."
    if jax.process_count() > 1:
        raise ValueError(
            f"{rule} Received: {jax.process_count()} processes. Use the devices of one process, or PyTorch, or "
            "remove `LocalSGD`."
        )
    if model.optimizer is not cross_shard or not has_built_in_step(model):
        raise ValueError(
            f"{rule} Received: {model.optimizer!r}, for {type(model).__name__}. Use the built-in `train_step`, and "
            "`CrossShard(..., extensions=[LocalSGD(...)])` outermost."
        )


class _StacksRows(keras.Model):
    """Mixin of models: before training, creates optimizer variables with one row (first index) per replica."""

    def make_train_function(self, *args: Any, **kwargs: Any) -> None:
        """Create variables with one row (first index) per replica, if needed. Then create the training function."""
        has_replicas = num_batch_shards(keras.distribution.distribution()) > 1
        for local in LocalUpdates.found_in([self.optimizer]):  # none if `compile` replaced the optimizer
            if self.optimizer.built and has_replicas and not local.replica_values.stacked:
                local.stack()
                self.train_function = None  # the old function does not use the new variables
        super().make_train_function(*args, **kwargs)


class _LocalStep:
    """A step in which each replica updates its own weights and optimizer state, with its share of the batch.

    Inside the `shard_map`, each variable has this replica's value. Outside, the model keeps the last average over
    replicas until `LocalUpdates.before_reading` assigns a new one.
    """

    def __init__(self, model: Any, all_rows: int) -> None:
        distribution = keras.distribution.distribution()
        self._model, self._all_rows = model, all_rows
        self._axis, self._mesh = distribution.batch_dim_name, distribution.device_mesh.backend_mesh
        self._size = num_batch_shards(distribution)
        self._num_missing = -all_rows % self._size
        (self._local,) = LocalUpdates.found_in([model.optimizer])
        variables = model.optimizer.variables
        self._place = {id(v): i for i, v in enumerate(variables)}
        rows = cast(Rows, self._local.replica_values)
        self._of = [id(v) for v in rows.of]
        self._stacked_at = [self._place[id(v)] for v in rows.stacked]
        alone = {*self._of, *map(id, rows.stacked)}
        self._shared_at = [i for i, v in enumerate(variables) if id(v) not in alone]
        self._is_seed = [v.name == "seed_generator_state" for v in model.non_trainable_variables]

    def run(self, state: Any, data: Any) -> Any:
        """Return the logs and the new values of all variables, in the order of Keras' training step."""
        model = self._model
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        weights, others, optimizer_state, metrics = state
        whole, divided = PartitionSpec(), PartitionSpec(self._axis)
        run = jax.shard_map(
            self._on_one,
            mesh=self._mesh,
            in_specs=(divided, whole, whole, whole, divided),
            out_specs=(divided, whole, whole, whole, divided),
            check_vma=False,
        )
        rows, shared, changed, loss, outputs = run(
            [optimizer_state[i] for i in self._stacked_at],
            [optimizer_state[i] for i in self._shared_at],
            others,
            metrics,
            padded((x, y, sample_weight), self._num_missing),
        )
        optimizer_state = list(optimizer_state)
        for i, value in [*zip(self._stacked_at, rows), *zip(self._shared_at, shared)]:
            optimizer_state[i] = value
        kept = set(self._of)
        others = [old if id(v) in kept else new for v, old, new in zip(model.non_trainable_variables, others, changed)]
        weights = [
            optimizer_state[self._place[id(reference)]].astype(v.dtype)
            for v, reference in zip(model.trainable_variables, self._local.sync.references)
        ]
        outputs = jax.tree.map(lambda leaf: leaf[: self._all_rows], outputs)
        # Metrics get the rows of all replicas as one batch, so metrics that are not sums over rows are exact too.
        metrics = metrics_of_losses(model, (weights, others, metrics), outputs, (x, y, sample_weight))
        y_pred, _ = outputs
        logs, metrics = model._update_metrics_variables(metrics, loss, x, y, y_pred, sample_weight)
        return logs, (weights, others, optimizer_state, metrics)

    def _on_one(self, rows: Any, shared: Any, others: Any, metrics: Any, data: Any) -> Any:
        model, optimizer = self._model, self._model.optimizer
        own = {key: row[0] for key, row in zip(self._of, rows)}
        values = dict(zip(self._shared_at, shared))
        replicas = MappedAxis(self._axis)
        other = seed_offset(replicas.replica_id)
        mine = rows_of(replicas.replica_id, self._all_rows, self._size)
        before = [own[id(v)] for v in model.trainable_variables]
        inputs = [
            own.get(id(v), value) + other if seed else own.get(id(v), value)
            for v, value, seed in zip(model.non_trainable_variables, others, self._is_seed)
        ]
        inside = [
            own[id(v)] if id(v) in own else values.get(i, jax.numpy.zeros(v.shape, v.dtype))
            for i, v in enumerate(optimizer.variables)
        ]
        step = functools.partial(gradients_of_rows, model, before, inputs, metrics, inside)
        with states_of_replica(model, replicas.replica_id, self._size, self._all_rows):
            grads, loss, outputs, changed = on_replica_rows(model, replicas, self._all_rows, step, data)
        with batch_shared(BatchShare(mine, self._all_rows, replicas, ends_early=bool(self._num_missing))):
            after, updated = optimizer.stateless_apply(inside, grads, before)
        changed = [old if new is None else new for old, new in zip(inputs, changed)]
        changed = [
            new if id(v) not in own or seed else jax.numpy.where(mine > 0, new, old)  # without rows, keep `old`
            for v, old, new, seed in zip(model.non_trainable_variables, inputs, changed, self._is_seed)
        ]
        ended = after, changed, updated, metrics
        if optimizer._rollback is not None:  # after a skipped update, take back all but counters
            _, ended = optimizer._rollback.settled(model, (before, inputs, inside, metrics), (None, ended))
        _, changed, updated, _ = ended
        found = [new - other if seed else new for new, seed in zip(changed, self._is_seed)]
        own.update(zip(map(id, model.trainable_variables), after))
        own.update({id(v): updated[i] for i, v in enumerate(optimizer.variables) if id(v) in own})
        own.update({id(v): new for v, new in zip(model.non_trainable_variables, found) if id(v) in own})
        moving = list(map(id, self._local.variables.statistics))
        statistics = self._synced_statistics(replicas, mine, [own[key] for key in moving], inside, updated)
        own.update(zip(moving, statistics))
        loss = jax.lax.pmean(loss, self._axis)
        return [own[key][None] for key in self._of], [updated[i] for i in self._shared_at], found, loss, outputs

    def _synced_statistics(self, replicas: Any, mine: Any, statistics: Any, inside: Any, updated: Any) -> Any:
        """Return moving statistics: means over replicas if this step averaged weights, otherwise this replica's own."""
        schedule, optimizer = self._local.schedule, self._model.optimizer

        def before(variable: Any) -> Any:
            return inside[self._place[id(variable)]]

        def after(variable: Any) -> Any:
            return updated[self._place[id(variable)]]

        share = mine if optimizer.accumulation is None else _share_of_window(optimizer, updated)
        if self._local.variables.may_skip:
            share = jax.numpy.where(after(optimizer.iterations) != before(optimizer.iterations), share, 0)
        count = after(schedule.count)
        is_sync = (after(schedule.last_syncs)[0] == count) & (count != before(schedule.count))

        def synced(values: Any) -> Any:
            with recording() as self._local.sync.sent["statistics"]:
                means = finite_means(replicas, values, share)
            return [jax.numpy.where(share > 0, mean, value) for mean, value in zip(means, values)]

        return jax.lax.cond(is_sync, synced, lambda values: values, statistics)


def _share_of_window(optimizer: CrossShardProtocol, values: Any) -> Any:
    with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, values))):
        return optimizer.accumulation.sums.share


class LocalStep(TrainStep):
    """A step in which each replica continues from its own weights."""

    stacks_windows = False

    def prepare(self) -> None:
        """Raise ValueError for several processes, a custom step, or an optimizer around `CrossShard`."""
        _check(self.model, next(each for each in self.cross_shards if LocalUpdates.found_in([each])))
        mix_in(self.model, ShowsMean)
        mix_in(self.model, _StacksRows)

    def before_step(self) -> None:
        """Restore each replica's own weights, if evaluation or saving has replaced them by the mean."""
        if any(local.replica_values.stacked for local in LocalUpdates.found_in([self.model.optimizer])):
            resume_local([self.model.optimizer])

    def train(self, real: Callable[..., Any], state: Any, data: Any) -> Any:
        """Run a training step in which each replica updates its own weights. With one replica, run Keras's (`real`)."""
        alone = num_batch_shards(keras.distribution.distribution()) == 1
        if alone:
            return real(state, data)
        share_losses(self.model)
        return _LocalStep(self.model, num_rows(data)).run(state, data)
