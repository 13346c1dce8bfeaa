"""Scopes that keep assignments from reaching variables.

Private names of Keras touched here (a test checks that each exists):
    `keras.src.backend.common.stateless_scope.get_stateless_scope` - the enclosing scope.
    `StatelessScope.add_update`, `get_current_value` - how variables write to a scope and read from it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
from keras.src.backend.common.stateless_scope import get_stateless_scope

from keras_shardopt.numerics import Tensor, Variable


class ScopeInScope(keras.StatelessScope):
    """A stateless scope that records assignments, and takes missing values from the enclosing stateless scope."""

    def __init__(self, state_mapping: Any) -> None:
        super().__init__(list(state_mapping), collect_losses=True)
        self._outer = get_stateless_scope()
        self.assigned: list[Variable] = []

    def add_update(self, update: tuple[Variable, Tensor]) -> None:
        super().add_update(update)
        if not any(variable is update[0] for variable in self.assigned):
            self.assigned.append(update[0])

    def get_current_value(self, variable: Variable) -> Tensor | None:
        value = super().get_current_value(variable)
        return value if value is not None or self._outer is None else self._outer.get_current_value(variable)


@contextlib.contextmanager
def assigning_nothing(who: str) -> Iterator[None]:
    """Raise ValueError if the block assigns a variable, because all replicas share variables.

    `who` names the code in the block, for the error message.
    """
    with ScopeInScope(()) as scope:
        yield
    if scope.assigned:
        raise ValueError(
            f"{who} must not assign variables, because all replicas share the variables. Received: an assignment to "
            f"{', '.join(variable.path for variable in scope.assigned)}. Put a value that is equal on all replicas "
            "into `step.notes`, and assign the variable in `commit`."
        )
