"""Arithmetic on lists of gradients: None entries, sparse gradients and half precision, on every backend alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_shardopt import arguments as check
from keras_shardopt._typing import Tensor, Variable


def is_sparse(grad: Any) -> bool:
    """Whether the gradient lists some rows (`tf.IndexedSlices`, a row perhaps twice) instead of holding all."""
    return hasattr(grad, "dense_shape") and hasattr(grad, "indices")


def dense(grad: Tensor, num_rows: int) -> Tensor:
    """The gradient with all of its `num_rows` rows; those that a sparse one lists more than once are summed."""
    return ops.segment_sum(grad.values, grad.indices, num_rows) if is_sparse(grad) else grad


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
    num_rows = variable.shape[0] if len(variable.shape) else 1
    return dense(first, num_rows) + dense(second, num_rows)


def dtype_of(value: Any) -> str:
    """The name of the dtype of a tensor or variable."""
    name: str = keras.backend.standardize_dtype(value.dtype)
    return name


def in_float32(value: Tensor) -> Tensor:
    """`value` in float32, unless it is float64. Half precision overflows on squares of 256."""
    return ops.convert_to_tensor(value) if dtype_of(value) == "float64" else ops.cast(value, "float32")


def overwrites_variable(variable: Variable) -> bool:
    """Whether what comes as the variable's gradient is its next value (the scales of float8 training)."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def norm(value: Tensor) -> Tensor:
    """The L2 norm of all elements, in float32 (float64 of float64)."""
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
    squares = [ops.sum(ops.square(in_float32(_values(t)))) for t in t_list if t is not None]
    widest = "float64" if any(dtype_of(square) == "float64" for square in squares) else "float32"
    # float64 squares of the others too, and one sum over a stack instead of a chain of scalar additions.
    return ops.sqrt(ops.sum(ops.stack([ops.cast(s, widest) for s in squares]))) if squares else ops.zeros((), widest)


def clip_by_global_norm(
    t_list: Sequence[Tensor | None], clip_norm: float | Tensor, use_norm: Tensor | None = None
) -> tuple[list[Tensor | None], Tensor]:
    r"""Scales all tensors by one factor, so that their global norm is at most `clip_norm`.

    With $n$ the global norm and $c$ = `clip_norm`, each tensor $t$ becomes $t \cdot \min(1, c / n)$. Tensors within
    the limit come back bit for bit. The product is taken in float32 and has the dtype of its tensor.

    An infinite element makes $n$ infinite and the factor 0: finite elements become 0 and the infinite one NaN, so
    that a later finite check still sees the overflow. A NaN makes everything NaN.

    Args:
        t_list: a list or tuple of tensors of any shapes. None entries stay None; of `tf.IndexedSlices` the listed
            rows are scaled, and count one by one in the norm.
        clip_norm: a number >= 0, or a scalar tensor.
        use_norm: the global norm, where it is known already; None computes it.

    Returns:
        A pair: the list of scaled tensors, and the global norm before scaling, a scalar.

    Raises:
        TypeError: if `t_list` is no list or tuple.
        ValueError: if `clip_norm` is a number < 0.

    Example:
        >>> import keras, keras_shardopt as ks
        >>> clipped, norm = ks.clip_by_global_norm([keras.ops.convert_to_tensor([3.0, 4.0]), None], 1.0)
        >>> float(norm), [round(float(t), 4) for t in clipped[0]], clipped[1]
        (5.0, [0.6, 0.8], None)

    References:
        `clip_by_global_norm` of OpenSeq2Seq's `optimizers.py`, which follows `tf.clip_by_global_norm` but gives zeros
        instead of NaN beside an infinite element. There None entries and scalars failed, and `use_norm` had to be
        given.
    """
    if not isinstance(t_list, (list, tuple)) or not all(tensor is None or _is_numbers(tensor) for tensor in t_list):
        what = (
            f"with {check.with_article(_odd_one(t_list))} in it"
            if isinstance(t_list, (list, tuple))
            else check.with_article(t_list)
        )
        raise TypeError(
            f"`t_list` must be a list or tuple of tensors and None. Received: {what}. Put a single tensor into a list."
        )
    _check_limit("clip_norm", clip_norm)
    if use_norm is not None and not _is_scalar(use_norm):
        raise TypeError(f"`use_norm` must be a scalar tensor, a number or None. Received: use_norm={use_norm!r}")
    if isinstance(use_norm, Real):
        use_norm = float(use_norm)
    found = global_norm(t_list) if use_norm is None else in_float32(ops.convert_to_tensor(use_norm))
    factor = factor_within(found, ops.cast(clip_norm, dtype_of(found)))
    return [None if t is None else map_values(lambda value: _times(value, factor), t) for t in t_list], found


def clip_gradients_by_norm(
    grads_and_vars: Iterable[tuple[Tensor | None, Variable]], clip_gradients: float | Tensor
) -> list[tuple[Tensor | None, Variable]]:
    """Clips the gradients of (gradient, variable) pairs by their global norm.

    As `clip_by_global_norm`; each gradient then has the dtype of its variable. It belongs between the computing and
    the applying of gradients that are global already. `GradientClipping` does the same inside an optimizer.

    Args:
        grads_and_vars: pairs of a gradient (or None) and its variable.
        clip_gradients: a number >= 0, or a scalar tensor: the largest global norm.

    Returns:
        A list of such pairs.

    Raises:
        ValueError: if `clip_gradients` is a number < 0.

    Example:
        >>> import keras, keras_shardopt as ks
        >>> weight = keras.Variable([1.0, 2.0])
        >>> ((grad, _),) = ks.clip_gradients_by_norm([(keras.ops.convert_to_tensor([3.0, 4.0]), weight)], 1.0)
        >>> [round(float(g), 4) for g in grad]
        [0.6, 0.8]

    References:
        `_clip_gradients_by_norm` of OpenSeq2Seq's `optimizers.py`.
    """
    _check_limit("clip_gradients", clip_gradients)
    listed = isinstance(grads_and_vars, Iterable) and _rank(grads_and_vars) is None
    pairs: list[Any] = list(grads_and_vars) if listed else [None]
    for pair in pairs:
        if not (isinstance(pair, (list, tuple)) and len(pair) == 2 and _is_pair(*pair)):
            what = repr(grads_and_vars) if pair is None else f"{pair!r} among them"
            raise TypeError(f"`grads_and_vars` must list (gradient, variable) pairs. Received: {what}")
    clipped, _ = clip_by_global_norm([grad for grad, _ in pairs], clip_gradients)
    return [(like_variable(grad, variable), variable) for grad, (_, variable) in zip(clipped, pairs)]


def like_variable(grad: Tensor | None, variable: Variable) -> Tensor | None:
    """The gradient in the dtype of its variable."""
    return None if grad is None else map_values(lambda value: ops.cast(value, dtype_of(variable)), grad)


def _check_limit(name: str, limit: Any) -> None:
    if isinstance(limit, Real):
        check.real(name, limit, at_least=0, finite=False)
    elif not _is_scalar(limit):
        raise TypeError(f"`{name}` must be a number or a scalar tensor. Received: {name}={limit!r}")


def _is_scalar(value: Any) -> bool:
    if isinstance(value, Real) and not isinstance(value, bool):
        return check.is_finite(value) or isinstance(value, float)
    return _rank(value) == 0 and _is_numbers(value)


def _rank(value: Any) -> int | None:
    """Of a tensor, variable or array; None of anything else."""
    shape = getattr(value, "shape", None)
    try:
        return None if shape is None or not hasattr(value, "dtype") else len(shape)
    except (TypeError, ValueError):  # TensorFlow does not know it yet
        return 0


def _is_numbers(value: Any) -> bool:
    """Whether it is a tensor, sparse or not, or what can be made one."""
    if is_sparse(value) or keras.ops.is_tensor(value) or isinstance(value, keras.Variable):
        return True
    try:
        array = np.asarray(value)
    except Exception:  # lists of unequal lengths, objects with ideas of their own
        return False
    return array.dtype.kind in "fiu" or "float" in str(array.dtype)


def _is_pair(grad: Any, variable: Any) -> bool:
    return (grad is None or _is_numbers(grad)) and _rank(variable) is not None


def _odd_one(t_list: Sequence[Any]) -> str:
    return next(type(tensor).__name__ for tensor in t_list if tensor is not None and not _is_numbers(tensor))


def _values(tensor: Tensor) -> Tensor:
    return tensor.values if is_sparse(tensor) else ops.convert_to_tensor(tensor)


def _times(value: Tensor, factor: Tensor) -> Tensor:
    value = ops.convert_to_tensor(value)
    wide = in_float32(value)
    return ops.cast(wide * ops.cast(factor, dtype_of(wide)), dtype_of(value))
