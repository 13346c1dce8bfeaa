"""Local SGD steps on TensorFlow."""

from __future__ import annotations

from keras_shardopt.backends.models import mix_in
from keras_shardopt.extensions.local_sgd.mixins import ResumesLocal, ShowsMean
from keras_shardopt.fit.tensorflow.step import TrainStep


class LocalStep(TrainStep):
    """A step in which each replica of the strategy updates its own copy of each variable."""

    averages_statistics = False

    def prepare(self) -> None:
        """Give methods that read weights the mean over replicas, and training steps each replica's own weights."""
        mix_in(self.model, ShowsMean)
        mix_in(self.model, ResumesLocal)
