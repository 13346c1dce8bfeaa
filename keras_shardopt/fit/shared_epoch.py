"""The common part of the epoch iterators of JAX and TensorFlow: processes agree on their data and batches.

Private names of Keras touched here (a test checks that each exists):
    `EpochIterator.data_adapter`, `_num_batches` - the source of batches, and the number of batches.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from keras_shardopt.data.shared_draws import SharedDraws
from keras_shardopt.data.split_data import is_from_shard_data
from keras_shardopt.data.whole_batches import checksum, fingerprint, first_rows
from keras_shardopt.fit.calls import num_rows
from keras_shardopt.fit.sharing import check_alike, check_batches, check_kinds, warn_of_same_parts

NEXT_BATCH = "takes the next batch of a prepared model"


class SharedEpoch:
    """A base class for epoch iterators: all processes load the same batches, or each loads batches of separate data.

    On PyTorch, `SharedBatches` (`fit/torch/shared_batches.py`) makes these checks.
    """

    data_adapter: Any
    _num_batches: int | None

    _gather_objects: ClassVar[Callable[..., list[Any]]]
    """The backend's function that returns the objects of all processes."""

    _announce: ClassVar[Callable[..., list[int]]]
    """The backend's function that announces the next call, and returns the numbers of all processes."""

    _is_whole: bool
    """Whether all processes load the same batches, and each uses its rows of every batch."""

    _is_separate: bool
    """Whether each process loads batches of separate data, and all take as many steps as the longest."""

    _is_compared = False
    """Whether processes have compared their first batches."""

    _draws: SharedDraws

    def _check_kind(self, data: Sequence[Any], is_meant: bool) -> None:
        """Raise ValueError if only some processes have all rows. Warn if all have equal rows.

        There is no warning for data from `shard_data`, or with `is_meant`, because equal rows are then no mistake.
        """
        is_meant = is_meant or self._is_whole or is_from_shard_data(*data)
        mine = self._is_whole, 0 if is_meant else checksum(first_rows(data[:2]))
        facts = self._gather_objects(mine, "starts on data")
        check_kinds([is_whole for is_whole, _ in facts])
        if facts[0][1] and len(set(facts)) == 1:
            warn_of_same_parts()

    def _agree_on_length(self) -> None:
        if self._is_separate:
            lengths = self._gather_objects(self.data_adapter.num_batches, "starts an epoch of a prepared model")
            self._num_batches = None if None in lengths else max(lengths)

    def _whole_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches that every process loads whole. Raise ValueError if batches of processes differ."""
        for step in itertools.count():
            with self._draws.drawing():
                batch = next(batches, None)
            if not self._is_compared:
                self._is_compared = True
                mine = self.data_adapter.num_batches, 0 if batch is None else checksum(batch)
                lengths, first_batches = zip(*self._gather_objects(mine, "compares its first batch"))
                check_alike(lengths, first_batches)
            mine = (0, 0) if batch is None else (int(num_rows(batch)), fingerprint(batch))
            prints = self._announce(NEXT_BATCH, zlib.crc32(repr(mine).encode()) >> 1)  # JAX sends it as int32
            if len(set(prints)) > 1:
                check_batches(self._gather_objects(mine, "compares a batch"), step)
            if not mine[0]:
                return
            yield batch
