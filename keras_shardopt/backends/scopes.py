"""Scopes in which assignments to variables reach no variable.

Private names of Keras touched here (a test holds each of them):
    `keras.src.backend.common.stateless_scope.get_stateless_scope` - the scope that a new one opens in.
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
    """A scope that knows other variables as the scope around it does, and remembers which were assigned inside."""

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
    """For what a replica does by itself with its own gradients: variables have one value for all replicas.

    Args:
        who: what runs in the block, as an error names it.

    Raises:
        ValueError: if a variable was assigned in the block.
    """
    with ScopeInScope(()) as scope:
        yield
    if scope.assigned:
        raise ValueError(
            f"{who} must assign no variables, of which all replicas have one. Received: an assignment to "
            f"{', '.join(variable.path for variable in scope.assigned)}. Hand on in `step.notes` what it found, equal "
            "on all replicas, and assign in `commit`."
        )
