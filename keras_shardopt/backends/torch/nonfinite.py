"""Finite checks on PyTorch, in few calls that only reduce.

`isfinite` of a gradient would create a tensor of the gradient's size, and that is slow. Instead, these functions check
the smallest and largest element (both NaN if any element is), or a sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from keras_shardopt.numerics import Gradients, Tensor

_CACHED = 2**20
"""The number of elements that fit into a CPU's cache."""


def is_sum_finite(value: Tensor) -> Tensor:
    """Return a scalar bool tensor: whether the sum of squares is finite. False also if the sum overflows."""
    flat = value.reshape(-1)
    if flat.dtype not in (torch.float32, torch.float64):
        flat = flat.to(torch.float32)
    return torch.dot(flat, flat).isfinite()  # on a CPU, three times as fast as a plain sum


def are_surely_finite(values: Sequence[Tensor]) -> bool:
    """Return whether one fast pass shows that all elements are finite. False for tensors on an accelerator."""
    is_readable = all(value.device.type == "cpu" and value.dtype == torch.float32 for value in values)
    if not values or not is_readable or torch.compiler.is_compiling():
        return False
    flat = [value.detach().reshape(-1) for value in values]
    return bool(torch.stack([torch.dot(each, each) for each in flat]).sum().isfinite())


def first_not_finite(grads: Gradients) -> int:
    """Return the position, counted from 1, of the first non-finite gradient. 0 if all are finite."""
    for i, grad in enumerate(grads):
        values = grad.coalesce().values() if grad is not None and grad.is_sparse else grad
        if values is not None and values.numel() and not bool(are_finite([values])):
            return i + 1
    return 0


def are_finite(values: Sequence[Tensor]) -> Tensor:
    """Return a vector with one bool per tensor: whether all its elements are finite. No tensor may be empty."""
    lows, highs = _extremes_of(values)
    return lows.isfinite() & highs.isfinite()


def largest(values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return whether any element is NaN, and the largest absolute value."""
    lows, highs = _extremes_of(values)
    amax = torch.maximum(-lows, highs).amax().to(torch.float32)
    return amax.isnan(), amax


def _extremes_of(values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    widest = torch.float64 if any(value.dtype == torch.float64 for value in values) else torch.float32
    pairs = [_extremes(value.detach()) for value in values]
    if any(value.dtype != widest for value in values):
        pairs = [(low.to(widest), high.to(widest)) for low, high in pairs]
    return torch.stack([low for low, _ in pairs]), torch.stack([high for _, high in pairs])


def _extremes(value: Tensor) -> tuple[Tensor, Tensor]:
    if value.device.type == "cpu" and value.numel() <= _CACHED:
        return value.amin(), value.amax()  # faster than `aminmax` if the tensor is in the cache
    low, high = torch.aminmax(value)
    return low, high
