"""One step on PyTorch of a model passed to `prepare`, and the average over ranks of moving statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from keras_shardopt.backends.models import has_own_statistics, set_replica_statistics
from keras_shardopt.data.whole_batches import rows_of_parts
from keras_shardopt.fit.batch_normalization import synchronized_statistics
from keras_shardopt.fit.calls import num_rows
from keras_shardopt.fit.stateful import fit_states, stateful_layers
from keras_shardopt.fit.torch.own_state import average, statistics_of
from keras_shardopt.update.losses import mean_losses, share_losses
from keras_shardopt.update.plugs import step_class
from keras_shardopt.update.trainer_context import BatchShare, batch_shared


class TrainStep:
    """Runs Keras's step on this rank's rows of the batch. Extensions override some methods."""

    divides_batches = False
    """Whether the step itself divides batches, also in a single process. Its logs then cover all ranks."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._statistics: list[tuple[Any, torch.Tensor]] = []
        self._stateful: list[Any] | None = None

    def begin_call(self) -> None:
        """Forget the stateful layers, which can change. Runs when `fit`, `evaluate` or `predict` begins or ends."""
        self._stateful = None

    def begin_fit(self) -> None:
        """Called when `fit` begins. Does nothing unless an extension overrides it."""

    def num_parts_of(self, num_ranks: int) -> int:
        """Return the number of parts into which a batch is divided. Default: one per rank."""
        return num_ranks

    def rows_of(self, num: int, num_ranks: int) -> list[int]:
        """Return the number of rows of each rank, for a batch of `num` rows."""
        return rows_of_parts(num, num_ranks)

    def fit_states(self, rows: Sequence[int], rank: int) -> None:
        """Give stateful layers the states of a rank's rows; `rows` has the number of rows of each rank."""
        if self._stateful is None:
            self._stateful = stateful_layers(self._session.model)
        fit_states(self._stateful, rows, [rank])

    # This method communicates, so `torch.compile` must compile only the functions that this method calls.
    @torch.compiler.disable(recursive=False)
    def run(self, real: Callable[[Any], Any], data: Any, trains: bool) -> Any:
        """Run `real`, the step of Keras, on this rank's rows `data`. Return the logs."""
        session = self._session
        ranks, batches = session.ranks, session.batches
        if ranks is None or batches.mine is None:
            return real(data)
        mine, batches.mine = batches.mine, None
        if trains:
            set_replica_statistics(session.model, True)
        share_losses(session.model)
        metrics = [] if mine else _with_values(_counted_metrics(session.model))
        self._statistics = [] if mine else _with_values(_own_statistics(session.model))
        rows_here = mine or num_rows(data)
        with batch_shared(BatchShare(mine, batches.all_rows(), ranks, ends_early=not mine, rows_here=rows_here)):
            logs = real(data)
        _assign(metrics)
        self.restore_statistics()
        session.last_rows = mine
        batches.confirm()
        return session.logs_of_all(logs)

    def after_loss(self) -> None:
        """Called after each loss is computed. Does nothing unless an extension overrides it."""

    def restore_statistics(self) -> None:
        """Restore the moving statistics that a step without rows has changed. Later calls do nothing."""
        _assign(self._statistics)
        self._statistics = []

    def before_step(self, begins_epoch: bool) -> None:
        """Called before each training step, on all ranks. Does nothing unless an extension overrides it."""

    def before_reading(self) -> None:
        """Called on all ranks before weights are read. Does nothing unless an extension overrides it."""

    def started_equal(self) -> None:
        """Called when training begins with equal weights on all ranks. Does nothing unless overridden."""

    def end_epoch(self, is_call: bool) -> None:
        """Average per-rank state after an epoch of `fit` (`is_call`) or a `train_on_batch` (not `is_call`)."""
        self.settle()

    def settle(self) -> None:
        """Replace the state that differs between ranks by its mean over ranks."""
        average(statistics_of(self._session.model), self._session.ranks)

    def progress(self) -> list[tuple[int, bool]]:
        """Return the update count of each `CrossShard`, and whether this rank's state may differ from other ranks'."""
        has_own = has_own_statistics(self._session.model)
        return [(int(cross_shard.iterations), has_own) for cross_shard in self._session.cross_shards]


def _counted_metrics(model: Any) -> list[Any]:
    """Return the metric variables that a step without rows must not change: all except those of mean losses."""
    shared = {id(v) for tracker in mean_losses(model) for v in tracker.variables}
    return [v for v in model.metrics_variables if id(v) not in shared]


def _own_statistics(model: Any) -> list[Any]:
    return statistics_of(model, apart_from=synchronized_statistics(model))


def _with_values(variables: list[Any]) -> list[tuple[Any, torch.Tensor]]:
    return [(variable, variable.value.clone()) for variable in variables]


def _assign(values: list[tuple[Any, torch.Tensor]]) -> None:
    for variable, value in values:
        # Assign to `data`, because a backward pass that follows could otherwise raise an error about changed values.
        variable.value.data.copy_(value)


def step_of(session: Any, before: TrainStep | None) -> TrainStep:
    """Return the `TrainStep` for the model's optimizer. Keep the step `before` if its class is unchanged."""
    kind = step_class(session.cross_shards, TrainStep)
    if before is None or type(before) is not kind:
        made: TrainStep = kind(session)
        return made
    before.begin_call()
    return before
