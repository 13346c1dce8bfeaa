"""Local SGD steps on TensorFlow: each replica of a strategy updates its own copies of the variables."""

from __future__ import annotations

from keras_shardopt.backends.models import mix_in
from keras_shardopt.extensions.local_sgd.looks import ShowsMean, TrainsApart
from keras_shardopt.fit.tensorflow.step import TrainStep


class RoundsStep(TrainStep):
    """A local SGD step: each replica continues from its own weights."""

    averages_statistics = False

    def prepare(self) -> None:
        """See `TrainStep.prepare`."""
        mix_in(self.model, ShowsMean)
        mix_in(self.model, TrainsApart)
