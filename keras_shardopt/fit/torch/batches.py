"""The batches of a rank (a process of PyTorch): its rows of batches that all ranks load, or batches of separate data.

In both cases, all ranks take the same number of steps.

Private names of Keras touched here (a test checks that each exists):
    `keras.src.backend.torch.trainer.TorchEpochIterator` - the iterator of `fit` and `evaluate`, created in a method of
        the model.
    `EpochIterator.__iter__`, `__next__`, `reset` - starts an epoch; returns the indices of the first and last step of
        an execution, and the batches; prepares the next epoch.
    `EpochIterator.data_adapter`, `_num_batches`, `_steps_seen` - the source of batches, the number of batches, and the
        number of past batches.
    `ArrayDataAdapter` of `keras.src.trainers.data_adapters.array_data_adapter` - a source that draws random numbers
        only for the order of rows, at the start and the end of an epoch.
    `EpochIterator._get_iterator` - the `DataLoader` of the next pass through the data.
    `epoch_iterator` and `epoch` in the frame of `fit` - its iterator, and the number of the running epoch.
"""

from __future__ import annotations

import contextlib
from typing import Any

import keras
from keras.src.backend.torch import trainer as torch_trainer
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

from keras_shardopt.backends.keras_callers import caller_instance, running_local
from keras_shardopt.backends.phases import timed
from keras_shardopt.data.shared_draws import SharedDraws, wait_for_batch_order
from keras_shardopt.data.split_data import is_from_shard_data
from keras_shardopt.data.torch_loader import set_epoch
from keras_shardopt.data.whole_batches import first_rows
from keras_shardopt.fit.sharing import takes_whole
from keras_shardopt.fit.torch.session import SESSION, Session, running
from keras_shardopt.fit.torch.shared_batches import Phase

KerasEpochIterator = torch_trainer.TorchEpochIterator


class EpochIterator(KerasEpochIterator):  # type: ignore[misc, valid-type]
    """Yields this rank's batches. A rank that has no batch left repeats its last batch, without counting the rows."""

    def __init__(self, x: Any, y: Any = None, sample_weight: Any = None, *args: Any, **kwargs: Any) -> None:
        # Keras does not pass the model. A callback can run another model than the running `fit`, so find the caller.
        self._model = caller_instance()
        session = self._session()
        is_split = session is not None and session.splits_separate_part
        self._is_whole = session is not None and takes_whole(self._model, (x, y, sample_weight), is_split)
        self._is_marked = session is not None and (is_split or is_from_shard_data(x, y, sample_weight))
        self._shuffle = kwargs.get("shuffle", False)
        self._draws = SharedDraws(self._is_whole)
        comparing = None if session is None or session.call is Phase.PREDICT_BATCH else session.batches
        first = None if comparing is None else first_rows((x, y))
        self._is_compared = first is not None
        if comparing is not None and first is None:
            comparing.compare(self._is_whole)  # before random draws, in which only ranks with the whole data take part
        with self._draws.drawing(hasattr(x, "__next__")):  # Keras reads the first batches of a generator here
            super().__init__(x, y, sample_weight, *args, **kwargs)
        if comparing is not None and first is not None:
            comparing.compare(self._is_whole, first, self.data_adapter.num_batches, self._is_marked)
        if self._is_whole:
            wait_for_batch_order(self.data_adapter)
        # Keras moves whole batches of arrays to its device, but ranks compare some values of each batch on the host. So
        # keep batches on the host, and move only this rank's rows.
        on_device = keras.ops.zeros(()).device.type != "cpu"
        self._divides_on_host = self._is_whole and on_device and isinstance(self.data_adapter, ArrayDataAdapter)

    def _session(self) -> Session | None:
        """Return the state that all ranks share about the running call, or None if this rank runs alone."""
        session = running.get()
        return None if session is None or session.model is not self._model or session.ranks is None else session

    def reset(self) -> None:
        """Prepare the next epoch, with the same random draws on all ranks."""
        with self._draws.drawing(not isinstance(self.data_adapter, ArrayDataAdapter)):
            super().reset()

    def __iter__(self) -> Any:
        self._has_ended = False
        self._has_begun = False
        self._step = -1
        session = self._session()
        if session is not None and session.call is Phase.TRAIN_BATCH:
            session.has_started = False  # compare values again: callbacks may have changed some on one rank only
        if session is not None:
            session.batches.begin_epoch()
        self._draws.forget()
        return super().__iter__()

    def _pull(self) -> Any:
        """Return the next batch of this rank's data, from Keras's `__next__`."""
        is_first, self._has_begun = not self._has_begun, True
        self._is_first = is_first
        if not isinstance(self.data_adapter, ArrayDataAdapter):
            draws = True
        else:
            is_last = self._steps_seen >= self.data_adapter.num_batches
            if is_last:
                self._draws.forget()  # take rank 0's random state again, because a callback may have drawn numbers
            draws = self._shuffle == "batch" or (bool(self._shuffle) and (is_first or is_last))
        with timed("input"), self._draws.drawing(draws), self._on_host():
            return super().__next__()

    def _on_host(self) -> contextlib.AbstractContextManager[Any]:
        return keras.device("cpu") if self._divides_on_host else contextlib.nullcontext()

    def _get_iterator(self) -> Any:
        """Return the `DataLoader`. In `fit`, first call `set_epoch` of its samplers with the number of the epoch."""
        loader = super()._get_iterator()
        if SESSION in vars(self._model) and running_local("fit", "epoch_iterator") is self:
            epoch = running_local("fit", "epoch")  # None while `fit` builds the model
            if epoch is not None and self._is_first:
                set_epoch(loader, epoch)
            elif epoch is not None and self.steps_per_epoch:  # a new pass through the data, in the middle of an epoch
                set_epoch(loader, epoch + 1)
        return loader

    @property
    def _is_sized(self) -> bool:
        """Whether the number of rows of each batch is known before the epoch."""
        return isinstance(self.data_adapter, ArrayDataAdapter) and not self.steps_per_epoch

    def _num_equal(self) -> int:
        """Return how many of the next batches certainly have the same number of rows as the present batch."""
        if not self._is_sized:
            return 0
        return int(self.data_adapter.num_batches - self.data_adapter.has_partial_batch - self._step - 1)

    def first_batch(self) -> Any:
        """Return the first batch of an epoch, to build the model from it; None if the epoch has no batch."""
        try:
            return iter(self)._pull()[2][0]
        except StopIteration:
            return None

    def __next__(self) -> Any:
        session = self._session()
        if session is None or session.call is None:
            return self._pull()
        phase = session.call
        if phase is Phase.PREDICT_BATCH and not self._is_whole:
            return self._pull()
        batches = [None]
        if not self._has_ended:
            try:
                self._step, _, batches = self._pull()
            except StopIteration:
                self._has_ended = True
        if self._has_ended:
            self._step += 1
            if self._is_whole and self._is_sized and phase is not Phase.PREDICT_BATCH:
                raise StopIteration  # do not communicate: `end_epoch` compares the numbers of batches of all ranks
        if not self._is_compared:
            self._is_compared = True
            session.batches.compare(self._is_whole, batches[0], self.data_adapter.num_batches, self._is_marked)
        if self._is_whole:
            data = session.batches.next_part(batches[0], phase, self._step, self._num_equal())
            if self._divides_on_host:
                data = keras.tree.map_structure(keras.ops.convert_to_tensor, data)  # move to Keras's device
        else:
            data = session.batches.next_batch(batches[0], phase, self._num_equal())
        if data is None:
            raise StopIteration
        return self._step, self._step, [data]
