"""Norms and finite checks of gradients, with the fastest functions of each backend."""

from __future__ import annotations

from collections.abc import Sequence

from keras import ops

from keras_shardopt import numerics
from keras_shardopt.backends import for_backend
from keras_shardopt.numerics import Tensor, cast, in_float32

# On PyTorch, call PyTorch directly: a call of `keras.ops` takes longer than the arithmetic of a small tensor.
_direct = for_backend({"torch": "keras_shardopt.backends.torch.norms"})
# These modules avoid `isfinite` of a whole gradient, because a result of the gradient's size is slow to create.
_finite = for_backend(
    {
        "torch": "keras_shardopt.backends.torch.nonfinite",
        "jax": "keras_shardopt.backends.jax.nonfinite",
        "tensorflow": "keras_shardopt.backends.tensorflow.nonfinite",
    }
)


def global_norm(values: Sequence[Tensor | None]) -> Tensor:
    """Return the L2 norm of all elements of all tensors."""
    given = [value for value in values if value is not None]
    if _direct is None or not given or not _direct.are_plain(given):
        return numerics.global_norm(values)
    found: Tensor = _direct.global_norm(given)
    return found


def norms(values: Sequence[Tensor], dtype: str) -> Tensor:
    """Return the L2 norm of each tensor, in one vector of this dtype."""
    if _direct is not None:
        values = _direct.values_of(values)
    if _direct is None or not _direct.are_plain(values):
        values = [ops.stop_gradient(value) for value in values]  # an update is never differentiated
        return ops.stack([cast(numerics.norm(value), dtype) for value in values])
    found: Tensor = _direct.norms(values, dtype)
    return found


def bounded(values: Tensor, low: float, high: float | None) -> Tensor:
    """Clip values to `[low, high]`. NaN remains NaN."""
    if _direct is not None:
        found: Tensor = values.clamp(low, high)
        return found
    # Make tensors of the bounds, because Python numbers could change the dtype of the result.
    values = ops.maximum(values, ops.full_like(values, low))
    return values if high is None else ops.minimum(values, ops.full_like(values, high))


def ones_where(chosen: Tensor, values: Tensor) -> Tensor:
    """Return 1 where `chosen` is true, and the value elsewhere."""
    if _direct is not None:
        found: Tensor = values.masked_fill(chosen, 1)
        return found
    return ops.where(chosen, ops.ones_like(values), values)


def unstacked(vector: Tensor, length: int) -> list[Tensor]:
    """Return the elements of a vector of this length as scalars."""
    return list(ops.unstack(vector, length) if _direct is None else vector.unbind())


def are_finite(values: Sequence[Tensor]) -> Tensor:
    """Return a vector with one bool per tensor: whether all its elements are finite."""
    is_plain = _direct is None or (_direct.are_plain(values) and not any(0 in value.shape for value in values))
    if _finite is None or not is_plain:
        return ops.stack([ops.all(ops.isfinite(value)) for value in values])
    found: Tensor = _finite.are_finite(values)
    return found


def are_surely_finite(values: Sequence[Tensor]) -> bool:
    """Return True if one fast pass shows that all elements are finite. False means unknown."""
    return (
        _finite is not None and _direct is not None and _direct.are_plain(values) and _finite.are_surely_finite(values)
    )


def any_not_finite(values: Sequence[Tensor]) -> Tensor | None:
    """Return a scalar bool tensor: whether any element is NaN or infinite. None on PyTorch: use `largest` there."""
    return ops.logical_not(ops.all(are_finite(values))) if _direct is None and _finite is not None else None


def largest(values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return whether any element is NaN (bool), and the largest absolute value (float32, undefined with NaN).

    Every tensor must have elements.
    """
    if _direct is not None and _finite is not None and _direct.are_plain(values):
        found: tuple[Tensor, Tensor] = _finite.largest(values)
        return found
    # Only reduce, because `isnan` and `abs` would allocate another array of the gradient's size. Detect NaN by the
    # norm, because frameworks differ in the maximum of an array with NaN. A norm is NaN if and only if an element is.
    each = ops.stack([cast(ops.norm(ops.reshape(in_float32(value), (-1,))), "float32") for value in values])
    ends = [end for value in values for end in (ops.max(value), ops.negative(ops.min(value)))]
    return ops.any(ops.isnan(each)), ops.max(ops.stack([cast(end, "float32") for end in ends]))
