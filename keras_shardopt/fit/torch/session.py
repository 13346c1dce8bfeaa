"""The calls of `fit`, `evaluate` and `predict` of one model that all ranks (processes) make together."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import torch

from keras_shardopt.backends.active import runtime
from keras_shardopt.backends.models import optimizers_of, set_replica_statistics
from keras_shardopt.backends.torch.communicator import TorchProcessGroup
from keras_shardopt.fit.batch_logs import BatchLogs
from keras_shardopt.fit.calls import cross_shards_in_step, refuse_groups
from keras_shardopt.fit.torch.equal_start import start_equal
from keras_shardopt.fit.torch.results import mean_logs, metric_logs
from keras_shardopt.fit.torch.shared_batches import Phase, SharedBatches
from keras_shardopt.fit.torch.step import TrainStep, step_of
from keras_shardopt.optimizers.cross_shard import cross_shards_in

SESSION = "_keras_shardopt_session"


class Session:
    """The state that the ranks share about one model: the running call, its batches, and its step."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.call: Phase | None = None
        """The phase of the running `fit`, `evaluate` or `predict` (of nested calls, the inner one), or None."""
        self.has_started = False
        """Whether the ranks have begun the running epoch with equal values."""
        self.splits_separate_part = False
        """Whether the running `fit` splits off validation data from data already divided among ranks."""
        self.last_rows = 0
        """The number of rows of this rank in the last batch."""
        self.has_warned = False
        """Whether the ranks have been warned that all train on the same rows."""
        self.logs = BatchLogs(model)
        self._last_batches: dict[Phase, Any] = {}
        self.batches = SharedBatches(self, self._last_batches)
        self._unused: list[tuple[Any, int]] = []
        """The optimizers without a `CrossShard`, with their update counts. An update by one of them is an error."""
        self._step_of_call: TrainStep | None = None
        self._optimizer_of_step: Any = None
        set_replica_statistics(model, False)

    @property
    def step(self) -> TrainStep:
        """The training step for the optimizer of the model, reused within a call until the optimizer changes."""
        if self.call is None or self._optimizer_of_step is not self.model.optimizer:
            self._step_of_call = step_of(self, self._step_of_call)
            self._optimizer_of_step = None if self.call is None else self.model.optimizer
        assert self._step_of_call is not None
        return self._step_of_call

    @property
    def cross_shards(self) -> list[Any]:
        """Each `CrossShard` (a wrapper that averages gradients over ranks) among the model's optimizers."""
        return cross_shards_in_step(self.model)

    @property
    def ranks(self) -> TorchProcessGroup | None:
        """The communicator of the ranks; None for a single rank."""
        replicas = runtime.communicator("")
        return None if replicas.num_replicas == 1 else replicas  # type: ignore[return-value]

    def begin_call(self) -> None:
        """Forget the optimizer and the stateful layers, because they can change before the next `fit` or `predict`."""
        self._optimizer_of_step = None
        if self._step_of_call is not None:
            self._step_of_call.begin_call()

    @contextlib.contextmanager
    def inner_call(self) -> Iterator[None]:
        """In the block, run a nested call, such as `evaluate` in a callback, with batches of its own."""
        before = self.batches
        before.confirm()
        self.begin_call()
        self.batches = SharedBatches(self, self._last_batches)
        try:
            yield
        finally:
            self.begin_call()
            self.batches = before

    def forget_batches(self) -> None:
        """Forget the last batches, because the next call may have batches of another structure."""
        self._last_batches.clear()

    @torch.compiler.disable
    def before_reading(self) -> None:
        """Average weights that differ between ranks (`LocalSGD`). All ranks must call this together."""
        if self.ranks is not None:
            self.step.before_reading()

    @torch.compiler.disable
    def before_step(self) -> None:
        """Prepare a training step. In the first step of an epoch, also make values equal on all ranks.

        Raise ValueError if a later `compile` has set an optimizer that does not average gradients over all ranks.
        """
        cross_shards, ranks = self.cross_shards, self.ranks
        refuse_groups(cross_shards)
        if not cross_shards:
            raise ValueError(
                "A model passed to `keras_shardopt.prepare` must be trained with a `CrossShard`, to average the "
                f"gradients of the ranks. Received: optimizer={self.model.optimizer!r}. Use "
                "`model.compile(optimizer=keras_shardopt.CrossShard(...), ...)`."
            )
        begins_epoch = self.batches.mine is not None and not self.has_started
        if begins_epoch:
            assert ranks is not None
            self.batches.confirm()
            start_equal(self.model, cross_shards, ranks, self.step)
            self._unused = [(o, int(o.iterations)) for o in optimizers_of(self.model) if not cross_shards_in(o)]
        self.step.before_step(begins_epoch)
        self.has_started = self.has_started or begins_epoch

    def check_unused(self) -> None:
        """Raise ValueError if an optimizer without a `CrossShard` made an update in the first step of an epoch."""
        unused, self._unused = self._unused, []
        for optimizer, updates in unused:
            if int(optimizer.iterations) != updates:
                raise ValueError(
                    "Every optimizer of a model passed to `keras_shardopt.prepare` must be a `CrossShard`, to average "
                    f"the gradients of the ranks. Received: an update by {type(optimizer).__name__}. Use "
                    f"`keras_shardopt.CrossShard({type(optimizer).__name__}(...))`."
                )

    @torch.compiler.disable
    def logs_of_all(self, logs: Any) -> Any:
        """End the step of a batch. Return logs of all ranks if a rank reads logs. Otherwise repeat earlier logs."""
        assert self.ranks is not None
        self.batches.end_step()
        trains = self.batches.phase is Phase.TRAIN_BATCH
        if not self.batches.shares_logs:
            return self.logs.last(trains, logs)
        self.batches.shares_logs = False
        metrics = metric_logs(self.model, self.ranks)
        if not isinstance(logs, dict) or metrics.keys() != logs.keys():
            return mean_logs(self.model, self.ranks, logs, self.last_rows)
        self.logs.show(trains, metrics)
        return metrics


running: contextvars.ContextVar[Session | None] = contextvars.ContextVar("running", default=None)


def session_of(model: Any) -> Session:
    """Return the state that all ranks share about a model that was passed to `prepare`."""
    session: Session = vars(model)[SESSION]
    return session


@contextlib.contextmanager
def run_of(session: Session | None) -> Iterator[None]:
    """In this block, which runs `fit` or `evaluate`, set `running` to `session` (None if this rank runs alone)."""
    token = running.set(session)
    try:
        yield
    finally:
        running.reset(token)
