"""Local SGD steps on PyTorch."""

from __future__ import annotations

from keras_shardopt.backends.models import buffers_of
from keras_shardopt.extensions.local_sgd.mixins import resume_local
from keras_shardopt.extensions.local_sgd.stage import LocalUpdates
from keras_shardopt.fit.calls import before_reading
from keras_shardopt.fit.torch.own_state import average
from keras_shardopt.fit.torch.step import TrainStep


class LocalStep(TrainStep):
    """A step in which each rank continues from its own weights."""

    def before_step(self, begins_epoch: bool) -> None:
        """Restore this rank's weights, if evaluation or saving has replaced them by the mean. See `resume_local`."""
        resume_local(self._session.cross_shards, begins_epoch)

    def after_loss(self) -> None:
        """Undo changes of moving statistics in a step without rows, because a sync step will average the statistics."""
        self.restore_statistics()

    def before_reading(self) -> None:
        """Assign the mean over ranks to the weights."""
        before_reading(self._session.cross_shards)

    def started_equal(self) -> None:
        """Continue from weights that other code has set. They must be equal on all ranks."""
        for local in LocalUpdates.found_in(self._session.cross_shards):
            if local.weights_differ:
                local.sync.restart()

    def end_epoch(self, is_call: bool) -> None:
        """Average the buffers of `torch.nn` modules over ranks. In `fit` (`is_call`), also assign mean weights."""
        if is_call:
            self._session.before_reading()
        average(buffers_of(self._session.model), self._session.ranks)

    def settle(self) -> None:
        """Do nothing, because `before_reading` has already assigned the mean."""

    def progress(self) -> list[tuple[int, bool]]:
        """Return the number of updates, and whether the ranks' weights differ."""
        found = LocalUpdates.found_in(self._session.cross_shards)
        return [(local.schedule.num_updates, local.weights_differ) for local in found]
