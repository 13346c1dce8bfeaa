"""Local SGD and DiLoCo: each replica updates with its own gradients, and replicas average their weights periodically.

`schedule` decides which weights are averaged when, `sync` averages them. `variables` finds what differs between
replicas, and `replica_values` keeps it while other code reads the mean.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_shardopt.backends.active import processes, runtime
from keras_shardopt.backends.traffic import Collective
from keras_shardopt.extensions.local_sgd.own_gradients import OwnGradients
from keras_shardopt.extensions.local_sgd.replica_values import Copies, Rows
from keras_shardopt.extensions.local_sgd.schedule import SyncSchedule
from keras_shardopt.extensions.local_sgd.sync import WeightSync
from keras_shardopt.extensions.local_sgd.variables import ReplicaVariables, replicas_are_processes
from keras_shardopt.numerics import Variable, overwrites_variable
from keras_shardopt.update.context import CrossShardProtocol, StageContext
from keras_shardopt.update.extension import ExtensionStage
from keras_shardopt.update.options import CrossShardOptions
from keras_shardopt.update.step import Proceed, Step
from keras_shardopt.update.transport import transport_of
from keras_shardopt.wrapping.chain import descendants
from keras_shardopt.wrapping.rollback import stamp


class LocalUpdates(ExtensionStage):
    """Updates each replica's weights with its own gradients, and averages the weights periodically."""

    keeps_state = True

    def __init__(self, settings: Any, options: CrossShardOptions, context: StageContext) -> None:
        self._settings = settings
        self._optimizer = optimizer = context.optimizer
        optimizer.scope_inside.updates_differ = True
        self.is_warmup = False
        """Whether the update that runs (or is traced) is a warm-up update, in which gradients are averaged."""
        self._is_built = False
        self._has_trained = False
        self.variables = ReplicaVariables(optimizer)
        self.schedule = SyncSchedule(settings)
        transport = transport_of(options.compression, context)
        self.sync = WeightSync(optimizer, settings.outer_optimizer, transport, self.schedule, self.variables)
        self.optimizers = [outer.inner for outer in self.sync.outers]
        self.reducer = OwnGradients(context, options, self)
        self.replica_values: Copies | Rows = Copies(optimizer, self.variables, self.sync)
        """Keeps the values of each replica while the model has the mean weights."""
        self.sent_in_warmup: list[Collective] = []
        """The collectives of the last warm-up update."""

    def build(self, variables: Sequence[Variable], add_variable: Callable[..., Variable]) -> None:
        """Create the counters, the reference weights and the state of the outer optimizers.

        Raises:
            ValueError: if `fragments` exceeds the number of variables, or a variable cannot be averaged (float8).
        """
        _check(variables, self.schedule.num_fragments, self._optimizer)
        self.schedule.build(variables, add_variable)
        self.sync.build(variables, add_variable)
        self.variables.build(variables)
        self.saved_variables = [self.schedule.count, self.schedule.last_syncs, *self.sync.saved_variables]
        self.variables.exclude(self.saved_variables)
        self._is_built = True

    # -- an update ---------------------------------------------------------------------------------------------------

    def collect(self, step: Step, proceed: Proceed) -> None:
        """Call `proceed`, the update, as a warm-up or local update. With a traced number of updates, trace both."""
        warmup = self._settings.warmup_steps
        if not warmup or runtime.communicator(self._optimizer.axis_name).num_replicas == 1:
            proceed(step)
            return
        count = self.schedule.counted()
        if isinstance(count, int):
            self.is_warmup = count < warmup
            proceed(step)
            return
        shares = {"weight": step.weight, "row_share": step.row_share}
        traced = {name: share for name, share in shares.items() if not isinstance(share, (int, float))}

        def run(is_warmup: bool, tensors: Sequence[Any]) -> None:
            size = len(step.grads)
            self.is_warmup = is_warmup
            proceed(step.replace(grads=list(tensors[:size]), **dict(zip(traced, tensors[size:]))))

        is_warming_up = ops.less(count, warmup)
        tensors = [*step.grads, *traced.values()]
        for condition, is_warmup in ((is_warming_up, True), (ops.logical_not(is_warming_up), False)):
            runtime.cond(condition, functools.partial(run, is_warmup), tensors, self._optimizer._written())

    def commit(self, step: Step, proceed: Proceed) -> None:
        """Update this replica's weights. Then average each group of weights (fragment) for which an average is due."""
        if runtime.communicator(self._optimizer.axis_name).num_replicas == 1:
            proceed(step)
        else:
            runtime.no_compile(self._commit, step, proceed)

    def _commit(self, step: Step, proceed: Proceed) -> None:
        before = self.schedule.counted()
        references = self.sync.references
        is_first = before == 0 if isinstance(before, int) else ops.equal(before, 0)
        runtime.cond(is_first, lambda _: self.sync.set_references(), [], references, communicates=False)
        # On JAX, the trainer averages statistics.
        statistics = [] if self.replica_values.stacked else self.variables.statistics
        updates = stamp(self._optimizer.iterations) if statistics and self.variables.may_skip else None
        proceed(step)
        count = before + 1
        self.schedule.set_count(count)
        if self.is_warmup:
            self.sync.set_references()
            self.schedule.restart(count)
            return
        self._has_trained = True
        written = [*self._optimizer._written(), *statistics]
        for number in range(self.schedule.num_fragments):
            is_due = self.schedule.is_due(number, count)
            averaged = statistics if number == 0 else []
            # Pass this replica's share of rows to the branch as an operand: it differs between replicas in one program.
            shares = [ops.cast(step.row_share, "float32")] if averaged else []
            if shares and updates is not None:  # a replica that skipped its update has weight 0
                is_made = ops.not_equal(updates, stamp(self._optimizer.iterations))
                shares = [shares[0] * ops.cast(is_made, "float32")]
            runtime.cond(is_due, functools.partial(self.sync.run, number, count, averaged), shares, written)

    def sent(self, each: Sequence[Collective]) -> tuple[list[Collective], int]:
        """Return the collectives and the number of updates from one average of weights to the next (warm-up: 1 update).

        Args:
            each: the collectives that every update sends.
        """
        count = self.schedule.num_updates
        if count <= self._settings.warmup_steps:
            return [*each, *self.sent_in_warmup] if count else [], 1
        length = self.schedule.current_length()
        return [*each] * length + [one for sync in self.sync.sent.values() for one in sync], length

    # -- each replica's values ---------------------------------------------------------------------------------------

    @property
    def replica_state(self) -> list[Variable]:  # type: ignore[override]
        """The optimizer variables whose values differ between replicas."""
        return self.variables.state

    @property
    def _replica_state(self) -> list[Variable]:
        """All variables that can differ between replicas. Empty on PyTorch before the first local update."""
        may_differ = self._has_trained or not replicas_are_processes()
        return [*self.replica_state, *self.replica_values.stacked] if may_differ else []

    @property
    def weights_differ(self) -> bool:  # type: ignore[override]
        """Whether replicas have different weights now. Call it only outside of a training step."""
        return self._is_built and not self.replica_values.is_shown and bool(self.schedule.unsynced())

    def before_reading(self) -> None:
        """Assign the mean over replicas to weights until the next update. All processes must call this together."""
        if self._is_built:
            self.sync.report()
            self.replica_values.show()

    def resume(self, begins_epoch: bool = False) -> None:
        """Restore each replica's weights, or restart from weights that other code has set; see `resume_local`."""
        if self._is_built:
            self.replica_values.resume(begins_epoch)

    def stack(self) -> None:
        """Create the variables with a first dimension of replicas (`Rows`, for JAX). Later calls do nothing."""
        if self._is_built and isinstance(self.replica_values, Copies):
            self.replica_values = Rows(self._optimizer, self.variables, self.sync)
            self.restores_skipped_updates = True

    def save_state(self) -> list[np.ndarray]:
        """Return `count` and `last_syncs`, then each variable that can differ, with all replicas stacked on axis 0.

        All processes must call this together.
        """
        counts = (self.schedule.count, self.schedule.last_syncs)
        return [*map(ops.convert_to_numpy, counts), *self.replica_values.states()]

    def load_state(self, arrays: Sequence[np.ndarray]) -> None:
        """Continue from the arrays of `save_state`. The model must already have the mean weights.

        With a different number of replicas, all replicas continue from these mean weights.
        """
        count, last, *stacked = arrays
        self.schedule.count.assign(count)
        self.schedule.last_syncs.assign(last)
        self._has_trained = True
        self.replica_values.take_states(stacked)

    def reset(self) -> None:
        """Reset all values that are not saved in files. Called after a saved state was loaded."""
        self._has_trained = False
        self.replica_values.forget()
        if self._is_built:
            self.schedule.count.assign(0)
            self.schedule.restart(0)
            self.sync.transport.reset()


def _check(variables: Sequence[Variable], num_fragments: int, optimizer: CrossShardProtocol) -> None:
    if len(variables) < num_fragments:
        raise ValueError(
            "`fragments` must be at most the number of trainable variables. "
            f"Received: fragments={num_fragments}, for {len(variables)} variables."
        )
    if any(map(overwrites_variable, variables)):
        raise ValueError(
            "`LocalSGD` does not support float8, because float8 scales cannot be averaged. Received: the variable "
            f"{next(v.path for v in variables if overwrites_variable(v))}. Remove `LocalSGD`."
        )
    if replicas_are_processes():
        return
    if processes.process()[0] > 1:
        raise ValueError(
            f"`LocalSGD` supports several processes only on PyTorch. Received: {processes.process()[0]} processes. "
            "Use the devices of one process, or PyTorch, or remove `LocalSGD`."
        )
    found = [p for p in descendants(optimizer) if isinstance(p, keras.optimizers.LossScaleOptimizer)]
    if found:
        raise ValueError(
            "With `LocalSGD` each replica decides whether to skip an update that overflowed, but Keras' loss "
            f"scaling decides once for all replicas of a program. Received: {found[0]!r}. Use "
            "`keras_shardopt.LossScaling` instead."
        )
