"""The state that all ranks (processes) share about one model during `fit`, `evaluate` or `predict`.

Before ranks exchange tensors, they compare their next actions, such as a training step. If actions differ, all ranks
raise an error. To save time, ranks agree on a number of next batches with equal row counts, and skip the comparison for
these. The next comparison includes a checksum of the skipped batches.

Private names of Keras touched here (a test checks that each exists):
    `Optimizer._trainable_variables` - the variables of the optimizer's `build`.
    `keras.src.utils.python_utils.pythonify_logs` - converts logs to Python numbers.
"""

from __future__ import annotations

import contextlib
import contextvars
import enum
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import torch
from keras.src.utils.python_utils import pythonify_logs

from keras_shardopt.backends.active import runtime
from keras_shardopt.backends.models import has_built_in_step, optimizers_of, set_replica_statistics
from keras_shardopt.backends.torch.communicator import TorchProcessGroup, _bytes
from keras_shardopt.backends.torch.equal_start import broadcast_from_rank_0, model_and_seed_state
from keras_shardopt.backends.torch.placement import fingerprints, joint_fingerprint
from keras_shardopt.backends.torch.process_group import (
    add_promised_steps,
    announce,
    announce_async,
    can_promise_steps,
    gather_objects,
)
from keras_shardopt.backends.torch.random_numbers import seed_per_rank
from keras_shardopt.data.split_data import is_split
from keras_shardopt.data.whole_batches import checksum, fingerprint, part_of_batch
from keras_shardopt.fit.batch_normalization import synchronized_statistics
from keras_shardopt.fit.callbacks import BatchLogs
from keras_shardopt.fit.calls import (
    cross_shards_in_step,
    num_rows,
    refuse_groups,
    warn_of_unequal_start,
)
from keras_shardopt.fit.sharing import check_alike, check_batches, check_kinds, sharing_of, warn_of_same_parts
from keras_shardopt.fit.torch.step import TrainStep, step_of
from keras_shardopt.numerics import Tensor
from keras_shardopt.optimizers.cross_shard import cross_shards_in

SESSION = "_keras_shardopt_session"


class Phase(enum.Enum):
    """The actions that ranks compare before they exchange tensors. Error messages contain these texts."""

    BUILD = "builds a prepared model"
    TRAIN_BATCH = "trains a prepared model"
    TEST_BATCH = "evaluates a prepared model (call `evaluate` on all ranks: each gets the result over all ranks)"
    PREDICT_BATCH = "predicts with a prepared model (with `prepare(model, gather=False)`, each rank predicts alone)"
    PREDICTED = "gathers predictions"
    END_OF_EPOCH = "ends an epoch of a prepared model"
    END_OF_FIT = "leaves `fit` of a prepared model"


class Session:
    """The state that the ranks share about one model."""

    def __init__(self, model: Any) -> None:
        self._last_batch: dict[Phase, Any] = {}
        self.model = model
        self._unused: list[tuple[Any, int]] = []
        """The optimizers without a `CrossShard`, with their update counts. An update by one of them is an error."""
        self._begins_epoch = False
        self._step_of_call: TrainStep | None = None
        self._optimizer_of_step: Any = None
        set_replica_statistics(model, False)
        self.has_started = False
        """Whether the ranks have begun the running epoch with equal values."""
        self.mine: int | None = None
        """The number of rows of this rank in the next batch; None if the step does not involve the other ranks."""
        self._rows: list[int] = []
        """The number of rows of each rank in the next batch; outdated until `confirm` has received the numbers."""
        self.shares_logs = False
        """Whether some rank reads the logs of the next batch. Then all ranks must average these logs."""
        self.last_rows = 0
        """The number of rows of this rank in the last batch."""
        self.logs = BatchLogs(model)
        self.call: Phase | None = None
        """The phase of the running `fit`, `evaluate` or `predict` (of nested calls, the inner one), or None."""
        self.splits_separate_part = False
        """Whether the running `fit` splits off validation data from data already divided among ranks."""
        self._has_warned = False
        self._pending: Callable[[], list[list[int]]] | None = None
        """A function that waits for all ranks' messages about the next batch, such as its row counts; or None."""
        self._is_whole = False
        """Whether all ranks have the whole next batch, and each takes its rows, so all row counts are known."""
        self._step = 0
        """The index of the next batch in the epoch, if `_is_whole`."""
        self._waits: bool | None = None
        """Whether a step can begin before the other ranks' row counts arrive; None until `_can_wait` computes this."""
        self._phase = Phase.TRAIN_BATCH
        self._unreported = _Unreported()

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
    def cross_shard(self) -> Any:
        """The first optimizer of the model that averages gradients over ranks (a `CrossShard`)."""
        return self.cross_shards[0]

    @property
    def ranks(self) -> TorchProcessGroup | None:
        """The communicator of the ranks; None for a single rank."""
        replicas = runtime.communicator("")
        return None if replicas.num_replicas == 1 else replicas  # type: ignore[return-value]

    def check_reduces(self) -> None:
        """Raise ValueError if a later `compile` has set an optimizer that does not average gradients over all ranks."""
        cross_shards = self.cross_shards
        refuse_groups(cross_shards)
        if not cross_shards:
            raise ValueError(
                "A model passed to `keras_shardopt.prepare` must be trained with a `CrossShard`, to average the "
                f"gradients of the ranks. Received: optimizer={self.model.optimizer!r}. Use "
                "`model.compile(optimizer=keras_shardopt.CrossShard(...), ...)`."
            )

    @torch.compiler.disable
    def before_reading(self, together: Session | None) -> None:
        """Average weights that differ between ranks (`LocalSGD`), unless `together` is None (this rank runs alone)."""
        if self.ranks is not None and together is not None:
            self.step.before_reading()

    @torch.compiler.disable
    def begin_step(self) -> None:
        """Call the hook `TrainStep.before_step` of extensions, just before a training step."""
        self.step.before_step(self._begins_epoch)
        self._begins_epoch = False

    @torch.compiler.disable
    def start_equal(self) -> None:
        """Make the model's values equal on all ranks. If some differ, all take rank 0's. Raise if models differ."""
        assert self.ranks is not None
        cross_shards = self.cross_shards
        for cross_shard in cross_shards:
            cross_shard.peers.check(self.ranks)
            cross_shard.peers.check_parts()
        optimizers = optimizers_of(self.model)
        shared = [v for o in optimizers for v in getattr(o, "_shared_variables", o.variables)]
        # Include weights that were frozen after the build, so all ranks have the same list. If only some ranks froze a
        # weight, the first reduction of gradients raises an error.
        built = [v for o in optimizers if o.built for v in o._trainable_variables]
        trained = list({id(v): v for v in [*built, *self.model.trainable_variables]}.values())
        others = model_and_seed_state([v.value for v in trained])
        differing = self._differing([*trained, *shared], others)
        if differing and self.step.stopped_alike():  # an earlier `fit` failed before it averaged values, so average now
            self.before_reading(self)
            self.step.settle()
            differing = self._differing([*trained, *shared], others)
        elif not differing:
            self.step.started_equal()
        if differing:
            warn_of_unequal_start(differing)
            broadcast_from_rank_0(self.ranks, trained, shared)
        else:
            seed_per_rank(self.ranks.world, [])  # because the program may have set PyTorch's seed since the last `fit`
        plain = [o for o in optimizers if not cross_shards_in(o)]
        self._unused = [(o, int(o.iterations)) for o in plain]
        for cross_shard in cross_shards:
            # Skip the comparison that a `CrossShard` makes in its first update. That comparison would come after the
            # first forward pass, and would replace each rank's moving statistics by rank 0's.
            cross_shard.peers.started = self.ranks
        self.has_started = self._begins_epoch = True

    def _differing(self, variables: Sequence[Any], others: Sequence[Tensor]) -> list[str]:
        """Return the paths of variables that differ between ranks, and a text if any tensors in `others` differ."""
        values = [*[v.value for v in variables], *others]
        shapes = zlib.crc32(repr([(tuple(value.shape), value.dtype) for value in values]).encode())
        messages = announce("begins `fit` of a prepared model", shapes, joint_fingerprint(values))
        if all(each == messages[0] for each in messages):
            return []
        mine = (len(variables), shapes, fingerprints(values))
        everyones = gather_objects(mine, "compares the values of a prepared model")
        if any(each[:2] != everyones[0][:2] for each in everyones):
            return ["other variables"]  # `broadcast_from_rank_0` raises and names them
        prints = np.stack([each[2] for each in everyones])
        differs = (prints != prints[0]).any(axis=0)
        is_other = differs[len(variables) :].any()
        names = [v.path for v, each in zip(variables, differs) if each]
        return [*names, *(["non-trainable state (statistics, seeds)"] if is_other else [])]

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

    def exchange(self, phase: Phase, *message: int) -> list[list[int]]:
        """Send the ints `message` to all ranks. Return the ints of each rank. Raise ValueError if phases differ."""
        assert self.ranks is not None
        return announce(phase.value, *map(int, message))

    def takes_whole(self, *data: Any) -> bool:
        """Whether all ranks receive the same data (the arguments `data`), and each uses its rows of every batch."""
        return sharing_of(self.model).auto_shard and not self.splits_separate_part and not is_split(*data)

    @torch.compiler.disable
    def compare(self, is_whole: bool, data: Any = None, num_batches: int | None = None, is_marked: bool = True) -> None:
        """Raise ValueError if ranks need the same data but have different data. Warn if separate data is the same.

        Args:
            is_whole: whether this rank has the data of all ranks, not a separate part.
            data: the first rows; None if not available yet (a later call then compares them).
            num_batches: the number of batches of an epoch; None if unknown.
            is_marked: whether the data was divided explicitly, for example by `shard_data`, so no warning is needed.
        """
        assert self.call is not None
        length = 0 if num_batches is None else num_batches + 1
        messages = announce(f"begins: {self.call.value}", is_whole + 2 * length, 0 if data is None else checksum(data))
        check_kinds([bool(number % 2) for number, _ in messages])
        lengths, first_batches = [number // 2 for number, _ in messages], [found for _, found in messages]
        if is_whole:
            check_alike(lengths, first_batches)
        elif not is_marked and self.call is Phase.TRAIN_BATCH and len(set(first_batches)) == 1 and first_batches[0]:
            if not self._has_warned:
                warn_of_same_parts()
            self._has_warned = True

    def next_part(self, data: Any, phase: Phase, step: int, num_equal: int) -> Any:
        """Return this rank's rows of `data`, a batch that all ranks have loaded; None if `data` is None (none left).

        `step` is the index of the batch in the epoch. The next `num_equal` batches have the same number of rows.
        """
        assert self.ranks is not None
        num = 0 if data is None else int(num_rows(data))
        self._step = step
        self._unreported.add(num, fingerprint(data) if num else 0)
        self._send_rows(phase, num, True, num_equal)
        if not num:
            add_promised_steps(-1)
            return None
        self._rows = self.step.rows_of(num, self.ranks.num_replicas)
        self.step.fit_states(self._rows, self.ranks.replica_id)
        self.mine = self._rows[self.ranks.replica_id]
        return part_of_batch(data, self._rows, self.ranks.replica_id)

    def next_batch(self, data: Any, phase: Phase, num_equal: int = 0) -> Any:
        """Return `data`, this rank's batch. Without rows, return the last batch again, and count none of its rows.

        Return None if no rank has rows.
        """
        mine = 0 if data is None else int(num_rows(data))
        if mine:
            self._last_batch[phase] = data
        self._unreported.add(mine, 0)
        self._send_rows(phase, mine, False, num_equal)
        if not mine and not any(self._rows):
            add_promised_steps(-1)
            return None
        self.mine = mine
        return self._last_batch[phase]

    def _send_rows(self, phase: Phase, num: int, is_whole: bool, num_equal: int) -> None:
        """Send `num`, the rows of this rank's batch, unless an earlier exchange has covered this batch.

        Wait for the other ranks' numbers unless the step can begin without them. This exchange can also cover the next
        `num_equal` batches, because these certainly have `num` rows too.
        """
        self._phase, self._is_whole = phase, is_whole
        if self._unreported.take_promised():
            return
        reads = promised = 0
        if phase is not Phase.PREDICT_BATCH:
            trains = phase is Phase.TRAIN_BATCH
            reads = int(self.logs.are_read(trains))
            promised = (
                self._unreported.num_to_promise(num_equal, self.logs.seconds_without_readers(trains)) if num else 0
            )
        # Bit 0: this rank reads logs. Bit 1: it has a batch that it can repeat. Bits 2 to 6: the number of next batches
        # without communication. Higher bits: the checksum of the batches since ranks last communicated.
        flags = reads + 2 * (phase in self._last_batch) + 4 * promised + 4 * _MOST_PROMISED * self._unreported.mark
        self._pending = announce_async(phase.value, num, flags)
        add_promised_steps(1)
        if not num or not self._can_wait(phase):
            self.confirm()

    def _can_wait(self, phase: Phase) -> bool:
        """Whether a step can begin before other ranks' row counts arrive. Its forward pass must exchange nothing."""
        if self._waits is None:
            # `confirm` waits for the row counts. Usually `compute_loss` calls it. But a custom step may not call
            # `compute_loss`, and a compiled step must not contain `confirm`, so then call `confirm` before the step.
            is_plain = not self.model.jit_compile and not synchronized_statistics(self.model)
            tests_as_keras = self.model.__class__.test_step is keras.Model.test_step
            self._waits = is_plain and tests_as_keras and has_built_in_step(self.model)
        return self._waits and phase is not Phase.PREDICT_BATCH

    @torch.compiler.disable
    def confirm(self) -> None:
        """Receive the row counts of all ranks for the next batch. All raise ValueError if their batches differ."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        messages = pending()
        first = self._step + 1 - self._unreported.num_batches
        self._unreported.reported(min(flags // 4 % _MOST_PROMISED for _, flags in messages))
        self.shares_logs = any(flags % 2 for _, flags in messages)
        if self._is_whole:
            marks = [(num, flags // (4 * _MOST_PROMISED)) for num, flags in messages]
            check_batches(marks, self._step, first)
            return
        self._rows = rows = [num for num, _ in messages]
        if any(rows) and not all(flags // 2 % 2 for _, flags in messages):
            # A rank that has never had a row receives a batch of another rank, because its model needs an input.
            batch = self._broadcast_batch(self._last_batch.get(self._phase), rows)
            self._last_batch.setdefault(self._phase, batch)

    @torch.compiler.disable
    def rows(self) -> list[int]:
        """Return the number of rows of each rank in the next or running batch."""
        if not self._is_whole:
            self.confirm()
        return self._rows

    def all_rows(self) -> int | Callable[[], int]:
        """Return the total number of rows of the next or running batch, or a function that waits for the number."""
        if self._pending is None or self._is_whole:
            return sum(self._rows)
        return lambda: sum(self.rows())

    def begin_call(self) -> None:
        """Forget the optimizer and the stateful layers, because they can change before the next `fit` or `predict`."""
        self._optimizer_of_step = None
        if self._step_of_call is not None:
            self._step_of_call.begin_call()

    @contextlib.contextmanager
    def inner_call(self) -> Iterator[None]:
        """In the block, run a nested call, such as `evaluate` in a callback. Then restore the outer call's state."""
        self.confirm()
        self.begin_call()
        before = self.mine, self._rows, self._is_whole, self._phase, self.shares_logs, self._step
        unreported, self._unreported = self._unreported, _Unreported()
        self.mine = self._waits = None
        try:
            yield
        finally:
            self._pending = None
            self.begin_call()
            self.mine, self._rows, self._is_whole, self._phase, self.shares_logs, self._step = before
            self._unreported = unreported

    @torch.compiler.disable
    def logs_of_all(self, logs: Any) -> Any:
        """End the step of a batch. Return logs of all ranks if a rank reads logs. Otherwise repeat earlier logs."""
        add_promised_steps(-1)
        trains = self._phase is Phase.TRAIN_BATCH
        if not self.shares_logs:
            return self.logs.last(trains, logs)
        self.shares_logs = False
        metrics = metrics_of_all(self.model, self.ranks, lambda: pythonify_logs(self.model.get_metrics_result()))
        if not isinstance(logs, dict) or metrics.keys() != logs.keys():
            return self.mean_logs(logs)
        self.logs.show(trains, metrics)
        return metrics

    @torch.compiler.disable
    @torch.no_grad()
    def rows_of_all(self, outputs: Any, rows: Sequence[int]) -> Any:
        """Gather the outputs of all ranks for a batch, in the order of its rows. Rank i has `rows[i]` of the rows."""
        assert self.ranks is not None
        add_promised_steps(-1)  # so that the exchanges below check the calls of all ranks again
        mine = rows[self.ranks.replica_id]
        num_run = max(mine, 1)  # a rank without rows has run the model on one row
        tensors = [keras.ops.convert_to_tensor(leaf).detach() for leaf in keras.tree.flatten(outputs)]
        # An output may have several rows per row of the batch.
        factors = [
            tensor.shape[0] // num_run if tensor.dim() and not tensor.shape[0] % num_run else 0 for tensor in tensors
        ]
        kinds = [(tuple(t.shape[1:]), t.dtype, factor) for t, factor in zip(tensors, factors)]
        messages = self.exchange(Phase.PREDICTED, int(all(factors)), zlib.crc32(repr(kinds).encode()))
        if any(each != [1, messages[0][1]] for each in messages):
            raise ValueError(
                "The outputs of `predict_step` must have as many rows as the batch, so that ranks can gather the "
                f"outputs. Received: {num_run} rows, and outputs of shapes {[tuple(t.shape) for t in tensors]}. Use "
                "`keras_shardopt.prepare(model, gather=False)`. Each rank then predicts its rows alone."
            )
        # Send all tensors as bytes, because dtypes can differ. Pad each to the row count of the rank with most rows.
        sizes = [t[:1].numel() * t.element_size() * factor for t, factor in zip(tensors, factors)]
        parts = []
        for tensor, factor, size in zip(tensors, factors, sizes):
            part = _bytes(tensor[: mine * factor])
            parts.append(torch.nn.functional.pad(part, (0, size * max(rows) - part.numel())))
        (everyones,) = self.ranks.all_gather([torch.cat(parts)])
        columns = everyones.view(len(rows), -1).split([size * max(rows) for size in sizes], dim=1)
        found = []
        for tensor, size, column in zip(tensors, sizes, columns):
            joined = torch.cat([part[: size * num] for part, num in zip(column, rows)])
            found.append(joined.view(tensor.dtype).view(-1, *tensor.shape[1:]))
        return keras.tree.pack_sequence_as(outputs, found)

    @torch.compiler.disable
    def mean_logs(self, logs: Any) -> Any:
        """Return logs that are not metrics, averaged over ranks. A rank's weight is its row count in the last batch."""
        assert self.ranks is not None
        if not isinstance(logs, dict):
            return logs
        floats = {name: value for name, value in pythonify_logs(logs).items() if isinstance(value, float)}
        # A rank without rows may have NaN, so send 0.
        values = [value * self.last_rows if self.last_rows else 0.0 for value in floats.values()]
        mine = [float(self.last_rows), *values]
        device = self.model.trainable_variables[0].value.device
        (sums,) = self.ranks.all_reduce([torch.tensor(mine, dtype=torch.float64, device=device)], "sum")
        rows, *totals = sums.tolist()
        return {**logs, **{name: total / rows for name, total in zip(floats, totals)}} if rows else logs

    def end_epoch(self) -> None:
        """End an epoch on all ranks. All ranks raise ValueError if they had different batches."""
        messages = self.exchange(Phase.END_OF_EPOCH, self._unreported.num_batches, self._unreported.mark)
        nums = [num for num, _ in messages]
        if len(set(nums)) > 1:
            raise ValueError(
                f"All ranks must process the same number of batches in an epoch. Received: {nums} batches, by rank, "
                "since the last comparison. Decisions to stop training or evaluation must depend on the logs, because "
                "these are equal on all ranks."
            )
        check_batches(
            [(num, mark) for num, mark in messages], self._step, self._step + 1 - self._unreported.num_batches
        )
        self._unreported.reported(0)

    def begin_epoch(self) -> None:
        """Make ranks compare the first batch of the new epoch, even if the last epoch has ended early."""
        self._unreported.reported(_NOTHING_YET)

    def any_batch(self, data: Any) -> Any:
        """Return `data`, this rank's batch; if it is None, the batch of another rank."""
        has_data = [has for has, _ in self.exchange(Phase.BUILD, data is not None)]
        if not any(has_data):
            raise ValueError("`x` has no batch on any rank. Pass at least one batch on one rank.")
        return data if all(has_data) else self._broadcast_batch(data, has_data)

    def forget_batches(self) -> None:
        """Forget the last batches, because the next call may have batches of another structure."""
        self._last_batch.clear()
        self.mine = self._pending = self._waits = None

    def _broadcast_batch(self, data: Any, owners: Sequence[int]) -> Any:
        """Return, on all ranks, `data` of the first rank that has a nonzero entry in `owners`."""
        assert self.ranks is not None
        return self.ranks.broadcast_object(data, next(rank for rank, has in enumerate(owners) if has))


_MOST_PROMISED = 32
"""One more than the largest number of successive batches without communication, which is sent in 5 bits."""

_NOTHING_YET = -1
"""The number of batches without communication when an epoch begins; negative, so ranks compare the first batches."""


class _Unreported:
    """Counts the batches since ranks last communicated, and the next batches for which they need not communicate."""

    def __init__(self) -> None:
        self.num_batches = 0
        self.mark = 0
        """A checksum of the row counts and values of the batches since ranks last communicated."""
        self._num_promised = 0
        self._num_last = _NOTHING_YET
        self._since = time.monotonic()

    def add(self, num_rows: int, print_: int) -> None:
        """Add a batch with checksum `print_`. If ranks have different data, pass 0: the batch is then only counted."""
        self.num_batches += 1
        if print_:
            self.mark = zlib.crc32(repr((num_rows, print_)).encode(), self.mark)

    def take_promised(self) -> bool:
        """Whether ranks have agreed to run this batch without communication. If so, subtract it from these batches."""
        if not self._num_promised:
            return False
        self._num_promised -= 1
        return True

    def num_to_promise(self, num_equal: int, seconds: float) -> int:
        """Return for how many batches to skip communication: at most `num_equal`, ending within `seconds`."""
        if num_equal <= 0 or not can_promise_steps():
            return 0
        now = time.monotonic()
        of_one, self._since = (now - self._since) / self.num_batches, now
        wanted = min(num_equal, 4 * self._num_last + 3, int(seconds / max(of_one, 1e-6)), _MOST_PROMISED - 1)
        return max(wanted, 0)

    def reported(self, num_promised: int) -> None:
        """Clear the counts after ranks have communicated. The next `num_promised` batches need no communication."""
        self.num_batches = self.mark = 0
        before, self._num_promised, self._num_last = self._num_promised, max(num_promised, 0), num_promised
        add_promised_steps(self._num_promised - before)


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


@torch.no_grad()
def metrics_of_all(model: Any, ranks: TorchProcessGroup, result: Callable[[], Any]) -> Any:
    """Aggregate metric variables over ranks, return `result()`, and restore this rank's values of the variables."""
    mine = [v.value for v in model.metrics_variables]
    before = [tensor.clone() for tensor in mine]
    for op in ("sum", "mean"):
        chosen = [v.value for v in model.metrics_variables if v.aggregation == op]
        for tensor, value in zip(chosen, ranks.all_reduce(chosen, op)):
            tensor.copy_(value)
    found = result()
    for tensor, value in zip(mine, before):
        tensor.copy_(value)
    return found
