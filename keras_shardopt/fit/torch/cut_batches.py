"""What a prepared model remembers from one batch that is cut into parts to the next.

To go through all layers of a model takes as long as a small layer, so it is done once in each call of `fit` or
`evaluate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras_shardopt.fit.stateful import fit_states, stateful_layers
from keras_shardopt.fit.virtual_replicas import num_parts_of
from keras_shardopt.numerics import Variable
from keras_shardopt.wrapping.rollback import changed_by_forward_passes


class CutBatches:
    """What is known of the batches of one model.

    Args:
        model: the model.
        reducers_of: finds each `CrossShard` that an optimizer consists of.
    """

    def __init__(self, model: Any, reducers_of: Callable[[Any], list[Any]]) -> None:
        self._model = model
        self._reducers_of = reducers_of
        self.counts_first = False
        """Whether losses divide by what parts of a batch must count before."""
        self.changed_weights: list[Any] | None = None
        """The weights that layers change when they are called; None until a batch of parts has shown them."""
        self.sees_loss: Callable[[], None] | None = None  # once, after the next loss
        self.has_warned = False
        """Whether it was said that their steps are not compiled."""
        self._num_parts: int | None = None
        self._optimizer: Any = None
        self._state: list[Variable] = []
        self._num_trained = 0
        self._stateful: list[Any] | None = None

    def begin_call(self) -> None:
        """Lets go of what may be other in another call."""
        self._optimizer, self._num_trained, self._stateful = None, 0, None

    def num_parts(self, is_in_call: bool) -> int | None:
        """Into how many parts the optimizer cuts each batch; None where each rank has one.

        Args:
            is_in_call: whether a call runs in which this stays as it is, as long as the optimizer does.
        """
        if not is_in_call:
            return num_parts_of(self._model, self._reducers_of)
        if self._optimizer is not self._model.optimizer:
            self._num_parts = num_parts_of(self._model, self._reducers_of)
            self._optimizer = self._model.optimizer
        return self._num_parts

    def fit_states(self, rows: Sequence[int], rank: int) -> None:
        """Gives a rank the states of its rows of a batch, of which each rank has so many."""
        if self._stateful is None:
            self._stateful = stateful_layers(self._model)
        fit_states(self._stateful, rows, [rank])

    def state(self, is_in_call: bool) -> list[Variable]:
        """What layers change besides weights. It is asked before each training step."""
        # What layers make in the first step, being called in training only, is found before the second one.
        if not is_in_call or self._num_trained < 2:
            self._state = changed_by_forward_passes([self._model])
            self._num_trained += 1
        return self._state
