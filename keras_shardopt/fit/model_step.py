"""What the training steps of JAX and TensorFlow have in common: a model, and the class that its optimizer needs."""

from __future__ import annotations

from typing import Any, TypeVar

from keras_shardopt.fit.calls import cross_shards_in_step
from keras_shardopt.update.plugs import step_class

ModelStepT = TypeVar("ModelStepT", bound="ModelStep")


class ModelStep:
    """Base of the classes `TrainStep`, which run Keras's step on several replicas. Extensions override some methods."""

    def __init__(self, model: Any, cross_shards: list[Any]) -> None:
        self.model = model
        self.cross_shards = cross_shards

    @classmethod
    def of(cls: type[ModelStepT], model: Any) -> ModelStepT:
        """Return the step for the model's optimizer: of this class, or of the subclass of an extension."""
        cross_shards = cross_shards_in_step(model)
        step: ModelStepT = step_class(cross_shards, cls)(model, cross_shards)
        return step

    def prepare(self) -> None:
        """Called by `prepare(model)`. Does nothing unless an extension overrides it."""
