"""What tensors, variables and gradients are, and arithmetic that is the same on every backend.

Gradients may be None, sparse, or of half precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeVar

import keras
from keras import ops

Tensor = Any
"""A tensor of whichever framework runs Keras (on TensorFlow also `tf.IndexedSlices`)."""

Variable = Any
"""A `keras.Variable`, or on TensorFlow the `tf.Variable` inside it."""


class Optimizer(Protocol):
    """A `keras.optimizers.Optimizer`. Keras has no types, so these are the members that this package uses."""

    name: str
    built: bool
    iterations: Variable
    learning_rate: Any
    variables: list[Variable]
    weight_decay: float | None
    build: Callable[[Sequence[Variable]], None]
    apply: Callable[..., None]
    scale_loss: Callable[[Tensor], Tensor]
    get_config: Callable[[], dict[str, Any]]
    load_own_variables: Callable[[Any], None]
    add_variable: Callable[..., Variable]
    _iterations: Variable
    _trainable_variables: list[Variable]
    _variables: list[Variable]
    _var_key: Callable[[Variable], Any]
    _track_variable: Callable[[Variable], None]


Gradients = Sequence[Any]
"""One `Tensor` or `None` per variable."""

ReduceOp = Literal["sum", "mean", "max"]
"""What a reduction over replicas computes, element by element."""

UNKNOWN = -1
"""Stands for a replica or variable that nobody can name."""

ALL_FINITE = (0, UNKNOWN, UNKNOWN)
"""Stands for `Step.found_inf` where it is known that nothing is to be done."""

Groups = Sequence[Sequence[int]]
"""Disjoint, equally large, ascending lists of replica ids that together name every replica once."""

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
"""Any function."""


def is_sparse(grad: Any) -> bool:
    """Whether the gradient lists some rows (`tf.IndexedSlices`, a row perhaps twice) instead of holding all."""
    return hasattr(grad, "dense_shape") and hasattr(grad, "indices")


def dense(grad: Tensor, variable: Variable) -> Tensor:
    """The gradient with all rows of its variable; those that a sparse one lists more than once are summed."""
    return ops.segment_sum(grad.values, grad.indices, variable.shape[0]) if is_sparse(grad) else grad


def values_of(grad: Tensor) -> Tensor:
    """The elements of a gradient, or of the listed rows of a sparse one."""
    if is_sparse(grad):
        return grad.values
    return grad if ops.is_tensor(grad) else ops.convert_to_tensor(grad)


def map_values(function: Callable[[Tensor], Tensor], grad: Tensor) -> Tensor:
    """`function` of a gradient, or of the listed rows of a sparse one."""
    if is_sparse(grad):
        return type(grad)(function(grad.values), grad.indices, grad.dense_shape)
    return function(grad)


LARGEST_FLOAT16 = 65504.0


def add(first: Tensor, second: Tensor, variable: Variable) -> Tensor:
    """The sum of two gradients of a variable; sparse ones are joined, so that rows may be listed several times."""
    if is_sparse(first) and is_sparse(second):
        values = ops.concatenate([first.values, second.values], axis=0)
        indices = ops.concatenate([first.indices, ops.cast(second.indices, first.indices.dtype)], axis=0)
        return type(first)(values, indices, first.dense_shape)
    return dense(first, variable) + dense(second, variable)


def dtype_of(value: Any) -> str:
    """The name of the dtype of a tensor or variable."""
    dtype = value.dtype
    name = _NAMES.get(dtype)
    if name is None:
        name = _NAMES[dtype] = keras.backend.standardize_dtype(dtype)
    return name


_NAMES: dict[Any, str] = {}
"""Of dtypes. Keras takes longer to find them than small tensors take to be added."""


def cast(value: Tensor, dtype: str) -> Tensor:
    """A tensor in another dtype, or itself: `keras.ops.cast` takes its time for nothing, too."""
    return value if dtype_of(value) == dtype else ops.cast(value, dtype)


def in_float32(value: Tensor) -> Tensor:
    """`value` in float32, unless it is float64. Half precision overflows on squares of 256."""
    value = value if ops.is_tensor(value) else ops.convert_to_tensor(value)
    return value if dtype_of(value) == "float64" else cast(value, "float32")


def overwrites_variable(variable: Variable) -> bool:
    """Whether what comes as the variable's gradient is its next value (the scales of float8 training)."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def norm(value: Tensor) -> Tensor:
    """The L2 norm of all elements, in float32 (float64 of float64)."""
    # Not `ops.norm`, which on PyTorch adds up one by one: wrong by 7e-4 with 16.8 million elements.
    return ops.sqrt(ops.sum(ops.square(in_float32(value))))


def factor_within(norm: Tensor, limit: float | Tensor) -> Tensor:
    """By what to multiply so that a norm is at most `limit`: exactly 1 where it is; NaN for a NaN."""
    # Not min(1, limit / norm): NaN for 0 / 0, and on PyTorch Keras takes the minimum with a number in float32.
    return ops.where(norm <= limit, ops.ones_like(norm), limit / norm)


def global_norm(t_list: Sequence[Tensor | None]) -> Tensor:
    r"""The L2 norm of all elements of all tensors, $\sqrt{\sum_i \lVert t_i \rVert^2}$.

    Args:
        t_list: tensors of any shapes and dtypes. None entries are left out; of `tf.IndexedSlices` the listed rows
            count one by one, also where a row is listed twice.

    Returns:
        A scalar in float32 (float64 if a tensor is float64); 0 for an empty list.
    """
    squares = [ops.sum(ops.square(in_float32(values_of(t)))) for t in t_list if t is not None]
    widest = "float64" if any(dtype_of(square) == "float64" for square in squares) else "float32"
    # float64 squares of the others too, and one sum over a stack instead of a chain of scalar additions.
    return ops.sqrt(ops.sum(ops.stack([cast(s, widest) for s in squares]))) if squares else ops.zeros((), widest)


def clipped_to(grads: Gradients, limit: float | Tensor, norm: Tensor) -> list[Tensor | None]:
    """The gradients times one factor, so that their global norm, which is `norm` now, is at most `limit`."""
    factor = factor_within(norm, ops.cast(limit, dtype_of(norm)))
    return [times(grad, factor) for grad in grads]


def like_variable(grad: Tensor | None, variable: Variable) -> Tensor | None:
    """The gradient in the dtype of its variable."""
    return None if grad is None else map_values(lambda value: cast(value, dtype_of(variable)), grad)


def times(grad: Tensor | None, factor: Tensor) -> Tensor | None:
    """The gradient times a scalar, in float32, in its own dtype."""
    return None if grad is None else map_values(lambda value: _times(value, factor), grad)


def _times(value: Tensor, factor: Tensor) -> Tensor:
    value = ops.convert_to_tensor(value)
    wide = in_float32(value)
    return cast(wide * cast(factor, dtype_of(wide)), dtype_of(value))
