"""Local SGD and DiLoCo: each replica updates with its own gradients, and replicas average their weights periodically.

The *reference weights* are those of the last *sync step*. The next sync step averages `reference - weight` over
replicas. Local SGD subtracts this mean from the reference weights. DiLoCo passes it as the gradient to an outer
optimizer that updates the reference weights. All replicas continue from the new reference weights.

Private names of Keras touched here (a test checks that each exists):
    `Optimizer._trainable_variables` - the variables that the optimizer was built with.
    `Optimizer._track_variable` - makes a variable part of the optimizer's state.
    `Optimizer._model_variables_moving_average` - the averages of weights that an optimizer with `use_ema` keeps.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_shardopt.backends.active import processes, runtime
from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.backends.models import models_with
from keras_shardopt.backends.traffic import Collective, recording
from keras_shardopt.backends.user_warnings import warn
from keras_shardopt.extensions.local_sgd.own_gradients import OwnGradients
from keras_shardopt.extensions.local_sgd.replica_values import Copies, Rows, replicas_are_processes, statistics_of
from keras_shardopt.numerics import Tensor, Variable, dtype_of, overwrites_variable
from keras_shardopt.update.context import StageContext
from keras_shardopt.update.extension import ExtensionStage
from keras_shardopt.update.known import Known
from keras_shardopt.update.options import CrossShardOptions
from keras_shardopt.update.step import Proceed, Step
from keras_shardopt.update.trainer_context import current_share
from keras_shardopt.update.transport import transport_of
from keras_shardopt.wrapping.chain import base_optimizers, chain_of, descendants
from keras_shardopt.wrapping.rollback import may_skip_updates, stamp
from keras_shardopt.wrapping.slots import empty_name_scope
from keras_shardopt.wrapping.wrapper import OptimizerWrapper


class LocalUpdates(ExtensionStage):
    """Updates each replica's weights with its own gradients, and averages the weights periodically."""

    keeps_state = True

    def __init__(self, settings: Any, options: CrossShardOptions, context: StageContext) -> None:
        self._settings = settings
        self._optimizer = optimizer = context.optimizer
        optimizer.scope_inside.updates_differ = True
        self._every: Callable[[Any], Any] = settings.updates_per_sync
        self.num_fragments = settings.fragments
        outer = settings.outer_optimizer
        copies = [] if outer is None else [outer.from_config(outer.get_config()) for _ in range(self.num_fragments - 1)]
        self.outers: list[OptimizerWrapper] = [] if outer is None else list(map(OptimizerWrapper, [outer, *copies]))
        """The outer optimizer of each fragment (group of weights). Empty without `outer_optimizer`."""
        self.is_warmup = False
        """Whether the update that runs (or is traced) is a warm-up update, in which gradients are averaged."""
        self._has_trained = False
        self.count: Variable = None
        """The number of updates so far."""
        self.last_syncs: Variable = None
        """The value of `count` when each group of weights (fragment) was last averaged, shape `(num_fragments,)`."""
        self.num_skipped_syncs: Variable = None
        """The number of averages of weights that were not used, because they were not finite."""
        self.references: list[Variable] = []
        self.fragments: list[list[int]] = []
        """For each group of weights that are averaged together (fragment), the indices of its trainable variables."""
        self._file_state: list[Variable] = []
        self.transport = transport_of(options.compression, context)
        """Averages `reference - weight` over replicas, with the compression of the optimizer."""
        self.reducer = OwnGradients(context, options, self)
        self.statistics: list[Variable] = []
        """The moving statistics of the model. Code that reads the model gets their means over replicas."""
        self._known_count, self._known_syncs = Known(), Known()
        self.replica_values: Copies | Rows = Copies(self, optimizer)
        """Keeps the values of each replica while the model has the mean weights."""
        self._num_reported: Variable = None
        """`num_skipped_syncs` at the last warning. It is saved, so a restart does not repeat the warning."""
        self._sent: dict[Any, list[Collective]] = {}
        """The collectives that were sent, by the index of the averaged weight group (fragment), or by another name."""

    def build(self, variables: Sequence[Variable], add_variable: Callable[..., Variable]) -> None:
        """Create the reference weights and the state of the outer optimizers. Later calls do nothing.

        Raises:
            ValueError: if `fragments` exceeds the number of variables, or a variable cannot be averaged (float8).
        """
        self._check(variables)
        self.fragments = fragments_of([int(np.prod(v.shape)) for v in variables], self.num_fragments)
        self.count = add_variable((), "zeros", dtype="int", name="local_updates")
        self.last_syncs = add_variable((self.num_fragments,), "zeros", dtype="int", name="last_rounds")
        self.num_skipped_syncs = add_variable((), "zeros", dtype="int", name="left_out_rounds")
        for i, variable in enumerate(variables):
            reference = add_variable(variable.shape, "zeros", dtype=_wide(variable), name=f"anchor_{i}")
            self.references.append(reference)
        self._num_reported = add_variable((), "zeros", dtype="int", name="reported_rounds")
        self._file_state = [self.count, self.last_syncs, self.num_skipped_syncs, self._num_reported, *self.references]
        self.transport.build(variables, add_variable)
        for outer, positions in zip(self.outers, self.fragments):
            with empty_name_scope():
                outer.build([self.references[i] for i in positions])
            for variable in outer.variables:
                self._optimizer._track_variable(variable)
                self._file_state.append(variable)
        with runtime.init_scope():
            self._schedule_syncs(0)
        self.statistics = statistics_of(variables)

    def _check(self, variables: Sequence[Variable]) -> None:
        if len(variables) < self.num_fragments:
            raise ValueError(
                "`fragments` must be at most the number of trainable variables. "
                f"Received: fragments={self.num_fragments}, for {len(variables)} variables."
            )
        if any(map(overwrites_variable, variables)):
            raise ValueError(
                "`LocalSGD` does not support float8, because float8 scales cannot be averaged. Received: the variable "
                f"{next(v.path for v in variables if overwrites_variable(v))}. Remove `LocalSGD`."
            )
        if processes.process()[0] > 1 and not replicas_are_processes():
            raise ValueError(
                f"`LocalSGD` supports several processes only on PyTorch. Received: {processes.process()[0]} processes. "
                "Use the devices of one process, or PyTorch, or remove `LocalSGD`."
            )
        found = [p for p in descendants(self._optimizer) if isinstance(p, keras.optimizers.LossScaleOptimizer)]
        if found and not replicas_are_processes():
            raise ValueError(
                "With `LocalSGD` each replica decides whether to skip an update that overflowed, but Keras' loss "
                f"scaling decides once for all replicas of a program. Received: {found[0]!r}. Use "
                "`keras_shardopt.LossScaling` instead."
            )

    @property
    def skips(self) -> bool:
        """Whether a replica can skip an update that other replicas make, so counters differ between replicas."""
        # Compute this anew in each call, because the answer of `MixedPrecision` changes when it creates master weights.
        return any(map(may_skip_updates, chain_of(self._optimizer)))

    @property
    def restored(self) -> list[Variable]:
        """Variables of the model that a skipped update restores, such as seeds, but not moving statistics."""
        rollback = self._optimizer._rollback
        if rollback is None:
            return []
        models = models_with(self._optimizer._trainable_variables)
        known = {id(v) for model in models for v in model.non_trainable_variables} - set(map(id, self.statistics))
        return [v for v in rollback.variables if id(v) in known]

    @property
    def saved_variables(self) -> list[Variable]:  # type: ignore[override]
        """The variables of local SGD that are saved with the optimizer."""
        return list(self._file_state)

    @property
    def _replica_state(self) -> list[Variable]:
        """All variables that can differ between replicas. Empty on PyTorch before the first local update."""
        may_differ = self._has_trained or not replicas_are_processes()
        return [*self.replica_state, *self.stacked] if may_differ else []

    @property
    def replica_state(self) -> list[Variable]:  # type: ignore[override]
        """The optimizer variables whose values differ between replicas."""
        optimizer = self._optimizer
        rates = {id(v) for leaf in base_optimizers(optimizer) for v in leaf.variables if v.name == "learning_rate"}
        summing = optimizer.accumulation
        kept = [] if summing is None else [summing.window.counter, *summing._replica_state]
        excluded = rates | {id(v) for v in [*self._file_state, *kept, *self.stacked]}
        return [v for v in optimizer.variables if id(v) not in excluded]

    def weights(self) -> list[Variable]:
        """Return the variables that replicas average: trainable variables, or master weights in mixed precision."""
        found = list(self._optimizer._trainable_variables)
        for wrapper in chain_of(self._optimizer):
            if isinstance(wrapper, OptimizerWrapper) and wrapper.built:
                found = wrapper._variables_inside(found)
        return found

    def averages(self, positions: Sequence[int]) -> list[Variable]:
        """Return the moving averages of the weights at `positions`; empty without `use_ema`."""
        kept: dict[Any, Variable] = {}
        for leaf in base_optimizers(self._optimizer):
            if leaf.use_ema:
                kept.update(zip(map(id, leaf._trainable_variables), leaf._model_variables_moving_average))
        weights = self.weights()
        return [kept[id(weights[i])] for i in positions if id(weights[i]) in kept]

    def collect(self, step: Step, proceed: Proceed) -> None:
        """Call `proceed`, the update, as a warm-up or local update. With a traced number of updates, trace both."""
        warmup = self._settings.warmup_steps
        if not warmup or runtime.communicator(self._optimizer.axis_name).num_replicas == 1:
            proceed(step)
            return
        count = self._counted()
        if isinstance(count, int):
            self.is_warmup = count < warmup
            proceed(step)
            return
        shares = [value for value in (step.weight, step.row_share) if not isinstance(value, (int, float))]

        def make_branch(is_warmup: bool) -> Callable[[Sequence[Any]], None]:
            def branch(tensors: Sequence[Any]) -> None:
                more = iter(tensors[len(step.grads) :])
                weight, share = (
                    value if isinstance(value, (int, float)) else next(more) for value in (step.weight, step.row_share)
                )
                self.is_warmup = is_warmup
                proceed(step.replace(grads=list(tensors[: len(step.grads)]), weight=weight, row_share=share))

            return branch

        is_warming_up = ops.less(count, warmup)
        tensors = [*step.grads, *shares]
        for condition, is_warmup in ((is_warming_up, True), (ops.logical_not(is_warming_up), False)):
            runtime.cond(condition, make_branch(is_warmup), tensors, self._optimizer._written())

    def commit(self, step: Step, proceed: Proceed) -> None:
        """Update this replica's weights. Then average each group of weights (fragment) for which an average is due."""
        if runtime.communicator(self._optimizer.axis_name).num_replicas == 1:
            proceed(step)
        else:
            runtime.no_compile(self._commit, step, proceed)

    def _commit(self, step: Step, proceed: Proceed) -> None:
        before = self._counted()
        if isinstance(before, int):
            if not before:
                self.set_references()
        else:
            runtime.cond(ops.equal(before, 0), lambda _: self.set_references(), [], self.references, communicates=False)
        updates = stamp(self._optimizer.iterations) if self._synced_statistics and self.skips else None
        proceed(step)
        count = before + 1
        self._set_count(count)
        if self.is_warmup:
            self.set_references()
            self._schedule_syncs(count)
            return
        self._has_trained = True
        last = self._known_syncs.of(self.last_syncs) if isinstance(count, int) else self.last_syncs
        for number in range(self.num_fragments):
            since = int(last[number]) if isinstance(count, int) else ops.convert_to_tensor(last)[number]
            is_due = count - since >= self._length(since)
            written = [*self._optimizer._written(), *self._synced_statistics]
            # Pass this replica's share of rows to the branch as an operand: it differs between replicas in one program.
            shares = [ops.cast(step.row_share, "float32")] if self._synced_statistics and number == 0 else []
            if shares and updates is not None:  # a replica that skipped its update has weight 0
                is_made = ops.not_equal(updates, stamp(self._optimizer.iterations))
                shares = [shares[0] * ops.cast(is_made, "float32")]
            runtime.cond(is_due, functools.partial(self._recorded_sync, number, count), shares, written)

    def _counted(self) -> Any:
        """Return the number of updates so far: an int if Python runs in each update, otherwise a traced tensor."""
        if runtime.version(self.count) is None:
            return ops.copy(ops.convert_to_tensor(self.count))
        return int(self._known_count.of(self.count))

    def _set_count(self, count: Any) -> None:
        self.count.assign(count)
        if isinstance(count, int):
            self._known_count.note(self.count, count)

    def _schedule_syncs(self, count: Any) -> None:
        """Schedule the first average of each weight group, spread evenly over updates after `count` and the warm-up."""
        if isinstance(count, int):
            count = max(count, self._settings.warmup_steps)
        every, number = self._every(count), self.num_fragments
        firsts = [count + (i + 1) * every // number - every for i in range(number)]
        self.last_syncs.assign(ops.stack([ops.cast(first, self.last_syncs.dtype) for first in firsts]))

    def _length(self, since: Any) -> Any:
        """Return the number of updates between the average of weights at update `since` and the next average."""
        start = self._settings.warmup_steps
        return self._every(max(since, start) if isinstance(since, int) else ops.maximum(since, start))

    def set_references(self) -> None:
        """Copy the weights to the reference weights, from which the next average computes weight changes."""
        for reference, weight in zip(self.references, self.weights()):
            # Copy, because a JAX step cannot take (donate) the buffer of one array for two variables.
            reference.assign(ops.copy(ops.cast(ops.convert_to_tensor(weight), reference.dtype)))

    def _recorded_sync(self, number: int, count: Any, shares: Sequence[Tensor]) -> None:
        with recording() as self._sent[number]:
            self._sync(number, count, shares)

    def _sync(self, number: int, count: Any, shares: Sequence[Tensor]) -> None:
        """Average the weights of fragment (group) `number` after update `count`. All replicas call this together.

        If `shares` has this replica's share of the rows, average moving statistics as well.
        """
        positions = self.fragments[number]
        weights = self.weights()
        references = [self.references[i] for i in positions]
        own = [weights[i] for i in positions]
        averages, statistics = self.averages(positions), self._synced_statistics if shares else []
        moved = [r - ops.cast(ops.convert_to_tensor(w), r.dtype) for r, w in zip(references, own)]
        comm = runtime.communicator(self._optimizer.axis_name)
        self._check_counts(comm, count)
        means = self.means(comm, list(map(ops.convert_to_tensor, averages)))
        means += self.means(comm, list(map(ops.convert_to_tensor, statistics)), *shares)
        moved = self.transport.means(comm, positions, moved, count)
        is_finite = ops.all(ops.stack([ops.all(ops.isfinite(mean)) for mean in moved]))
        if isinstance(count, int):
            is_finite = bool(is_finite)  # read it once: this waits for the GPU
        state = [] if not self.outers else self.outers[number].variables
        with self._optimizer.scope_inside.reduced():  # `moved` are means, so do not average again
            runtime.cond(is_finite, lambda moved: self._move(number, references, moved), moved, [*references, *state])
        if statistics and replicas_are_processes() and not shares[0] > 0:
            statistics = []  # this rank had no rows or skipped its update
        for variable, mean in zip([*averages, *statistics], means):
            variable.assign(mean)
        for i, reference in zip(positions, references):
            self._set_weight(i, weights[i], reference)
        is_skipped = not is_finite if isinstance(is_finite, bool) else ops.logical_not(is_finite)
        runtime.cond(is_skipped, lambda _: self._forget_nonfinite(), [], [self.num_skipped_syncs, *self.replica_state])
        if isinstance(count, int):
            known = self._known_syncs.of(self.last_syncs).copy()
            known[number] = count
            self.last_syncs.assign(known)
            self._known_syncs.note(self.last_syncs, known)
            return
        last = ops.convert_to_tensor(self.last_syncs)
        is_this = ops.equal(ops.arange(self.num_fragments), number)
        self.last_syncs.assign(ops.where(is_this, ops.cast(count, last.dtype), last))

    @property
    def _synced_statistics(self) -> list[Variable]:
        """The moving statistics that `_sync` averages. Empty on JAX, because there the trainer averages them."""
        return [] if self.stacked else self.statistics

    def _check_counts(self, comm: Communicator, count: Any) -> None:
        """Raise ValueError if ranks made different numbers of updates, which a custom training loop can cause."""
        if comm.is_spmd or current_share() is not None:
            return
        counts = ops.convert_to_tensor([count % 512, (count % 512) ** 2], "int32")  # sum < 2**31 up to 8192 replicas
        total, squares = (int(n) for n in ops.convert_to_numpy(comm.all_reduce([counts], "sum")[0]))
        if squares * comm.num_replicas != total**2:  # equal only if all counts are equal (Cauchy-Schwarz)
            raise ValueError(
                "All replicas must make the same number of updates, because sync steps average their weights. "
                f"Received: {count} on replica {comm.replica_id}, and a different number on another replica. Give each "
                "replica the same number of batches, or call `keras_shardopt.prepare(model)` and `fit`."
            )

    def sync_statistics(self, comm: Communicator, values: Sequence[Tensor], row_share: Any) -> list[Tensor]:
        """Return the means over replicas of moving statistics (JAX); without rows (`row_share` 0), `values`."""
        with recording() as self._sent["statistics"]:
            means = self.means(comm, values, row_share)
        return [ops.where(row_share > 0, mean, value) for mean, value in zip(means, values)]

    @contextlib.contextmanager
    def recording_warmup(self) -> Iterator[None]:
        """Record the collectives that run in this block, as those of a warm-up update."""
        with recording() as self._sent[_WARMUP]:
            yield

    def sent(self, each: Sequence[Collective]) -> tuple[list[Collective], int]:
        """Return the collectives and the number of updates from one average of weights to the next (warm-up: 1 update).

        Args:
            each: the collectives that every update sends.
        """
        count = 0 if self.count is None else self.num_updates
        if count <= self._settings.warmup_steps:
            return [*each, *self._sent.get(_WARMUP, ())] if count else [], 1
        length = int(self._length(int(max(ops.convert_to_numpy(self.last_syncs)))))
        syncs = [collectives for key, collectives in self._sent.items() if key != _WARMUP]
        return [*each] * length + [collective for collectives in syncs for collective in collectives], length

    @staticmethod
    def means(comm: Communicator, values: Sequence[Tensor], row_share: Any = 1) -> list[Tensor]:
        """Return means over replicas with finite values and rows (`row_share > 0`). Without any, return `values`."""
        if not values:
            return []
        is_good = ops.stack([ops.cast(ops.all(ops.isfinite(value)), "float32") for value in values])
        is_good = is_good * ops.cast(row_share > 0, "float32")
        addends = [ops.where(is_good[i] > 0, value, ops.zeros_like(value)) for i, value in enumerate(values)]
        *sums, counts = comm.all_reduce([*addends, is_good], "sum")
        return [
            ops.where(counts[i] > 0, total / ops.cast(ops.maximum(counts[i], 1), dtype_of(total)), value)
            for i, (total, value) in enumerate(zip(sums, values))
        ]

    def _move(self, number: int, references: Sequence[Variable], moved: Sequence[Tensor]) -> None:
        if self.outers:
            self.outers[number].update_inner(list(moved), references)
        else:
            for reference, mean in zip(references, moved):
                reference.assign(reference - mean)

    def _set_weight(self, i: int, weight: Variable, reference: Variable) -> None:
        """Assign a reference weight to `weight`. If that is a master weight, also assign the trainable variable."""
        weight.assign(ops.cast(ops.convert_to_tensor(reference), dtype_of(weight)))
        if weight.constraint is not None:
            weight.assign(weight.constraint(weight))
            reference.assign(ops.cast(ops.convert_to_tensor(weight), reference.dtype))
        trained = self._optimizer._trainable_variables[i]
        if trained is not weight:
            trained.assign(ops.cast(ops.convert_to_tensor(weight), dtype_of(trained)))

    def _forget_nonfinite(self) -> None:
        """Replace NaN and infinity in optimizer variables by 0 after an average that was not finite."""
        self.num_skipped_syncs.assign(self.num_skipped_syncs + 1)
        for variable in self.replica_state:
            if keras.backend.is_float_dtype(variable.dtype):
                value = ops.convert_to_tensor(variable)
                variable.assign(ops.where(ops.isfinite(value), value, ops.zeros_like(value)))

    @property
    def weights_differ(self) -> bool:  # type: ignore[override]
        """Whether replicas have different weights now. Call it only outside of a training step."""
        return self.count is not None and not self.replica_values.is_shown and bool(self.unsynced())

    @property
    def num_updates(self) -> int:
        """The number of updates. Read it only outside of a training step."""
        return int(ops.convert_to_numpy(self.count))

    @property
    def unsent(self) -> list[Variable]:
        """This replica's compression errors, which the next average adds to the weight changes."""
        return [variable for kept in self.transport.carried.values() for variable in kept]

    def unsynced_statistics(self) -> list[Variable]:
        """Return the moving statistics that can differ between replicas, even after an average of weights."""
        summing = self._optimizer.accumulation
        return self.statistics if self.num_updates or (summing is not None and summing.window.num_taken) else []

    def unsynced(self) -> list[int]:
        """Return the indices of the weights that were updated since replicas last averaged them."""
        count = self.num_updates
        starts = np.maximum(ops.convert_to_numpy(self.last_syncs), self._settings.warmup_steps)
        return sorted(i for positions, start in zip(self.fragments, starts) if count > start for i in positions)

    def before_reading(self) -> None:
        """Assign the mean over replicas to weights until the next update. All processes must call this together."""
        if self.count is not None:
            self._report()
            self.replica_values.show()

    def resume(self, begins_epoch: bool = False) -> None:
        """Restore each replica's weights, or restart from weights that other code has set; see `resume_local`."""
        if self.count is not None:
            self.replica_values.resume(begins_epoch)

    def restart(self) -> None:
        """Continue from the current weights, which must be equal on all replicas, as if they were a new average."""
        self.set_references()
        self._schedule_syncs(self.num_updates)
        self.transport.reset()

    def stack(self) -> None:
        """Create the variables with a first dimension of replicas (`Rows`, for JAX). Later calls do nothing."""
        if self.count is not None and isinstance(self.replica_values, Copies):
            self.replica_values = Rows(self, self._optimizer)

    @property
    def optimizers(self) -> list[Any]:  # type: ignore[override]
        """The outer optimizers."""
        return [outer.inner for outer in self.outers]

    @property
    def restores_skipped_updates(self) -> bool:  # type: ignore[override]
        """Whether local SGD itself restores statistics after a skipped update: True on JAX, after a call of `stack`."""
        return bool(self.stacked)

    @property
    def stacked(self) -> list[Variable]:
        """The variables with one row (index of the first dimension) per replica. Empty unless `stack` was called."""
        return self.replica_values.stacked

    def save_state(self) -> list[np.ndarray]:
        """Return `count` and `last_syncs`, then each variable that can differ, with all replicas stacked on axis 0.

        All processes must call this together.
        """
        return [*(ops.convert_to_numpy(v) for v in (self.count, self.last_syncs)), *self.replica_values.states()]

    def load_state(self, arrays: Sequence[np.ndarray]) -> None:
        """Continue from the arrays of `save_state`. The model must already have the mean weights.

        With a different number of replicas, all replicas continue from these mean weights.
        """
        count, last, *stacked = arrays
        self.count.assign(count)
        self.last_syncs.assign(last)
        self._has_trained = True
        self.replica_values.take_states(stacked)

    def settled(self, model: Any, state: Any, result: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Return the values of non-trainable and optimizer variables after the step of one replica (`result`).

        If the step skipped its update, return the values before the step (`state`), except for counters.
        """
        rollback = self._optimizer._rollback
        if rollback is not None:
            _, result = rollback.settled(model, state, (None, result))
        return result[1], result[2]

    def _report(self) -> None:
        skipped, reported = (int(ops.convert_to_numpy(v)) for v in (self.num_skipped_syncs, self._num_reported))
        if skipped > reported:
            self._num_reported.assign(skipped)
            warn(
                "The mean weights of a sync step were NaN or infinite, so all replicas returned to the weights of the "
                f"previous sync step. Received: {skipped - reported} such sync steps, in which replicas average their "
                'weights. Lower the learning rate, clip gradients, or use `on_nonfinite="skip"`.',
            )

    def reset(self) -> None:
        """Reset all values that are not saved in files. Called after a saved state was loaded."""
        self._has_trained = False
        self.replica_values.forget()
        if self.count is not None:
            self.count.assign(0)
            self._schedule_syncs(0)
            self.transport.reset()


_WARMUP = "warmup"


def fragments_of(sizes: Sequence[int], number: int) -> list[list[int]]:
    """Divide the indices of `sizes` into nonempty groups of similar total size, by adding large sizes first."""
    groups: list[list[int]] = [[] for _ in range(number)]
    totals = [0] * number
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        least = min(range(number), key=lambda group: (totals[group], len(groups[group])))
        groups[least].append(i)
        totals[least] += sizes[i]
    return [sorted(group) for group in groups]


def _wide(variable: Variable) -> str:
    dtype = dtype_of(variable)
    return "float32" if dtype in ("float16", "bfloat16") else dtype
