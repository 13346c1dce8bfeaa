"""What the PyTorch step of `VirtualReplicas` knows of a model: facts to keep, and weights that layers change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from keras_shardopt.numerics import Variable
from keras_shardopt.wrapping.rollback import changed_by_forward_passes


class KeptState:
    """Facts about one model that the PyTorch step of `VirtualReplicas` keeps from batch to batch."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.counts_first = False
        """Whether losses divide by sums over the whole batch, such as of a mask. A first pass must compute these."""
        self.changed_weights: list[Any] | None = None
        """The weights that layers change in their call. None before the first batch."""
        self.on_loss: Callable[[], None] | None = None  # called once, after the next loss
        self.has_warned = False
        """Whether a warning about uncompiled steps was given."""
        self._state: list[Variable] = []
        self._num_trained = 0

    def begin_call(self) -> None:
        """Forget the variables that `state` has found, because they can differ in the next call of `fit`."""
        self._num_trained = 0

    def state(self, is_in_call: bool) -> list[Variable]:
        """Return the variables, apart from weights, that layers change. `is_in_call`: whether `fit` runs the step."""
        # Search again before the second step, because some layers create variables in the first training step.
        if not is_in_call or self._num_trained < 2:
            self._state = changed_by_forward_passes([self._model])
            self._num_trained += 1
        return self._state


class ChangedWeights:
    """The weights, also frozen ones, that layers change in their call. Each part starts from their old values.

    Args:
        model: the model.
        state: the variables, apart from weights, that layers change.
        weights: the weights. None: unknown, so save all until `keep_changed`.
    """

    def __init__(self, model: Any, state: Sequence[Variable], weights: Sequence[Variable] | None) -> None:
        self._model = model
        self._others = {id(v) for v in state}
        if weights is None:
            weights = [v for v in model.weights if id(v) not in self._others]
        self._saved = {id(v): (v, v.value.clone()) for v in weights}

    @property
    def variables(self) -> list[Variable]:
        """The weights that have changed or, before `keep_changed`, can change."""
        return [variable for variable, _ in self._saved.values()]

    @torch.no_grad()
    def restore(self) -> None:
        """Set the weights to their values before the batch."""
        for variable, value in self._saved.values():
            variable.value.copy_(value)

    @torch.no_grad()
    def keep_changed(self) -> None:
        """Stop saving and restoring weights that the forward pass has not changed."""
        pairs = self._saved.items()
        self._saved = {key: (variable, old) for key, (variable, old) in pairs if not torch.equal(variable.value, old)}

    @torch.no_grad()
    def note_assigned(self, variable: Variable) -> None:
        """Save the value of a weight before a layer first assigns it in this `fit`."""
        if id(variable) in self._saved or id(variable) in self._others:
            return
        if any(variable is weight for weight in self._model.weights):
            self._saved[id(variable)] = (variable, variable.value.clone())
        else:
            self._others.add(id(variable))
