"""Times forward passes of a model on one process, to compare processes whose steps are compiled."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from keras_shardopt.backends.models import layers_of
from keras_shardopt.backends.user_warnings import warn

_NUM_ROWS = 32
"""The number of rows in a forward pass, if the model's input does not set one."""


class ForwardPasses:
    """Forward passes of one model, if it has one input of known shape and no stateful RNN (which would change)."""

    def __init__(self, model: Any) -> None:
        inputs = getattr(model, "inputs", None) or []
        is_known = len(inputs) == 1 and None not in inputs[0].shape[1:] and inputs[0].dtype != "string"
        is_stateful = any(getattr(layer, "stateful", False) for layer in layers_of(model))
        self._input = inputs[0] if is_known and not is_stateful else None
        self._has_compiled = False

    def seconds(self, model: Any) -> float:
        """Return the shortest time of three forward passes on this process only; 0 if the model allows none."""
        if self._input is None:
            return 0.0
        num_rows, *shape = self._input.shape
        rows = np.zeros([num_rows or _NUM_ROWS, *shape], self._input.dtype)
        weights = {id(each) for each in model.weights}
        seeds = [(each, each.numpy()) for each in model.variables if id(each) not in weights]
        found: list[float] = []
        try:
            for _ in range(3 if self._has_compiled else 4):
                begin = time.perf_counter()
                model.predict_on_batch(rows)
                found.append(time.perf_counter() - begin)
        except Exception as error:  # any error, because other processes wait for this one
            warn(f"`StepReport` measures no forward passes, because a forward pass failed: {error!r}")
            self._input = None
            return 0.0
        finally:
            for each, value in seeds:  # restore seeds, because layers can draw random numbers in inference
                each.assign(value)
        self._has_compiled = True
        return min(found)
