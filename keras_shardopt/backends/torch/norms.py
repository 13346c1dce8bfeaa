"""Norms on PyTorch, in few calls and passes that only read.

Through `keras.ops` each of them takes longer than the arithmetic of a small tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import keras
import torch

from keras_shardopt.backends.torch import held
from keras_shardopt.numerics import Tensor

_SMALL = 2**12
"""With how many elements it does not matter where squares lie."""

_WHOLE = 2**20
"""How many elements are squared before they are added up, on a CPU: as many as stay in its cache."""


def are_plain(values: Sequence[Any]) -> bool:
    """Whether all are tensors of PyTorch that hold each element."""
    return all(torch.is_tensor(value) and value.layout == torch.strided for value in values)


def values_of(things: Sequence[Any]) -> list[Any]:
    """The values of variables, and everything else as it is."""
    variables = [thing for thing in things if isinstance(thing, keras.Variable)]
    values = iter(held.values_of(variables))
    return [next(values) if isinstance(thing, keras.Variable) else thing for thing in things]


def sum_of_squares(value: Tensor) -> Tensor:
    """Of all elements, in float32 (float64 of float64)."""
    # Not `torch.linalg.vector_norm` or `torch.dot`, which add up one by one: wrong by 7e-4 with 16.8 million elements.
    value = value.detach()
    if value.numel() <= _SMALL and value.dtype == torch.float32:
        return torch.square(value).sum()
    if value.device.type != "cpu" or not value.is_contiguous():
        return torch.square(_wide(value)).sum()
    flat = value.view(-1)
    if flat.numel() <= _WHOLE:
        return _sum_of_squares(_wide(flat))
    return torch.stack([_sum_of_squares(_wide(part)) for part in flat.split(_WHOLE)]).sum()


class _Rooms(threading.local):
    """Where squares lie on a CPU, whose system gives out memory slowly."""

    def __init__(self) -> None:
        self._by_dtype: dict[torch.dtype, Tensor] = {}

    def get(self, dtype: torch.dtype, size: int) -> Tensor:
        room = self._by_dtype.get(dtype)
        if room is None or room.numel() < size or room.is_inference():
            room = self._by_dtype[dtype] = torch.empty(size, dtype=dtype, device="cpu")
        return room[:size]


_rooms = _Rooms()


def _sum_of_squares(value: Tensor) -> Tensor:
    room = _rooms.get(value.dtype, value.numel())
    return torch.mul(value, value, out=room).sum()


def global_norm(values: Sequence[Tensor]) -> Tensor:
    """See `keras_shardopt.numerics.global_norm`."""
    squares = [sum_of_squares(value) for value in values]
    widest = torch.float64 if any(square.dtype == torch.float64 for square in squares) else torch.float32
    squares = squares if widest == torch.float32 else [square.to(widest) for square in squares]
    return torch.stack(squares).sum().sqrt()


def norms(values: Sequence[Tensor], dtype: str) -> Tensor:
    """That of each tensor, in one vector."""
    wanted = getattr(torch, dtype)
    squares = [sum_of_squares(value) for value in values]
    if all(square.dtype == wanted for square in squares):
        return torch.stack(squares).sqrt()
    return torch.stack([square.sqrt().to(wanted) for square in squares])


def _wide(value: Tensor) -> Tensor:
    return value if value.dtype == torch.float64 else value.to(torch.float32)
