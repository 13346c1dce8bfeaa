"""Memory in which gradients travel, several at a time: in the order in which a backward pass makes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from keras_shardopt.backends.compression import dtype_sent, factors
from keras_shardopt.backends.torch.communicator import in_buckets
from keras_shardopt.numerics import ReduceOp, Tensor, dtype_of

_MIN_BUCKETS = 4
"""Into how many buckets gradients are divided at least,"""

_SMALL_BYTES = 2**20
"""unless they would become smaller than this."""


@dataclasses.dataclass
class FlatBucket:
    """What is reduced at one time."""

    places: list[int]
    """Which variables' gradients, in the order in which they lie there."""

    flat: Tensor
    views: dict[int, Tensor]
    """Where each of them lies in `flat`."""

    wide: Tensor
    results: dict[int, Tensor]
    """The same after the reduction, in the dtype of the variables: elsewhere where that is not what is sent."""

    divisor: int
    factor: float
    """By what gradients are divided before they are sent, and their sum is multiplied."""

    num_missing: int = 0
    """How many of them are still to come."""

    def put(self, i: int, grad: Tensor | None, weight: float) -> None:
        """Lays this variable's gradient there; zeros for None."""
        view = self.views[i]
        if grad is None:
            view.zero_()
            return
        grad = grad.to_dense() if grad.is_sparse else grad
        grad = grad if weight == 1 else grad * weight
        if self.divisor == 1:
            view.copy_(grad)
        else:
            torch.div(grad, self.divisor, out=view)

    def widen(self) -> None:
        """Fills `results`, now that `flat` is reduced."""
        if self.results is not self.views:
            self.wide.copy_(self.flat[: self.wide.numel()])
            if self.factor != 1:
                self.wide.mul_(self.factor)

    def is_finite(self) -> Tensor:
        """Whether the sum of `results` is: a scalar bool tensor. It is in one pass, and not where an element is not."""
        dtype = self.wide.dtype if self.wide.dtype == torch.float64 else torch.float32
        return self.wide.sum(dtype=dtype).isfinite()


def laid_out(
    tensors: Sequence[Tensor],
    bucket_bytes: float,
    op: ReduceOp,
    num_ranks: int,
    compression: str | None,
    num_flags: int,
) -> list[FlatBucket]:
    """Buckets for the gradients of these tensors; in the last one is room for some flags, at the end."""
    # Of what is in the last one, nothing is sent early.
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    bucket_bytes = min(bucket_bytes, max(num_bytes / _MIN_BUCKETS, _SMALL_BYTES))
    # The one that is full last goes last, as the others may not overtake it.
    groups = sorted(in_buckets(tensors, bucket_bytes, reversed(range(len(tensors)))), key=min, reverse=True)
    buckets = []
    for number, places in enumerate(groups):
        size = sum(tensors[i].numel() for i in places)
        more = num_flags if number == len(groups) - 1 else 0
        like = tensors[places[0]]
        sent = getattr(torch, dtype_sent(dtype_of(like), compression))
        flat = torch.zeros(size + more, dtype=sent, device=like.device)
        wide = flat[:size]
        views = results = _cut(wide, places, tensors)
        if sent != like.dtype:
            wide = torch.zeros(size, dtype=like.dtype, device=like.device)
            results = _cut(wide, places, tensors)
        # A mean is divided on the way, which spares a pass; and a sum overflows only where the mean does.
        divisor, factor = factors(op, num_ranks, divides=op == "mean" or sent != like.dtype)
        buckets.append(FlatBucket(places, flat, views, wide, results, divisor, factor))
    return buckets


def _cut(flat: Tensor, places: Sequence[int], tensors: Sequence[Tensor]) -> dict[int, Tensor]:
    parts = flat.split([tensors[i].numel() for i in places])
    return {i: part.view(tensors[i].shape) for i, part in zip(places, parts)}
