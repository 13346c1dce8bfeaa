"""Facts about a model that `VirtualReplicas` on PyTorch finds once and keeps, because finding them takes time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
        self.has_warned = False  # of steps that are not compiled
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
