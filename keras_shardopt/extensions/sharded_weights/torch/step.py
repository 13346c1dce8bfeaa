"""Training steps with divided weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from keras_shardopt.extensions.sharded_weights.settings import DividedWeights
from keras_shardopt.extensions.sharded_weights.torch.buckets import pack, unpack
from keras_shardopt.extensions.sharded_weights.torch.weights import WeightsOfOptimizer
from keras_shardopt.fit.torch.step import TrainStep


class ShardedStep(TrainStep):
    """A step in which weights have values only while layers use them."""

    def begin_fit(self) -> None:
        """Raise ValueError if the model is compiled."""
        if self._session.model.jit_compile:
            raise ValueError(
                "With `ShardedWeights` a step cannot be compiled, because it gathers weights. Received: a model with "
                "`jit_compile=True`. Use `model.compile(..., jit_compile=False)`."
            )

    def before_step(self, begins_epoch: bool) -> None:
        """Divide the weights, if they are whole, as at the beginning of `fit`."""
        self.begin_fit()
        stages = DividedWeights.found_in(self._session.cross_shards)
        if len(stages) > 1:
            raise ValueError(
                "`ShardedWeights` is for one optimizer of a model. Received: a model with "
                f"{len(stages)} optimizers that have it. Remove it from the others."
            )
        for stage in stages:
            shards = stage.context.optimizer._shards
            if stage.weights is None and shards is not None:
                stage.weights = WeightsOfOptimizer(shards, self._session.ranks, stage.settings.prefetch)
            if stage.weights is not None:
                stage.weights.divide()

    def run(self, real: Callable[[Any], Any], data: Any, trains: bool) -> Any:
        """Run Keras's step (`real`). Record the order of gathers, and free weights that autograd would keep."""
        found = [stage.weights for stage in DividedWeights.found_in(self._session.cross_shards)]
        divided = [weights for weights in found if weights is not None and weights.is_divided]
        if divided:
            self._session.batches.confirm()  # now, because ranks already exchange weights in the forward pass
        for weights in divided:
            weights.gathers.begin_pass(trains)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            result = super().run(real, data, trains)
        for weights in divided:
            weights.gathers.end_pass()
        return result
