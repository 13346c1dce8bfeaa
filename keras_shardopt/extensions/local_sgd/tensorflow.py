"""Steps of replicas that train apart under a strategy: each updates its own copies of the variables."""

from __future__ import annotations

from typing import Any

from keras_shardopt.extensions.local_sgd.looks import watch_apart
from keras_shardopt.fit.tensorflow.step import TrainStep, register


class RoundsStep(TrainStep):
    """A step of replicas of which each continues from its own weights."""

    averages_statistics = False

    def prepare(self) -> None:
        """See `TrainStep.prepare`."""
        watch_apart(self.model)


def _made(model: Any, reducers: list[Any]) -> TrainStep | None:
    is_apart = any(reducer.local_updates is not None for reducer in reducers)
    return RoundsStep(model, reducers) if is_apart else None


register(_made)
