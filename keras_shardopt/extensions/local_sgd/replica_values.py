"""Gives mean weights to code that reads the model between local updates, and restores replicas' weights afterwards.

`Copies` is for replicas that have their own copy of each variable. `Rows` is for replicas that share one copy (JAX): it
adds variables with a row per replica, an index of their first dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from keras import ops

from keras_shardopt.backends.active import placement, processes, runtime
from keras_shardopt.extensions.local_sgd.sync import WeightSync
from keras_shardopt.extensions.local_sgd.variables import ReplicaVariables, replicas_are_processes
from keras_shardopt.numerics import Variable, dtype_of
from keras_shardopt.update.context import CrossShardProtocol
from keras_shardopt.wrapping.slots import empty_name_scope


class Copies:
    """Keeps the values of replicas that have their own copies of variables: processes, or devices of a strategy."""

    stacked: Sequence[Variable] = ()

    def __init__(self, optimizer: CrossShardProtocol, variables: ReplicaVariables, sync: WeightSync) -> None:
        self._optimizer = optimizer
        self._variables = variables
        self._schedule = sync.schedule
        self._sync = sync
        self._shown: list[tuple[Variable, list[np.ndarray], np.ndarray]] = []  # variable, its copies, their mean
        self._count = 0  # the number of updates when `show` saved values: a later update outdates these

    @property
    def is_shown(self) -> bool:
        """Whether the model has the mean weights now. False after any update."""
        return bool(self._shown) and self._count == self._schedule.num_updates

    def show(self) -> None:
        """Save each replica's values of the variables that can differ, then assign their mean over replicas."""
        if self.is_shown:
            return
        positions = self._schedule.unsynced()
        weights, trained = self._variables.weights(), self._variables.trained
        variables = [*[weights[i] for i in positions], *self._variables.averages(positions)]
        variables += self._unsynced_statistics()
        own = [placement.replica_values(variable) for variable in variables]
        means = self._means(variables, own) if variables else []
        shown = list(zip(variables, own, means))
        for i, mean in zip(positions, means):
            if trained[i] is not weights[i]:  # use the mean of master weights, because it is more precise
                copies = placement.replica_values(trained[i])
                shown.append((trained[i], copies, mean.astype(copies[0].dtype)))
        if self._variables.may_skip and not replicas_are_processes():
            for counter in self._variables.counters:
                copies = placement.replica_values(counter)
                shown.append((counter, copies, largest(np.stack(copies))))
        for variable, _, mean in shown:
            placement.assign_replica_values(variable, [mean])
        self._shown, self._count = shown, self._schedule.num_updates

    def _unsynced_statistics(self) -> list[Variable]:
        """Return the moving statistics that can differ between replicas, even after an average of weights."""
        summing = self._optimizer.accumulation
        has_changed = self._schedule.num_updates or (summing is not None and summing.window.num_taken)
        return self._variables.statistics if has_changed else []

    def _means(self, variables: Sequence[Variable], own: Sequence[list[np.ndarray]]) -> list[np.ndarray]:
        if replicas_are_processes():
            processes.gather_objects(len(variables))  # raises if ranks are in different calls
            values = [ops.convert_to_tensor(variable) for variable in variables]
            means = runtime.communicator(self._optimizer.axis_name).all_reduce(values, "mean")
            return [ops.convert_to_numpy(mean) for mean in means]
        return [_mean(np.stack(copies)) for copies in own]

    def resume(self, begins_epoch: bool) -> None:
        """Restore the values of each replica. If weights were set since `show`, restart from these weights.

        `begins_epoch`: other code may have set weights that are equal on all replicas. Copy these to the references.
        """
        shown, was_shown = self._shown, self.is_shown
        self.forget()
        if was_shown:
            # Restart all replicas from the present weights only if other code has set a weight since `show`.
            statistics = {id(v) for v in [*self._variables.statistics, *self._variables.counters]}
            left = [_is_same(placement.replica_values(v)[0], mean) for v, _, mean in shown]
            is_restart = not all(is_left for (v, *_), is_left in zip(shown, left) if id(v) not in statistics)
            for (variable, own, _), is_left in zip(shown, left):
                if is_left and (not is_restart or id(variable) in statistics):
                    placement.assign_replica_values(variable, own)
            if is_restart:
                self._sync.restart()
        elif begins_epoch:
            unsynced = set(self._schedule.unsynced())
            for i, (reference, weight) in enumerate(zip(self._sync.references, self._variables.weights())):
                if i not in unsynced:
                    value = placement.replica_values(weight)[0].astype(reference.dtype)
                    placement.assign_replica_values(reference, [value])

    def forget(self) -> None:
        """Discard the values of each replica that `show` has saved."""
        self._shown = []

    def states(self) -> list[np.ndarray]:
        """Return an array per variable: the values of all replicas, stacked on axis 0. All processes must call this."""
        own = {id(variable): copies for variable, copies, _ in self._shown if self.is_shown}
        mine = [own.get(id(v)) or placement.replica_values(v) for v in self._variables.everything()]
        if replicas_are_processes():
            everyones = processes.gather_objects([copies[0] for copies in mine])
            mine = [list(copies) for copies in zip(*everyones)]
        return [np.stack(copies) for copies in mine]

    def take_states(self, arrays: Sequence[np.ndarray]) -> None:
        """Set each replica's values, except weights, from the arrays of `states`. `resume` then sets the weights."""
        averaged = set(map(id, self._variables.averaged()))
        self.forget()
        for variable, rows in zip(self._variables.everything(), arrays, strict=True):
            copies = placement.replica_values(variable)
            if replicas_are_processes():
                fits = len(rows) == processes.num_replicas()
                own = [rows[processes.process()[1] if fits else 0]]
            else:
                fits = len(rows) == len(copies)
                own = list(rows) if fits else [rows[0]]
            own = [row.astype(copies[0].dtype) for row in own]
            if id(variable) not in averaged:
                placement.assign_replica_values(variable, own)
            elif fits:
                self._shown.append((variable, own, copies[0]))
        self._count = self._schedule.num_updates


class Rows:
    """Adds variables with one row per replica, because on JAX all replicas share one copy of each variable.

    Each weight, moving statistic and variable of an inner optimizer gets such a variable. Training steps update its
    rows. The weights of the model keep the last average over replicas until `show` assigns a new one.
    """

    is_shown = True

    def __init__(self, optimizer: CrossShardProtocol, variables: ReplicaVariables, sync: WeightSync) -> None:
        self._variables = variables
        self._schedule = sync.schedule
        self._sync = sync
        # If replicas cannot skip updates, counters are equal on all replicas, so they need no row per replica.
        self._counters = set(map(id, variables.counters))
        window = [] if optimizer.accumulation is None else optimizer.accumulation._replica_state
        of_each = [v for v in variables.everything() if variables.may_skip or id(v) not in self._counters]
        self.of: list[Variable] = [*of_each, *window]
        """The variables whose values per replica are in `stacked`, in the same order."""
        self._averaged = set(map(id, variables.averaged()))
        with empty_name_scope():
            self.stacked: list[Variable] = [
                optimizer.add_variable(v.shape, "zeros", dtype=v.dtype, name=f"of_each_replica_{i}")
                for i, v in enumerate(self.of)
            ]
        variables.exclude(self.stacked)
        placement.place(self.stacked, "per_replica")
        # The model's weights and statistics after the last `show` or `resume`; None if other values were loaded since.
        self._seen: list[np.ndarray] | None = None
        self._seen_statistics: list[np.ndarray] = []
        self._has_references = False  # whether `resume` was called after the last `show`

    def show(self) -> None:
        """Assign means over replicas to weights and statistics, maxima to counters, replica 0's values to the rest."""
        if self._seen is None or not self._has_references:  # rows are outdated, or the model already has the mean
            return
        positions = self._schedule.unsynced()
        trained = self._variables.trained
        joined = {id(v) for i, v in enumerate(trained) if i not in positions}  # equal weights on all replicas
        for variable, rows in zip(self.of, self.stacked):
            if id(variable) not in joined:
                array = ops.convert_to_numpy(rows)
                is_count, is_mean = id(variable) in self._counters, id(variable) in self._averaged
                variable.assign(_mean(array) if is_mean else largest(array) if is_count else array[0])
        weights = self._variables.weights()
        for i in positions:
            if trained[i] is not weights[i]:  # use the mean of master weights, because it is more precise
                trained[i].assign(ops.cast(ops.convert_to_tensor(weights[i]), dtype_of(trained[i])))
        self._remember()
        self._has_references = False

    def _remember(self) -> None:
        self._seen = [ops.convert_to_numpy(v) for v in self._variables.trained]
        self._seen_statistics = [ops.convert_to_numpy(v) for v in self._variables.statistics]

    def resume(self, begins_epoch: bool) -> None:
        """If other code has set variables, copy them to the rows of all replicas. `begins_epoch` has no effect."""
        trained = self._variables.trained
        now = [ops.convert_to_numpy(v) for v in trained]
        is_stale = self._seen is None
        # The weights are unchanged if they equal the last average over replicas, or the weights in `_seen`.
        left = [ops.convert_to_numpy(ops.cast(a, v.dtype)) for a, v in zip(self._sync.references, trained)]
        is_known = self._has_references and all(map(_is_same, left, now))
        is_known |= not is_stale and all(map(_is_same, self._seen or (), now))
        statistics = zip(self._variables.statistics, self._seen_statistics)
        chosen = {id(v) for v, seen in statistics if not _is_same(seen, ops.convert_to_numpy(v))}
        if not is_stale and not is_known:
            unsent = [v for kept in self._sync.transport.carried.values() for v in kept]
            chosen |= {id(v) for v in [*trained, *unsent]}
            self._sync.restart()
        for variable, rows in zip(self.of, self.stacked):
            if is_stale or id(variable) in chosen:
                rows.assign(np.broadcast_to(ops.convert_to_numpy(variable), rows.shape))
        self._remember()
        self._has_references = True

    def forget(self) -> None:
        """Mark the rows of all replicas as outdated, because other values were loaded into the variables."""
        self._seen = None

    def states(self) -> list[np.ndarray]:
        """Return an array per variable: the values of all replicas, stacked on axis 0."""
        rows = dict(zip(map(id, self.of), self.stacked))
        number = self.stacked[0].shape[0]
        return [
            ops.convert_to_numpy(rows[id(v)]) if id(v) in rows else np.stack([ops.convert_to_numpy(v)] * number)
            for v in self._variables.everything()
        ]

    def take_states(self, arrays: Sequence[np.ndarray]) -> None:
        """Set all replicas' values to the arrays of `states`. If the number of replicas differs, `resume` sets them."""
        stacked = dict(zip(map(id, self.of), self.stacked))
        fits = len(arrays[0]) == self.stacked[0].shape[0]
        trained = set(map(id, self._variables.trained))
        for variable, array in zip(self._variables.everything(), arrays, strict=True):
            if fits and id(variable) in stacked:
                stacked[id(variable)].assign(array)
            elif id(variable) not in trained:  # the trained weights already have the loaded mean
                variable.assign(array[0])
        self._remember()
        self._seen = self._seen if fits else None


def _is_same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays have the same bits, so NaN equals NaN."""
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()


def largest(rows: np.ndarray) -> np.ndarray:
    """Return the largest row of an integer array. Rows are compared element by element, from the first element on."""
    found: np.ndarray = max(rows, key=lambda row: row.ravel().tolist())
    return found


def _mean(rows: np.ndarray) -> np.ndarray:
    mean: np.ndarray = np.mean(rows, axis=0, dtype="float64").astype(rows.dtype)
    return mean
