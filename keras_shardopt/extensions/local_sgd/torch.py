"""Weights of ranks that train apart: each goes on from its own, and readers get the mean of all."""

from __future__ import annotations

from typing import Any

from keras_shardopt.backends.models import buffers_of
from keras_shardopt.extensions.local_sgd.looks import begin_anew, local_updates_in, resume_apart, show_mean
from keras_shardopt.fit.torch.own_state import average
from keras_shardopt.fit.torch.step import TrainStep, register


class RoundsStep(TrainStep):
    """A step of ranks of which each goes on from its own weights."""

    def before_step(self, begins_epoch: bool) -> None:
        """See `TrainStep.before_step`."""
        resume_apart(self._session.reducers, begins_epoch)

    def before_look(self) -> None:
        """Puts the mean of all weights in place of them."""
        show_mean(self._session.reducers)

    def weights_set(self) -> None:
        """Begins a round."""
        begin_anew(self._session.reducers)

    def end_epoch(self, is_call: bool) -> None:
        """Moving statistics are joined in rounds. After `train_on_batch` only where somebody looks."""
        if is_call:
            self._session.look(self._session)
        average(buffers_of(self._session.model), self._session.ranks)

    def settle(self) -> None:
        """See `TrainStep.settle`: what is shown is the mean."""

    def progress(self) -> list[tuple[int, bool]]:
        """See `TrainStep.progress`, in a round."""
        return [(local.num_updates, local.are_apart) for local in local_updates_in(self._session.reducers)]


def _made(session: Any) -> TrainStep | None:
    return RoundsStep(session) if local_updates_in(session.reducers) else None


register(_made)
