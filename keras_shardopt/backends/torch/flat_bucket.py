"""Buckets: groups of gradients that ranks send together, in one block of memory, while the backward pass runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from keras_shardopt.backends.communicator import largest_bucket
from keras_shardopt.backends.compression import dtype_sent, factors
from keras_shardopt.backends.torch.communicator import buckets_by_dtype
from keras_shardopt.backends.torch.nonfinite import is_sum_finite
from keras_shardopt.backends.traffic import Kind
from keras_shardopt.numerics import ReduceOp, Tensor, dtype_of


@dataclasses.dataclass
class FlatBucket:
    """A bucket (group of gradients) that one all-reduce sums. Other kinds of buckets have the same methods."""

    places: list[int]
    """The positions of the bucket's variables, in the order of their gradients in memory."""

    flat: Tensor
    views: dict[int, Tensor]
    """The part of `flat` that holds each gradient, by position of the variable."""

    wide: Tensor
    results: dict[int, Tensor]
    """The reduced gradients, by position, as parts of `wide` (memory of `flat`, or a copy in the variables' dtype)."""

    divisor: int
    factor: float
    """`divisor` divides gradients before sending, and `factor` multiplies their sum."""

    num_missing: int = 0
    """The number of gradients that the running backward pass has not yet computed."""

    can_resend = True
    """Whether gradients still exist after sending, and can be sent again."""

    num_under_way = 2**31
    """The maximum number of buckets in transfer at a time. No limit here, because each bucket has its own memory."""

    transfer: Any = None
    """The object that encodes gradients in the current reduction. None if the gradients are sent unencoded."""

    failure: str = ""
    """A description of an error on this rank before sending, or ""."""

    @property
    def sent(self) -> list[tuple[Kind, Sequence[Tensor]]]:
        """The collectives that send this bucket, with their tensors, to count bytes."""
        return [("all_reduce", [self.flat])]

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """The tensors that hold the sent gradients and the results."""
        return self.flat, self.wide

    def local_nonfinite(self) -> list[int]:
        """Return the positions of non-finite gradients among those freed after sending. This class frees none."""
        return []

    @property
    def flags(self) -> Tensor:
        """This rank's flags, such as whether it still trains. After the reduction, the sums of all ranks' flags."""
        return self.flat[self.wide.numel() :]

    def open(self) -> None:
        """Do nothing: this bucket always has its own memory."""

    def put(self, i: int, grad: Tensor | None, weight: float) -> None:
        """Copy a gradient times `weight`, or zeros for None, into the bucket."""
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
        """Do nothing: this bucket sends its gradients unencoded."""

    def send(self) -> Any:
        return dist.all_reduce(self.flat, dist.ReduceOp.SUM, async_op=True)

    def receive(self, adds: bool) -> None:
        """Fill `results` from `flat`, which now holds the reduced gradients. Only other kinds of buckets use `adds`."""
        del adds
        if self.results is not self.views:
            self.wide.copy_(self.flat[: self.wide.numel()])
            if self.factor != 1:
                self.wide.mul_(self.factor)

    def finish(self) -> None:
        """Do nothing: `receive` has filled the results."""

    def release(self) -> None:
        """Do nothing: the next reduction uses the same memory."""

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
    bucket_bytes = largest_bucket(sum(tensor.nbytes for tensor in tensors), bucket_bytes)
    # Sort buckets in the order in which a backward pass fills them: last variables first. They are sent in this order.
    groups = sorted(buckets_by_dtype(tensors, reversed(range(len(tensors))), bucket_bytes), key=min, reverse=True)
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
        buckets.append(FlatBucket(places, flat, views, wide, results, divisor, factor))
    return buckets


def _split(flat: Tensor, places: Sequence[int], tensors: Sequence[Tensor]) -> dict[int, Tensor]:
    parts = flat.split([tensors[i].numel() for i in places])
    return {i: part.view(tensors[i].shape) for i, part in zip(places, parts)}
