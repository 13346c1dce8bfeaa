"""Memory in which gradients travel, several at a time: in the order in which a backward pass makes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from keras_shardopt.backends.communicator import largest_bucket
from keras_shardopt.backends.compression import dtype_sent, factors
from keras_shardopt.backends.torch.communicator import alike_in_buckets
from keras_shardopt.backends.torch.nonfinite import is_sum_finite
from keras_shardopt.backends.traffic import Kind
from keras_shardopt.numerics import ReduceOp, Tensor, dtype_of

CALL = "reduces the gradients of an update"
"""What ranks that do something else are told of."""


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

    can_resend = True
    """Whether gradients are still there when they are sent, and may be sent once more."""

    num_under_way = 2**31
    """How many buckets may be under way at a time."""

    transfer: Any = None
    """The `Transfer` of this reduction, where buckets need one."""

    failure: str = ""
    """What has failed on this rank before anything was sent, in words."""

    @property
    def sent(self) -> list[tuple[Kind, Sequence[Tensor]]]:
        """By which collective it is sent, and something as large."""
        return [("all_reduce", [self.flat])]

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """Where results lie."""
        return self.flat, self.wide

    def own_not_finite(self) -> list[int]:
        """Nothing is noted of gradients that are still there."""
        return []

    @property
    def flags(self) -> Tensor:
        """What is sent along; after the reduction its sum."""
        return self.flat[self.wide.numel() :]

    def open(self) -> None:
        """It has memory of its own."""

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

    def encode(self) -> None:
        """Gradients are sent as they lie there."""

    def send(self) -> Any:
        """Begins the reduction, and returns what to wait for."""
        return dist.all_reduce(self.flat, dist.ReduceOp.SUM, async_op=True)

    def receive(self, adds: bool = False) -> None:
        """Fills `results`, now that `flat` is reduced."""
        del adds
        if self.results is not self.views:
            self.wide.copy_(self.flat[: self.wide.numel()])
            if self.factor != 1:
                self.wide.mul_(self.factor)

    def finish(self) -> None:
        """`receive` has filled them."""

    def release(self) -> None:
        """Its memory is kept for the next reduction."""

    def is_finite(self) -> Tensor:
        """Whether the sum of squares of `results` is: a scalar bool tensor."""
        return is_sum_finite(self.wide)


def laid_out(
    tensors: Sequence[Tensor],
    bucket_bytes: float,
    op: ReduceOp,
    num_ranks: int,
    compression: str | None,
    num_flags: int,
) -> list[FlatBucket]:
    """Buckets for the gradients of these tensors; in the last one is room for some flags, at the end."""
    bucket_bytes = largest_bucket(sum(tensor.nbytes for tensor in tensors), bucket_bytes)
    # The one that is full last goes last, as the others may not overtake it.
    groups = sorted(alike_in_buckets(tensors, reversed(range(len(tensors))), bucket_bytes), key=min, reverse=True)
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
