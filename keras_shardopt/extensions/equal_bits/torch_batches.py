"""What a prepared model remembers from one batch that is cut into parts to the next.

To go through all layers of a model takes as long as a small layer, so it is done once in each call of `fit` or
`evaluate`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_shardopt.numerics import Variable
from keras_shardopt.wrapping.rollback import changed_by_forward_passes


class CutBatches:
    """What is known of the batches of one model.

    Args:
        model: the model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.counts_first = False
        """Whether losses divide by what parts of a batch must count before."""
        self.changed_weights: list[Any] | None = None
        """The weights that layers change when they are called; None until a batch of parts has shown them."""
        self.sees_loss: Callable[[], None] | None = None  # once, after the next loss
        self.has_warned = False
        """Whether it was said that their steps are not compiled."""
        self._state: list[Variable] = []
        self._num_trained = 0

    def begin_call(self) -> None:
        """Lets go of what may be other in another call."""
        self._num_trained = 0

    def state(self, is_in_call: bool) -> list[Variable]:
        """What layers change besides weights. It is asked before each training step."""
        # What layers make in the first step, being called in training only, is found before the second one.
        if not is_in_call or self._num_trained < 2:
            self._state = changed_by_forward_passes([self._model])
            self._num_trained += 1
        return self._state
