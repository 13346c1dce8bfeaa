"""Numbers in variables that Python has set, so it need not read them: a read from a GPU waits for the GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from keras import ops

from keras_shardopt.backends.active import runtime
from keras_shardopt.numerics import Variable


class Known:
    """The value of one variable, read again after another assignment. For steps in which Python runs."""

    def __init__(self) -> None:
        self._value = np.zeros(())
        self._version: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_version": None}  # versions of a copy's variable are others

    def of(self, variable: Variable) -> np.ndarray:
        """The value."""
        version = runtime.version(variable)
        if version != self._version:
            self.note(variable, ops.convert_to_numpy(variable))
        return self._value

    def note(self, variable: Variable, value: Any) -> None:
        """Keeps the value that was assigned last."""
        self._value, self._version = np.array(value), runtime.version(variable)
