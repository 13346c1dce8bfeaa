"""Types of tensors, variables and gradients, and arithmetic with the same results on every backend.

The functions accept gradients that are None, sparse, or in half precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeVar

import keras
from keras import ops

Tensor = Any
"""A tensor of the active backend (on TensorFlow also `tf.IndexedSlices`)."""

Variable = Any
"""A `keras.Variable`, or on TensorFlow the `tf.Variable` inside it."""


class Optimizer(Protocol):
    """The members of `keras.optimizers.Optimizer` that this package uses. Keras has no type annotations."""

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
"""Gradients, one per variable. None for a variable without a gradient."""

ReduceOp = Literal["sum", "mean", "max"]
"""The element-wise operation of a reduction over replicas."""

UNKNOWN = -1
"""The index of an unknown replica or variable, in reports of non-finite gradients (`Step.found_inf`)."""

ALL_FINITE = (0, UNKNOWN, UNKNOWN)
"""The report (is any gradient not finite, replica, variable) of a step in which all gradients are finite."""

Groups = Sequence[Sequence[int]]
"""Disjoint, sorted lists of replica ids, of equal length, that contain each replica once."""

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
"""Any callable, for decorators that return a callable with the same type."""


def is_sparse(grad: Any) -> bool:
    """Whether the gradient is a `tf.IndexedSlices`, which has only some rows, perhaps with repeated indices."""
    return hasattr(grad, "dense_shape") and hasattr(grad, "indices")


def dense(grad: Tensor, variable: Variable) -> Tensor:
    """Returns a gradient with all rows of its variable. Rows of a sparse gradient with the same index are summed."""
    return ops.segment_sum(grad.values, grad.indices, variable.shape[0]) if is_sparse(grad) else grad


def values_of(grad: Tensor) -> Tensor:
    """Returns a dense gradient as a tensor, or the rows of a sparse gradient as a tensor."""
    if is_sparse(grad):
        return grad.values
    return grad if ops.is_tensor(grad) else ops.convert_to_tensor(grad)


def map_values(function: Callable[[Tensor], Tensor], grad: Tensor) -> Tensor:
    """Applies `function` to a gradient, or to the rows of a sparse gradient."""
    if is_sparse(grad):
        return type(grad)(function(grad.values), grad.indices, grad.dense_shape)
    return function(grad)


LARGEST_FLOAT16 = 65504.0


def add(first: Tensor, second: Tensor, variable: Variable) -> Tensor:
    """Returns the sum of two gradients of a variable. Two sparse gradients are concatenated, so indices can repeat."""
    if is_sparse(first) and is_sparse(second):
        values = ops.concatenate([first.values, second.values], axis=0)
        indices = ops.concatenate([first.indices, ops.cast(second.indices, first.indices.dtype)], axis=0)
        return type(first)(values, indices, first.dense_shape)
    return dense(first, variable) + dense(second, variable)


def dtype_of(value: Any) -> str:
    """Returns the name of the dtype of a tensor or variable."""
    dtype = value.dtype
    name = _NAMES.get(dtype)
    if name is None:
        name = _NAMES[dtype] = keras.backend.standardize_dtype(dtype)
    return name


_NAMES: dict[Any, str] = {}
"""A cache of names of dtypes, because Keras' lookup takes longer than an addition of small tensors."""


def cast(value: Tensor, dtype: str) -> Tensor:
    """Casts a tensor to `dtype`. Skips `keras.ops.cast` for an equal dtype, because it would be slow even then."""
    return value if dtype_of(value) == dtype else ops.cast(value, dtype)


def in_float32(value: Tensor) -> Tensor:
    """Returns `value` in float32 or, if it is float64, unchanged. In float16, the square of 256 would overflow."""
    value = value if ops.is_tensor(value) else ops.convert_to_tensor(value)
    return value if dtype_of(value) == "float64" else cast(value, "float32")


def path_of(variable: Variable) -> str:
    """Returns the name of a variable for messages. Prints one without a path, such as a `tf.Variable`."""
    return variable.path if hasattr(variable, "path") else str(variable)


def filled_like(value: Tensor, number: int) -> Tensor:
    """Returns a tensor like `value` with this number in all elements, which waits for no GPU.

    On PyTorch, `ops.full_like` copies the number to the GPU and reads it back.
    """
    return ops.zeros_like(value) + number


def overwrites_variable(variable: Variable) -> bool:
    """Whether the "gradient" of a variable is its next value, as for the scales of float8 training."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def norm(value: Tensor) -> Tensor:
    """Returns the L2 norm of all elements, in float32 (float64 for a float64 tensor)."""
    # Avoid `ops.norm`: on PyTorch it sums sequentially, with an error of 7e-4 for 16.8 million elements.
    return ops.sqrt(ops.sum(ops.square(in_float32(value))))


def factor_within(norm: Tensor, limit: float | Tensor) -> Tensor:
    """Returns the factor that scales gradients with this norm to at most `limit`. It is 1 if `norm <= limit`."""
    # Avoid min(1, limit / norm): 0 / 0 would be NaN, and on PyTorch Keras would compute the minimum in float32.
    return ops.where(norm <= limit, ops.ones_like(norm), limit / norm)


def global_norm(t_list: Sequence[Tensor | None]) -> Tensor:
    r"""Returns the L2 norm of all elements of all tensors, $\sqrt{\sum_i \lVert t_i \rVert^2}$.

    Args:
        t_list: tensors of any shapes and dtypes. None entries are ignored. The rows of `tf.IndexedSlices` count
            individually, even if they repeat an index.

    Returns:
        A scalar in float32 (float64 if a tensor is float64); 0 for an empty list.
    """
    squares = [ops.sum(ops.square(in_float32(values_of(t)))) for t in t_list if t is not None]
    widest = "float64" if any(dtype_of(square) == "float64" for square in squares) else "float32"
    # Stack the scalars and sum the stack, because many scalar additions are slower.
    return ops.sqrt(ops.sum(ops.stack([cast(s, widest) for s in squares]))) if squares else ops.zeros((), widest)


def clipped_to(grads: Gradients, limit: float | Tensor, norm: Tensor) -> list[Tensor | None]:
    """Multiplies all gradients by one factor, so their global norm is at most `limit`. `norm` is the current norm."""
    factor = factor_within(norm, ops.cast(limit, dtype_of(norm)))
    return [times(grad, factor) for grad in grads]


def like_variable(grad: Tensor | None, variable: Variable) -> Tensor | None:
    """Returns the gradient in the dtype of its variable."""
    return None if grad is None else map_values(lambda value: cast(value, dtype_of(variable)), grad)


def times(grad: Tensor | None, factor: Tensor) -> Tensor | None:
    """Returns the gradient times a scalar, in the dtype of the gradient. Half precision is multiplied in float32."""
    return None if grad is None else map_values(lambda value: _times(value, factor), grad)


def _times(value: Tensor, factor: Tensor) -> Tensor:
    value = ops.convert_to_tensor(value)
    wide = in_float32(value)
    return cast(wide * cast(factor, dtype_of(wide)), dtype_of(value))
