"""Norms of gradients and what of them is not finite, in the fastest way that the backend has."""

from __future__ import annotations

from collections.abc import Sequence

from keras import ops

from keras_shardopt import numerics
from keras_shardopt.backends import for_backend
from keras_shardopt.numerics import Tensor, cast, in_float32

# Where small tensors take longer through Keras than their arithmetic does.
_direct = for_backend({"torch": "keras_shardopt.backends.torch.norms"})
# Where masks as large as a gradient are slow to make.
_looks = for_backend(
    {
        "torch": "keras_shardopt.backends.torch.nonfinite",
        "jax": "keras_shardopt.backends.jax.nonfinite",
        "tensorflow": "keras_shardopt.backends.tensorflow.nonfinite",
    }
)


def global_norm(values: Sequence[Tensor | None]) -> Tensor:
    """See `numerics.global_norm`."""
    given = [value for value in values if value is not None]
    if _direct is None or not given or not _direct.are_plain(given):
        return numerics.global_norm(values)
    found: Tensor = _direct.global_norm(given)
    return found


def norms(values: Sequence[Tensor], dtype: str) -> Tensor:
    """The norm of each tensor as `numerics.norm` finds it, in one vector of this dtype."""
    if _direct is not None:
        values = _direct.values_of(values)
    if _direct is None or not _direct.are_plain(values):
        values = [ops.stop_gradient(value) for value in values]  # nobody differentiates an update
        return ops.stack([cast(numerics.norm(value), dtype) for value in values])
    found: Tensor = _direct.norms(values, dtype)
    return found


def bounded(values: Tensor, low: float, high: float | None) -> Tensor:
    """Not below `low`, nor above `high`; NaN stays NaN."""
    if _direct is not None:
        found: Tensor = values.clamp(low, high)
        return found
    # Bounds as tensors, which have the dtype.
    values = ops.maximum(values, ops.full_like(values, low))
    return values if high is None else ops.minimum(values, ops.full_like(values, high))


def ones_where(chosen: Tensor, values: Tensor) -> Tensor:
    """1 where a bool is true, and the value elsewhere."""
    if _direct is not None:
        found: Tensor = values.masked_fill(chosen, 1)
        return found
    return ops.where(chosen, ops.ones_like(values), values)


def unstacked(vector: Tensor, length: int) -> list[Tensor]:
    """Its elements as scalars."""
    return list(ops.unstack(vector, length) if _direct is None else vector.unbind())


def are_finite(values: Sequence[Tensor]) -> Tensor:
    """For each tensor, whether all elements are finite: a vector of bools."""
    is_plain = _direct is None or (_direct.are_plain(values) and not any(0 in value.shape for value in values))
    if _looks is None or not is_plain:
        return ops.stack([ops.all(ops.isfinite(value)) for value in values])
    found: Tensor = _looks.are_finite(values)
    return found


def are_surely_finite(values: Sequence[Tensor]) -> bool:
    """Whether all elements are known to be finite, in one pass; False also where that is not known so soon."""
    return _looks is not None and _direct is not None and _direct.are_plain(values) and _looks.are_surely_finite(values)


def any_not_finite(values: Sequence[Tensor]) -> Tensor | None:
    """Whether an element is not finite, a scalar bool; None where `largest` finds that as fast."""
    return ops.logical_not(ops.all(are_finite(values))) if _direct is None and _looks is not None else None


def largest(values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Whether an element is NaN, and the largest absolute value (undefined where one is NaN): bool and float32.

    Of tensors with elements, one at least.
    """
    if _direct is not None and _looks is not None and _direct.are_plain(values):
        found: tuple[Tensor, Tensor] = _looks.largest(values)
        return found
    # In passes that only read: `isnan` and `abs` of a gradient would be as large as the gradient. A norm is NaN where
    # an element is, and only there; what the largest of elements is with a NaN among them differs between frameworks.
    each = ops.stack([cast(ops.norm(ops.reshape(in_float32(value), (-1,))), "float32") for value in values])
    ends = [end for value in values for end in (ops.max(value), ops.negative(ops.min(value)))]
    return ops.any(ops.isnan(each)), ops.max(ops.stack([cast(end, "float32") for end in ends]))
