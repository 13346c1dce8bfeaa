"""The common part of the epoch iterators of JAX and TensorFlow: processes agree on their data and batches.

Private names of Keras touched here (a test checks that each exists):
    `keras.src.trainers.epoch_iterator.EpochIterator` - the base class of the backends' iterators.
    `EpochIterator.__iter__`, `__next__`, `reset` - start an epoch, load batches, and prepare the next epoch.
    `EpochIterator.data_adapter`, `_num_batches` - the source of batches, and the number of batches.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from keras.src.trainers.epoch_iterator import EpochIterator

from keras_shardopt.data.shared_draws import SharedDraws
from keras_shardopt.data.split_data import is_from_shard_data
from keras_shardopt.data.whole_batches import checksum, fingerprint, first_rows
from keras_shardopt.fit.calls import num_rows
from keras_shardopt.fit.sharing import check_alike, check_batches, check_kinds, sharing_of, warn_of_same_parts

NEXT_BATCH = "takes the next batch of a prepared model"


class SharedEpoch(EpochIterator):
    """A base class for epoch iterators: all processes load the same batches, or each loads batches of separate data.

    On PyTorch, `SharedBatches` (`fit/torch/shared_batches.py`) makes these checks.
    """

    _gather_objects: ClassVar[Callable[..., list[Any]]]
    """The backend's function that returns the objects of all processes."""

    _announce: ClassVar[Callable[..., list[int]]]
    """The backend's function that announces the next call, and returns the numbers of all processes."""

    _model: Any
    _trains: bool
    """Whether the batches are for training."""

    _is_whole: bool
    """Whether all processes load the same batches, and each uses its rows of every batch."""

    _is_separate: bool
    """Whether each process loads batches of separate data, and all take as many steps as the longest."""

    _is_compared = False
    """Whether processes have compared their first batches."""

    _draws: SharedDraws

    _has_arrays = False
    """Whether the data is in arrays, whose order is drawn once per epoch: when the first batch is read."""

    def __iter__(self) -> Any:
        if self._trains:
            self._start_equal()  # compare again: callbacks may have changed values on one process only
        self._draws.forget()
        return super().__iter__()

    def __next__(self) -> Any:
        if self._has_arrays:
            return super().__next__()
        with self._draws.drawing():
            return super().__next__()

    def reset(self) -> None:
        """Prepare the next epoch, with batches drawn in the same order on all processes."""
        with self._draws.drawing(not self._has_arrays):
            super().reset()
        self._agree_on_length()

    def _start_equal(self) -> None:
        """Call `start_equal` with the values of the model. Each backend implements it."""
        raise NotImplementedError

    def _check_kind(self, data: Sequence[Any]) -> None:
        """Raise ValueError if only some processes have all rows. With `auto_shard=False`, warn if all have the same."""
        is_meant = not self._trains or self._model is None or sharing_of(self._model).auto_shard
        mine = self._is_whole, 0 if is_meant or is_from_shard_data(*data) else checksum(first_rows(data[:2]))
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
