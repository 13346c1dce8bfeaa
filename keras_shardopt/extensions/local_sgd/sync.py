"""Sync steps of local SGD and DiLoCo: replicas average their weights.

The *reference weights* are those of the last *sync step*. The next sync step averages `reference - weight` over
replicas. Local SGD subtracts this mean from the reference weights. DiLoCo passes it as the gradient to an outer
optimizer that updates the reference weights. All replicas continue from the new reference weights.

Private names of Keras touched here (a test checks that each exists):
    `Optimizer._track_variable` - makes a variable part of the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from keras_shardopt.backends.active import runtime
from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.backends.traffic import Collective, recording
from keras_shardopt.backends.user_warnings import warn
from keras_shardopt.extensions.local_sgd.schedule import SyncSchedule
from keras_shardopt.extensions.local_sgd.variables import ReplicaVariables, replicas_are_processes
from keras_shardopt.numerics import Tensor, Variable, dtype_of
from keras_shardopt.update.context import CrossShardProtocol
from keras_shardopt.update.trainer_context import current_share
from keras_shardopt.update.transport import Transport
from keras_shardopt.wrapping.slots import empty_name_scope
from keras_shardopt.wrapping.wrapper import OptimizerWrapper


class WeightSync:
    """Averages weights over replicas, and keeps the reference weights and the outer optimizers."""

    def __init__(
        self,
        optimizer: CrossShardProtocol,
        outer: Any,
        transport: Transport,
        schedule: SyncSchedule,
        variables: ReplicaVariables,
    ) -> None:
        self._optimizer = optimizer
        self.schedule = schedule
        self._variables = variables
        self.transport = transport
        """Averages `reference - weight` over replicas, with the compression of the optimizer."""
        self.outers: list[OptimizerWrapper] = []
        """The outer optimizer of each fragment. Empty without `outer_optimizer`."""
        if outer is not None:
            copies = [outer.from_config(outer.get_config()) for _ in range(schedule.num_fragments - 1)]
            self.outers = list(map(OptimizerWrapper, [outer, *copies]))
        self.references: list[Variable] = []
        """The reference weights, in at least float32."""
        self.num_skipped: Variable = None
        """The number of averages of weights that were not used, because they were not finite."""
        self._num_reported: Variable = None
        """`num_skipped` at the last warning. It is saved, so a restart does not repeat the warning."""
        self.sent: dict[Any, list[Collective]] = {}
        """The collectives of the last averages, by the index of the weight group (fragment), or by another name."""

    def build(self, variables: Sequence[Variable], add_variable: Callable[..., Variable]) -> None:
        """Create the reference weights and the state of the outer optimizers."""
        self.num_skipped = add_variable((), "zeros", dtype="int", name="left_out_rounds")
        for i, variable in enumerate(variables):
            self.references.append(add_variable(variable.shape, "zeros", dtype=_wide(variable), name=f"anchor_{i}"))
        self._num_reported = add_variable((), "zeros", dtype="int", name="reported_rounds")
        self.transport.build(variables, add_variable)
        for outer, positions in zip(self.outers, self.schedule.fragments):
            with empty_name_scope():
                outer.build([self.references[i] for i in positions])
            for variable in outer.variables:
                self._optimizer._track_variable(variable)

    @property
    def saved_variables(self) -> list[Variable]:
        """The variables of sync steps that are saved with the optimizer."""
        outer_state = [variable for outer in self.outers for variable in outer.variables]
        return [self.num_skipped, self._num_reported, *self.references, *outer_state]

    def set_references(self) -> None:
        """Copy the weights to the reference weights, from which the next average computes weight changes."""
        for reference, weight in zip(self.references, self._variables.weights()):
            # Copy, because a JAX step cannot take (donate) the buffer of one array for two variables.
            reference.assign(ops.copy(ops.cast(ops.convert_to_tensor(weight), reference.dtype)))

    def restart(self) -> None:
        """Continue from the current weights, which must be equal on all replicas, as if they were a new average."""
        self.set_references()
        self.schedule.restart(self.schedule.num_updates)
        self.transport.reset()

    def run(self, number: int, count: Any, statistics: Sequence[Variable], shares: Sequence[Tensor]) -> None:
        """Average the weights of fragment (group) `number` after update `count`. All replicas call this together.

        Also average `statistics`, over the replicas with rows. `shares` then holds this replica's share of the rows.
        """
        positions = self.schedule.fragments[number]
        weights = self._variables.weights()
        references = [self.references[i] for i in positions]
        averages = self._variables.averages(positions)
        moved = [r - ops.cast(ops.convert_to_tensor(weights[i]), r.dtype) for i, r in zip(positions, references)]
        comm = runtime.communicator(self._optimizer.axis_name)
        with recording() as self.sent[number]:
            check_counts(comm, count)
            means = [*finite_means(comm, averages), *finite_means(comm, statistics, *shares)]
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
        trained = self._variables.trained
        for i, reference in zip(positions, references):
            _set_weight(trained[i], weights[i], reference)
        is_skipped = not is_finite if isinstance(is_finite, bool) else ops.logical_not(is_finite)
        written = [self.num_skipped, *self._variables.state]
        runtime.cond(is_skipped, lambda _: self._forget_nonfinite(), [], written)
        self.schedule.synced(number, count)

    def _move(self, number: int, references: Sequence[Variable], moved: Sequence[Tensor]) -> None:
        if self.outers:
            self.outers[number].update_inner(list(moved), references)
        else:
            for reference, mean in zip(references, moved):
                reference.assign(reference - mean)

    def _forget_nonfinite(self) -> None:
        """Replace NaN and infinity in optimizer variables by 0 after an average that was not finite."""
        self.num_skipped.assign(self.num_skipped + 1)
        for variable in self._variables.state:
            if keras.backend.is_float_dtype(variable.dtype):
                value = ops.convert_to_tensor(variable)
                variable.assign(ops.where(ops.isfinite(value), value, ops.zeros_like(value)))

    def report(self) -> None:
        """Warn of averages that were not finite since the last warning."""
        skipped, reported = (int(ops.convert_to_numpy(v)) for v in (self.num_skipped, self._num_reported))
        if skipped > reported:
            self._num_reported.assign(skipped)
            warn(
                "The mean weights of a sync step were NaN or infinite, so all replicas returned to the weights of the "
                f"previous sync step. Received: {skipped - reported} such sync steps, in which replicas average their "
                'weights. Lower the learning rate, clip gradients, or use `on_nonfinite="skip"`.',
            )


def _set_weight(trained: Variable, weight: Variable, reference: Variable) -> None:
    """Assign a reference weight to `weight`. If that is a master weight, also assign the variable `trained`."""
    weight.assign(ops.cast(ops.convert_to_tensor(reference), dtype_of(weight)))
    if weight.constraint is not None:
        weight.assign(weight.constraint(weight))
        reference.assign(ops.cast(ops.convert_to_tensor(weight), reference.dtype))
    if trained is not weight:
        trained.assign(ops.cast(ops.convert_to_tensor(weight), dtype_of(trained)))


def finite_means(comm: Communicator, values: Sequence[Tensor | Variable], row_share: Any = 1) -> list[Tensor]:
    """Return means over replicas with finite values and rows (`row_share > 0`). Without any, return `values`."""
    if not values:
        return []
    values = list(map(ops.convert_to_tensor, values))
    is_good = ops.stack([ops.cast(ops.all(ops.isfinite(value)), "float32") for value in values])
    is_good = is_good * ops.cast(row_share > 0, "float32")
    addends = [ops.where(is_good[i] > 0, value, ops.zeros_like(value)) for i, value in enumerate(values)]
    *sums, counts = comm.all_reduce([*addends, is_good], "sum")
    return [
        ops.where(counts[i] > 0, total / ops.cast(ops.maximum(counts[i], 1), dtype_of(total)), value)
        for i, (total, value) in enumerate(zip(sums, values))
    ]


def check_counts(comm: Communicator, count: Any) -> None:
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


def _wide(variable: Variable) -> str:
    dtype = dtype_of(variable)
    return "float32" if dtype in ("float16", "bfloat16") else dtype
