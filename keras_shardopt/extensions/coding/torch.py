"""Buckets (groups of gradients) that are encoded and reduced during the backward pass, with several collectives each.

The second collective of a bucket starts when the next bucket is full, and later collectives after the backward pass.
All ranks therefore start the same collectives in the same order, independent of their speed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from keras_shardopt.backends.communicator import largest_bucket
from keras_shardopt.backends.torch.communicator import buckets_by_dtype
from keras_shardopt.backends.torch.nonfinite import is_sum_finite
from keras_shardopt.backends.torch.process_group import UPDATE, naming_missing_ranks, wait_for
from keras_shardopt.backends.traffic import Kind
from keras_shardopt.numerics import ReduceOp, Tensor


class CodedBucket:
    """One bucket: gradients that are encoded and reduced together.

    Args:
        ranks: a `TorchProcessGroup`.
        number: int. The index of this bucket in `under_way`.
        places: for each gradient of this bucket, the position of its trainable variable.
        op: "sum" or "mean".
        flags: numbers that are summed over ranks without encoding. The reduction replaces them by the sums.
        under_way: for each bucket, the handle of its running collective (a `torch.distributed.Work`).
    """

    can_resend = True
    num_under_way = 1
    memory: tuple[Tensor, ...] = ()

    def __init__(
        self, ranks: Any, number: int, places: Sequence[int], op: ReduceOp, flags: Tensor, under_way: list[Any]
    ) -> None:
        self._ranks = ranks
        self._number = number
        self._under_way = under_way
        self.places = list(places)
        self.flags = flags
        self._op: ReduceOp = op
        self.num_missing = 0
        self.failure = ""
        """The text of an encoding error, to add to the error of the training step; empty without an error."""
        self.transfer: Any = None
        """The `Coded` object of this step. Its method `legs_of` encodes this bucket and yields the collectives."""
        self.sent: list[tuple[Kind, Sequence[Tensor]]] = []
        """The collectives of the last reduction as (kind, tensors). `release` empties this list."""
        self.results: dict[int, Tensor] = {}
        self._grads: dict[int, Tensor] = {}
        self._legs: Generator[tuple[Kind, Sequence[Tensor]], list[Tensor], list[Tensor]] | None = None
        self._next: tuple[Kind, Sequence[Tensor]] | None = None  # the next collective to start
        self._receive: Callable[[], list[Tensor]] | None = None  # returns the result of the last `send`

    def open(self) -> None:
        """Do nothing, because this bucket has no buffer to prepare."""

    def put(self, i: int, grad: Tensor | None, weight: float) -> None:
        """Store `grad * weight` of variable `i`. If `grad` is None, the compression error is sent in a later step."""
        self._grads.pop(i, None)
        if grad is not None:
            self._grads[i] = grad if weight == 1 else grad * weight

    def encode(self) -> None:
        """Encode the gradients. Separate from `send`, so an encoding error is not reported as a failed collective."""
        grads, self._grads = [self._grads.get(i) for i in self.places], {}
        self.sent = []
        along = [self.flags] if self.flags.numel() else []
        self._legs = self.transfer.legs_of(self.places, grads, along, self._op)
        self._advance(None)

    def send(self) -> Any:
        """Start the next collective of this bucket. Return its handle, a `torch.distributed.Work`."""
        assert self._next is not None
        (kind, tensors), self._next = self._next, None
        self.sent.append((kind, tensors))
        work, self._receive = self._ranks.begin(kind, tensors)
        return work

    def receive(self, adds: bool) -> None:
        """Take the result of the finished collective, and start the next one. `adds`, for other buckets, is ignored."""
        del adds
        self._start_next()

    def finish(self) -> None:
        """Run the remaining collectives of this bucket. Store reduced gradients in `results`, and sums in `flags`."""
        while self._receive is not None:
            with naming_missing_ranks(self._under_way, UPDATE):
                wait_for(self._under_way[self._number], call=UPDATE)
            self._start_next()

    def release(self) -> None:
        """Free the tensors of the last reduction."""
        self.sent, self.results, self._grads = [], {}, {}
        self.transfer = self._legs = self._next = self._receive = None

    def _start_next(self) -> None:
        assert self._receive is not None
        self._advance(self._receive())
        if self._next is not None:
            with naming_missing_ranks(self._under_way, UPDATE):
                self._under_way[self._number] = self.send()

    def _advance(self, received: Any) -> None:
        """Use the result of the last collective to compute the tensors of the next one, or the reduced gradients."""
        assert self._legs is not None
        try:
            self._next = self._legs.send(received)
        except StopIteration as end:
            self._legs = self._receive = None
            self.results = dict(zip(self.places, end.value))
            for total in end.value[len(self.places) :]:
                self.flags.copy_(total)
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
            self.failure = f"`compression` failed on this rank, and the other ranks still wait ({words})"
            raise

    def local_nonfinite(self) -> list[int]:
        """Return an empty list: this bucket does not overwrite gradients, so the caller can find non-finite ones."""
        return []

    def is_finite(self) -> Tensor:
        """Return a scalar bool tensor: whether the sum of squares of each reduced gradient is finite."""
        return torch.stack([is_sum_finite(result) for result in self.results.values()]).all()


def coded(
    ranks: Any, tensors: Sequence[Tensor], bucket_bytes: float, op: ReduceOp, num_flags: int, under_way: list[Any]
) -> list[CodedBucket]:
    """Return a `CodedBucket` for each group of gradients like `tensors`. The last also sums `num_flags` numbers."""
    bucket_bytes = largest_bucket(sum(tensor.nbytes for tensor in tensors), bucket_bytes)
    # The backward pass fills the bucket of the first variable last, so put this bucket last. Buckets are sent in order.
    groups = sorted(buckets_by_dtype(tensors, reversed(range(len(tensors))), bucket_bytes), key=min, reverse=True)
    made = []
    for number, places in enumerate(groups):
        more = num_flags if number == len(groups) - 1 else 0
        flags = torch.zeros(more, dtype=torch.float32, device=tensors[places[0]].device)
        made.append(CodedBucket(ranks, number, places, op, flags, under_way))
    return made
