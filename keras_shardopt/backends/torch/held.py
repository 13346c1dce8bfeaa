"""The tensors that Keras' variables hold.

Private names of Keras touched here (a test checks that each exists):
    `Variable._value`, and in `keras.src.backend.common` `stateless_scope.in_stateless_scope` and
        `variables.get_autocast_scope` - the tensor of a variable, and whether a scope replaces it.
"""

from __future__ import annotations

from collections.abc import Sequence

import keras
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.common.variables import get_autocast_scope

from keras_shardopt.numerics import Tensor, Variable


def tensor_of(variable: Variable) -> Tensor:
    """Return the tensor of a variable, or `variable` itself if it is a tensor."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def values_of(variables: Sequence[Variable]) -> list[Tensor]:
    """Return the tensor of each variable. Keras' `value` is slower, because it checks for scopes for each variable."""
    if in_stateless_scope() or get_autocast_scope() is not None:
        return [variable.value for variable in variables]
    held = [variable._value if type(variable) is keras.Variable else None for variable in variables]
    return [variable.value if tensor is None else tensor for variable, tensor in zip(variables, held)]
