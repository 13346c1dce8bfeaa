"""A cache of values that Python has assigned to variables, because reading a variable waits for the GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from keras import ops

from keras_shardopt.backends.active import runtime
from keras_shardopt.numerics import Variable


class Known:
    """Caches the value of one variable, for uncompiled steps. Reads the variable again after other code assigns it."""

    def __init__(self) -> None:
        self._value = np.zeros(())
        self._version: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_version": None}  # a copy is used with another variable, which has other versions

    def of(self, variable: Variable) -> np.ndarray:
        """Return the variable's value, which is read only if it was assigned since the last call."""
        if not self.is_current(variable):
            self.note(variable, ops.convert_to_numpy(variable))
        return self._value

    def is_current(self, variable: Variable) -> bool:
        """Whether `of` returns a value without reading the variable. False in compiled steps."""
        return self._version is not None and runtime.version(variable) == self._version

    def note(self, variable: Variable, value: Any) -> None:
        """Store the value that was just assigned to the variable."""
        self._value, self._version = np.array(value), runtime.version(variable)
