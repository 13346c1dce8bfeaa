"""The variables whose values can differ between replicas in local SGD.

Private names of Keras touched here (a test checks that each exists):
    `Optimizer._trainable_variables` - the variables that the optimizer was built with.
    `Optimizer._model_variables_moving_average` - the averages of weights that an optimizer with `use_ema` keeps.
"""

from __future__ import annotations

from collections.abc import Sequence

import keras

from keras_shardopt.backends.active import placement
from keras_shardopt.backends.models import models_with
from keras_shardopt.numerics import Variable
from keras_shardopt.update.context import CrossShardProtocol
from keras_shardopt.wrapping.chain import base_optimizers, chain_of
from keras_shardopt.wrapping.rollback import may_skip_updates, statistics_in
from keras_shardopt.wrapping.wrapper import OptimizerWrapper


class ReplicaVariables:
    """Finds the variables of a `CrossShard` and its model whose values can differ between replicas."""

    def __init__(self, optimizer: CrossShardProtocol) -> None:
        self._optimizer = optimizer
        self.statistics: list[Variable] = []
        """The moving statistics of the model. Code that reads the model gets their means over replicas."""
        self._excluded: list[Variable] = []

    def build(self, variables: Sequence[Variable]) -> None:
        """Find the moving statistics of the models that have weights among `variables`."""
        self.statistics = statistics_in(models_with(variables))

    def exclude(self, variables: Sequence[Variable]) -> None:
        """Exclude the optimizer variables of local SGD itself from `state`."""
        self._excluded += variables

    @property
    def trained(self) -> list[Variable]:
        """The trainable variables."""
        return list(self._optimizer._trainable_variables)

    def weights(self) -> list[Variable]:
        """Return the variables that replicas average: trainable variables, or master weights in mixed precision."""
        found = self.trained
        for wrapper in chain_of(self._optimizer):
            if isinstance(wrapper, OptimizerWrapper) and wrapper.built:
                found = wrapper._variables_inside(found)
        return found

    def averages(self, positions: Sequence[int]) -> list[Variable]:
        """Return the moving averages of the weights at `positions`; empty without `use_ema`."""
        kept: dict[int, Variable] = {}
        for leaf in base_optimizers(self._optimizer):
            if leaf.use_ema:
                kept.update(zip(map(id, leaf._trainable_variables), leaf._model_variables_moving_average))
        weights = self.weights()
        return [kept[id(weights[i])] for i in positions if id(weights[i]) in kept]

    def averaged(self) -> list[Variable]:
        """Return all variables that become the mean over replicas when other code reads the model."""
        trained = self.trained
        return [*trained, *self.weights(), *self.averages(range(len(trained))), *self.statistics]

    @property
    def state(self) -> list[Variable]:
        """The optimizer variables that each replica updates separately."""
        optimizer = self._optimizer
        rates = [v for leaf in base_optimizers(optimizer) for v in leaf.variables if v.name == "learning_rate"]
        summing = optimizer.accumulation
        kept = [] if summing is None else [summing.window.counter, *summing._replica_state]
        excluded = set(map(id, [*rates, *kept, *self._excluded]))
        return [v for v in optimizer.variables if id(v) not in excluded]

    @property
    def counters(self) -> list[Variable]:
        """The counters in `state`. They are equal on all replicas unless `may_skip`."""
        return [v for v in self.state if not keras.backend.is_float_dtype(v.dtype)]

    @property
    def may_skip(self) -> bool:
        """Whether a replica can skip an update that other replicas make, so counters differ between replicas."""
        # Compute this anew in each call, because the answer of `MixedPrecision` changes when it creates master weights.
        return any(map(may_skip_updates, chain_of(self._optimizer)))

    def everything(self) -> list[Variable]:
        """Return all variables that can differ between replicas, in the order in which backups store them."""
        kinds = [*self.trained, *self.state, *self.statistics, *self._restored()]
        return list({id(variable): variable for variable in kinds}.values())

    def _restored(self) -> list[Variable]:
        """Return variables of the model that a skipped update restores, such as seeds, but not moving statistics."""
        rollback = self._optimizer._rollback
        if rollback is None:
            return []
        models = models_with(self.trained)
        known = {id(v) for model in models for v in model.non_trainable_variables} - set(map(id, self.statistics))
        return [v for v in rollback.variables if id(v) in known]


def replicas_are_processes() -> bool:
    """Whether each replica is a process that runs Python code in each update (PyTorch), not a traced program."""
    return placement.state_sharding == "slices"
