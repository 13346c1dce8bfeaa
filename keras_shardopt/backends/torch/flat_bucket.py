"""Buckets for whole gradients: one block of memory each, which one all-reduce sums."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from keras_shardopt.backends.compression import dtype_sent, factors
from keras_shardopt.backends.torch.bucket import Bucket, places_in_order
from keras_shardopt.backends.torch.nonfinite import is_sum_finite
from keras_shardopt.backends.traffic import Kind
from keras_shardopt.numerics import ReduceOp, Tensor, dtype_of


@dataclasses.dataclass
class FlatBucket(Bucket):
    """A bucket (group of gradients) that one all-reduce sums."""

    places: list[int]
    """The positions of the bucket's variables, in the order of their gradients in memory."""

    flat: Tensor
    views: dict[int, Tensor]
    """The part of `flat` that holds each gradient, by position of the variable."""

    wide: Tensor
    results: dict[int, Tensor]
    """The reduced gradients, by position, as parts of `wide` (memory of `flat`, or a copy in the variables' dtype)."""

    flags: Tensor
    divisor: int
    factor: float
    """`divisor` divides gradients before sending, and `factor` multiplies their sum."""

    max_under_way = 2**31  # no limit, because each bucket has its own memory

    @property
    def sent(self) -> list[tuple[Kind, Sequence[Tensor]]]:
        return [("all_reduce", [self.flat])]

    @property
    def memory(self) -> tuple[Tensor, ...]:
        return self.flat, self.wide

    def put(self, i: int, grad: Tensor | None, weight: float) -> None:
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

    def send(self) -> Any:
        return dist.all_reduce(self.flat, dist.ReduceOp.SUM, async_op=True)

    def receive(self, adds: bool) -> None:
        del adds
        if self.results is not self.views:
            self.wide.copy_(self.flat[: self.wide.numel()])
            if self.factor != 1:
                self.wide.mul_(self.factor)

    def is_finite(self) -> Tensor:
        return is_sum_finite(self.wide)


def flat_buckets(
    tensors: Sequence[Tensor],
    bucket_bytes: float,
    op: ReduceOp,
    num_ranks: int,
    compression: str | None,
    num_flags: int,
) -> list[FlatBucket]:
    """Return buckets of about `bucket_bytes` for the gradients of these tensors.

    The last bucket ends with space for `num_flags` flags, such as whether this rank still trains.
    """
    groups = places_in_order(tensors, bucket_bytes)
    buckets = []
    for number, places in enumerate(groups):
        size = sum(tensors[i].numel() for i in places)
        more = num_flags if number == len(groups) - 1 else 0
        like = tensors[places[0]]
        sent = getattr(torch, dtype_sent(dtype_of(like), compression))
        flat = torch.zeros(size + more, dtype=sent, device=like.device)
        wide = flat[:size]
        views = results = _split(wide, places, tensors)
        if sent != like.dtype:
            wide = torch.zeros(size, dtype=like.dtype, device=like.device)
            results = _split(wide, places, tensors)
        # For a mean, divide gradients while copying. That saves a pass, and the sum overflows only if the mean does.
        divisor, factor = factors(op, num_ranks, divides=op == "mean" or sent != like.dtype)
        buckets.append(FlatBucket(places, flat, views, wide, results, flat[size:], divisor, factor))
    return buckets


def _split(flat: Tensor, places: Sequence[int], tensors: Sequence[Tensor]) -> dict[int, Tensor]:
    parts = flat.split([tensors[i].numel() for i in places])
    return {i: part.view(tensors[i].shape) for i, part in zip(places, parts)}
