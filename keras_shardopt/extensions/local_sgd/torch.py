"""Local SGD steps on PyTorch: each rank continues from its own weights, and readers get the mean."""

from __future__ import annotations

from keras_shardopt.backends.models import buffers_of
from keras_shardopt.extensions.local_sgd.looks import local_updates_in, resume_apart
from keras_shardopt.fit.calls import before_look
from keras_shardopt.fit.torch.own_state import average
from keras_shardopt.fit.torch.step import TrainStep


class RoundsStep(TrainStep):
    """A local SGD step: each rank continues from its own weights."""

    def before_step(self, begins_epoch: bool) -> None:
        """See `TrainStep.before_step`."""
        resume_apart(self._session.reducers, begins_epoch)

    def before_look(self) -> None:
        """Put the mean weights in place of the weights."""
        before_look(self._session.reducers)

    def weights_set(self) -> None:
        """Begin a new round if weights, equal on all ranks, were set during a round."""
        for local in local_updates_in(self._session.reducers):
            if local.are_apart:
                local.begin_anew()

    def end_epoch(self, is_call: bool) -> None:
        """Show the mean (not after `train_on_batch`) and average buffers. Rounds average moving statistics."""
        if is_call:
            self._session.look(self._session)
        average(buffers_of(self._session.model), self._session.ranks)

    def settle(self) -> None:
        """Do nothing: `before_look` has put the mean in place."""

    def progress(self) -> list[tuple[int, bool]]:
        """Return update counts of local SGD, and whether the ranks' weights differ."""
        return [(local.num_updates, local.are_apart) for local in local_updates_in(self._session.reducers)]
