"""The batches of all ranks (processes) in one call of `fit`, `evaluate` or `predict`, and what ranks agree on for each.

Before ranks exchange tensors, they compare their next actions, such as a training step. If actions differ, all ranks
raise an error. To save time, ranks agree on a number of next batches with equal row counts, and skip the comparison for
these. The next comparison includes a checksum of the skipped batches.
"""

from __future__ import annotations

import enum
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import torch

from keras_shardopt.backends.models import has_built_in_step
from keras_shardopt.backends.torch.process_group import (
    add_promised_steps,
    announce,
    announce_async,
    can_promise_steps,
)
from keras_shardopt.data.whole_batches import checksum, fingerprint, part_of_batch
from keras_shardopt.fit.batch_normalization import synchronized_statistics
from keras_shardopt.fit.calls import num_rows
from keras_shardopt.fit.sharing import check_alike, check_batches, check_kinds, warn_of_same_parts


class Phase(enum.Enum):
    """The actions that ranks compare before they exchange tensors. Error messages contain these texts."""

    BUILD = "builds a prepared model"
    TRAIN_BATCH = "trains a prepared model"
    TEST_BATCH = "evaluates a prepared model (call `evaluate` on all ranks: each gets the result over all ranks)"
    PREDICT_BATCH = "predicts with a prepared model (with `prepare(model, gather=False)`, each rank predicts alone)"
    PREDICTED = "gathers predictions"
    END_OF_EPOCH = "ends an epoch of a prepared model"
    END_OF_FIT = "leaves `fit` of a prepared model"


def exchange(phase: Phase, *message: int) -> list[list[int]]:
    """Send the ints `message` to all ranks. Return the ints of each rank. Raise ValueError if phases differ."""
    return announce(phase.value, *map(int, message))


class SharedBatches:
    """The batches of one call. A call inside another, such as a validation, has an object of its own.

    Args:
        session: the `Session` of the model.
        last_batches: the last batch of this rank in each phase, shared by all calls inside one `fit`.
    """

    def __init__(self, session: Any, last_batches: dict[Phase, Any]) -> None:
        self._session = session
        self._last_batches = last_batches
        self.mine: int | None = None
        """The number of rows of this rank in the next batch; None if the step does not involve the other ranks."""
        self._rows: list[int] = []
        """The number of rows of each rank in the next batch; outdated until `confirm` has received the numbers."""
        self.shares_logs = False
        """Whether some rank reads the logs of the next batch. Then all ranks must average these logs."""
        self.phase = Phase.TRAIN_BATCH
        """The phase of the next batch."""
        self._pending: Callable[[], list[list[int]]] | None = None
        """A function that waits for all ranks' messages about the next batch, such as its row counts; or None."""
        self._is_whole = False
        """Whether all ranks have the whole next batch, and each takes its rows, so all row counts are known."""
        self._step = 0
        """The index of the next batch in the epoch, if `_is_whole`."""
        self._waits: bool | None = None
        """Whether a step can begin before the other ranks' row counts arrive; None until `_can_wait` computes this."""
        self._unreported = _Unreported()

    @torch.compiler.disable
    def compare(self, is_whole: bool, data: Any = None, num_batches: int | None = None, is_marked: bool = True) -> None:
        """Raise ValueError if ranks need the same data but have different data. Warn if separate data is the same.

        Args:
            is_whole: whether this rank has the data of all ranks, not a separate part.
            data: the first rows; None if not available yet (a later call then compares them).
            num_batches: the number of batches of an epoch; None if unknown.
            is_marked: whether the data was divided explicitly, for example by `shard_data`, so no warning is needed.
        """
        call = self._session.call
        length = 0 if num_batches is None else num_batches + 1
        messages = announce(f"begins: {call.value}", is_whole + 2 * length, 0 if data is None else checksum(data))
        check_kinds([bool(number % 2) for number, _ in messages])
        lengths, first_batches = [number // 2 for number, _ in messages], [found for _, found in messages]
        if is_whole:
            check_alike(lengths, first_batches)
        elif not is_marked and call is Phase.TRAIN_BATCH and len(set(first_batches)) == 1 and first_batches[0]:
            if not self._session.has_warned:
                warn_of_same_parts()
            self._session.has_warned = True

    def next_part(self, data: Any, phase: Phase, step: int, num_equal: int) -> Any:
        """Return this rank's rows of `data`, a batch that all ranks have loaded; None if `data` is None (none left).

        `step` is the index of the batch in the epoch. The next `num_equal` batches have the same number of rows.
        """
        num = 0 if data is None else int(num_rows(data))
        self._step = step
        self._unreported.add(num, fingerprint(data) if num else 0)
        self._send_rows(phase, num, True, num_equal)
        if not num:
            self.end_step()
            return None
        ranks = self._session.ranks
        self._rows = self._session.step.rows_of(num, ranks.num_replicas)
        self._session.step.fit_states(self._rows, ranks.replica_id)
        self.mine = self._rows[ranks.replica_id]
        return part_of_batch(data, self._rows, ranks.replica_id)

    def next_batch(self, data: Any, phase: Phase, num_equal: int = 0) -> Any:
        """Return `data`, this rank's batch. Without rows, return the last batch again, and count none of its rows.

        Return None if no rank has rows.
        """
        mine = 0 if data is None else int(num_rows(data))
        if mine:
            self._last_batches[phase] = data
        self._unreported.add(mine, 0)
        self._send_rows(phase, mine, False, num_equal)
        if not mine and not any(self._rows):
            self.end_step()
            return None
        self.mine = mine
        return self._last_batches[phase]

    def _send_rows(self, phase: Phase, num: int, is_whole: bool, num_equal: int) -> None:
        """Send `num`, the rows of this rank's batch, unless an earlier exchange has covered this batch.

        Wait for the other ranks' numbers unless the step can begin without them. This exchange can also cover the next
        `num_equal` batches, because these certainly have `num` rows too.
        """
        self.phase, self._is_whole = phase, is_whole
        if self._unreported.take_promised():
            return
        reads, promised = False, 0
        if phase is not Phase.PREDICT_BATCH:
            logs, trains = self._session.logs, phase is Phase.TRAIN_BATCH
            reads = logs.are_read(trains)
            if num:
                promised = self._unreported.num_to_promise(num_equal, logs.seconds_without_readers(trains))
        mine = _Message(num, reads, phase in self._last_batches, promised, self._unreported.mark)
        self._pending = announce_async(phase.value, *mine.packed())
        add_promised_steps(1)
        if not num or not self._can_wait(phase):
            self.confirm()

    def _can_wait(self, phase: Phase) -> bool:
        """Whether a step can begin before other ranks' row counts arrive. Its forward pass must exchange nothing."""
        if phase is Phase.PREDICT_BATCH:
            return False
        if self._waits is None:
            model = self._session.model
            # `confirm` waits for the row counts. Usually `compute_loss` calls it. But a custom step may not call
            # `compute_loss`, and a compiled step must not contain `confirm`, so then call `confirm` before the step.
            is_plain = not model.jit_compile and not synchronized_statistics(model)
            tests_as_keras = model.__class__.test_step is keras.Model.test_step
            self._waits = is_plain and tests_as_keras and has_built_in_step(model)
        return self._waits

    @torch.compiler.disable
    def confirm(self) -> None:
        """Receive the row counts of all ranks for the next batch. All raise ValueError if their batches differ."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        messages = [_Message.unpacked(num, flags) for num, flags in pending()]
        first = self._step + 1 - self._unreported.num_batches
        self._unreported.reported(min(each.num_promised for each in messages))
        self.shares_logs = any(each.reads_logs for each in messages)
        if self._is_whole:
            check_batches([(each.num_rows, each.mark) for each in messages], self._step, first)
            return
        self._rows = rows = [each.num_rows for each in messages]
        if any(rows) and not all(each.can_repeat for each in messages):
            # A rank that has never had a row receives a batch of another rank, because its model needs an input.
            batch = self._broadcast_batch(self._last_batches.get(self.phase), rows)
            self._last_batches.setdefault(self.phase, batch)

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

    def end_step(self) -> None:
        """End the step of a batch that ranks have announced. Then exchanges check the calls of all ranks again."""
        add_promised_steps(-1)

    def end_epoch(self) -> None:
        """End an epoch on all ranks. All ranks raise ValueError if they had different batches."""
        messages = exchange(Phase.END_OF_EPOCH, self._unreported.num_batches, self._unreported.mark)
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
        has_data = [has for has, _ in exchange(Phase.BUILD, data is not None)]
        if not any(has_data):
            raise ValueError("`x` has no batch on any rank. Pass at least one batch on one rank.")
        return data if all(has_data) else self._broadcast_batch(data, has_data)

    def _broadcast_batch(self, data: Any, owners: Sequence[int]) -> Any:
        """Return, on all ranks, `data` of the first rank that has a nonzero entry in `owners`."""
        return self._session.ranks.broadcast_object(data, next(rank for rank, has in enumerate(owners) if has))


_MOST_PROMISED = 32
"""The number of values that fit in the 5 bits of a promise. A rank promises at most one batch less."""

_NOTHING_YET = -1
"""The number of batches without communication when an epoch begins; negative, so ranks compare the first batches."""


class _Message(NamedTuple):
    """The message of a rank about its next batch. Ranks send it as two ints."""

    num_rows: int
    reads_logs: bool
    can_repeat: bool
    """Whether the rank has had a batch in this phase, to run it again in place of a batch without rows."""
    num_promised: int
    """The number of batches after this one that need no communication."""
    mark: int
    """The checksum of the batches since ranks last communicated."""

    def packed(self) -> tuple[int, int]:
        flags = self.reads_logs + 2 * self.can_repeat + 4 * self.num_promised
        return self.num_rows, flags + 4 * _MOST_PROMISED * self.mark

    @classmethod
    def unpacked(cls, num_rows: int, flags: int) -> _Message:
        mark, flags = divmod(flags, 4 * _MOST_PROMISED)
        return cls(num_rows, bool(flags % 2), bool(flags // 2 % 2), flags // 4, mark)


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
        """Return whether ranks have agreed to run this batch without communication. If so, count it as run."""
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
        # Begin with none, then 3, 15 and 31: ranks with other data are noticed early.
        wanted = min(num_equal, 4 * self._num_last + 3, int(seconds / max(of_one, 1e-6)), _MOST_PROMISED - 1)
        return max(wanted, 0)

    def reported(self, num_promised: int) -> None:
        """Clear the counts after ranks have communicated. The next `num_promised` batches need no communication."""
        self.num_batches = self.mark = 0
        before, self._num_promised, self._num_last = self._num_promised, max(num_promised, 0), num_promised
        add_promised_steps(self._num_promised - before)
