"""Buckets: memory for gradients that are sent together, ordered as a backward pass computes them."""

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
    """Memory for gradients that are reduced together, by one all-reduce."""

    places: list[int]
    """The positions of its variables, in the order of their gradients in memory."""

    flat: Tensor
    views: dict[int, Tensor]
    """The part of `flat` for each gradient, by position."""

    wide: Tensor
    results: dict[int, Tensor]
    """The reduced gradients, by position: parts of `wide`, a copy of `flat` in the variables' dtype if that differs."""

    divisor: int
    factor: float
    """The number that divides gradients before sending, and the number that multiplies their sum."""

    num_missing: int = 0
    """The number of gradients that the running backward pass has not yet computed."""

    can_resend = True
    """Whether gradients still exist after sending, and can be sent again."""

    num_under_way = 2**31
    """The maximum number of buckets that are sent and not yet received."""

    transfer: Any = None
    """The object that encodes gradients in the current reduction (`update/transport.py`). None without a codec."""

    failure: str = ""
    """A description of a failure on this rank before sending."""

    @property
    def sent(self) -> list[tuple[Kind, Sequence[Tensor]]]:
        """The collectives that send this bucket, each with its tensors, or with tensors of the same sizes."""
        return [("all_reduce", [self.flat])]

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """The tensors with the gradients sent and with the results."""
        return self.flat, self.wide

    def local_nonfinite(self) -> list[int]:
        """Return no positions: the caller can check the gradients, because they still exist after sending."""
        return []

    @property
    def flags(self) -> Tensor:
        """This rank's flags (`side_channel.py`). After the reduction, the sums of all ranks' flags."""
        return self.flat[self.wide.numel() :]

    def open(self) -> None:
        """Nothing to do: this bucket has its own memory."""

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
        """Nothing to do: gradients are sent as they are."""

    def send(self) -> Any:
        return dist.all_reduce(self.flat, dist.ReduceOp.SUM, async_op=True)

    def receive(self, adds: bool = False) -> None:
        """Fill `results` from the reduced `flat`."""
        del adds
        if self.results is not self.views:
            self.wide.copy_(self.flat[: self.wide.numel()])
            if self.factor != 1:
                self.wide.mul_(self.factor)

    def finish(self) -> None:
        """Nothing to do: `receive` fills the results."""

    def release(self) -> None:
        """Nothing to do: the next reduction uses the memory again."""

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
    """Group tensors into flat buckets of about `bucket_bytes`. The last bucket ends with space for `num_flags` flags.

    Flags, such as the position of a non-finite gradient, are reduced with the gradients.
    """
    bucket_bytes = largest_bucket(sum(tensor.nbytes for tensor in tensors), bucket_bytes)
    # Sort buckets in the order in which a backward pass fills them, because they are sent in this order.
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
        # For a mean, divide before sending: this saves a pass, and the sum overflows only if the mean does.
        divisor, factor = factors(op, num_ranks, divides=op == "mean" or sent != like.dtype)
        buckets.append(FlatBucket(places, flat, views, wide, results, divisor, factor))
    return buckets


def _split(flat: Tensor, places: Sequence[int], tensors: Sequence[Tensor]) -> dict[int, Tensor]:
    parts = flat.split([tensors[i].numel() for i in places])
    return {i: part.view(tensors[i].shape) for i, part in zip(places, parts)}
