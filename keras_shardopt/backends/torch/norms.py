"""Computes norms on PyTorch with few calls: each `keras.ops` call takes longer than the work on a small tensor."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import keras
import torch

from keras_shardopt.backends.torch import held
from keras_shardopt.numerics import Tensor

_SMALL = 2**12
"""Up to this number of elements, allocating memory for the squares takes no noticeable time."""

_WHOLE = 2**20
"""The number of elements squared at a time on a CPU, to stay in its cache."""


def are_plain(values: Sequence[Any]) -> bool:
    """Return whether all values are dense PyTorch tensors."""
    return all(torch.is_tensor(value) and value.layout == torch.strided for value in values)


def values_of(things: Sequence[Any]) -> list[Any]:
    """Replace variables by their tensors."""
    variables = [thing for thing in things if isinstance(thing, keras.Variable)]
    values = iter(held.values_of(variables))
    return [next(values) if isinstance(thing, keras.Variable) else thing for thing in things]


def sum_of_squares(value: Tensor) -> Tensor:
    """Return the sum of the squares of all elements, in float32, or in float64 for a float64 tensor."""
    # Avoid `torch.linalg.vector_norm` and `torch.dot`: they add elements one after another, with a relative error of
    # 7e-4 for 16.8 million elements.
    value = value.detach()
    if value.numel() <= _SMALL and value.dtype == torch.float32:
        return torch.square(value).sum()
    if value.device.type != "cpu" or not value.is_contiguous():
        return torch.square(_wide(value)).sum()
    flat = value.view(-1)
    if flat.numel() <= _WHOLE:
        return _sum_of_squares(_wide(flat))
    return torch.stack([_sum_of_squares(_wide(part)) for part in flat.split(_WHOLE)]).sum()


class _Buffers(threading.local):
    """Memory for the squares of tensors on a CPU. It is reused, because allocation is slow there."""

    def __init__(self) -> None:
        self._by_dtype: dict[torch.dtype, Tensor] = {}

    def get(self, dtype: torch.dtype, size: int) -> Tensor:
        buffer = self._by_dtype.get(dtype)
        if buffer is None or buffer.numel() < size or buffer.is_inference():
            buffer = self._by_dtype[dtype] = torch.empty(size, dtype=dtype, device="cpu")
        return buffer[:size]


_buffers = _Buffers()


def _sum_of_squares(value: Tensor) -> Tensor:
    buffer = _buffers.get(value.dtype, value.numel())
    return torch.mul(value, value, out=buffer).sum()


def global_norm(values: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of all elements of all tensors, with few kernels."""
    squares = [sum_of_squares(value) for value in values]
    widest = torch.float64 if any(square.dtype == torch.float64 for square in squares) else torch.float32
    squares = squares if widest == torch.float32 else [square.to(widest) for square in squares]
    return torch.stack(squares).sum().sqrt()


def norms(values: Sequence[Tensor], dtype: str) -> Tensor:
    """Return the norm of each tensor, in one vector."""
    wanted = getattr(torch, dtype)
    squares = [sum_of_squares(value) for value in values]
    if all(square.dtype == wanted for square in squares):
        return torch.stack(squares).sqrt()
    return torch.stack([square.sqrt().to(wanted) for square in squares])


def _wide(value: Tensor) -> Tensor:
    return value if value.dtype == torch.float64 else value.to(torch.float32)
