"""Values that `VirtualReplicas` on PyTorch keeps between batches, because collecting them takes as long as a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_shardopt.numerics import Variable
from keras_shardopt.wrapping.rollback import changed_by_forward_passes


class KeptState:
    """Values kept between the batches of one model."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.counts_first = False
        """Whether losses divide by counts over all parts, so a counting pass must come first."""
        self.changed_weights: list[Any] | None = None
        """The weights that layers change in their call. None before the first batch."""
        self.on_loss: Callable[[], None] | None = None  # called once, after the next loss
        self.has_warned = False
        """Whether the model has warned that its steps are not compiled."""
        self._state: list[Variable] = []
        self._num_trained = 0

    def begin_call(self) -> None:
        """Clear values that may differ in another call of `fit`."""
        self._num_trained = 0

    def state(self, is_in_call: bool) -> list[Variable]:
        """Return the non-weight variables that layers change. Called before each training step."""
        # Search again before the second step: layers called only in training create variables in the first one.
        if not is_in_call or self._num_trained < 2:
            self._state = changed_by_forward_passes([self._model])
            self._num_trained += 1
        return self._state
