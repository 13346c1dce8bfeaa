"""Buckets (groups of gradients) that are encoded and reduced during the backward pass, with several collectives each.

The second collective of a bucket starts when the next bucket is full, and later collectives after the backward pass.
All ranks therefore start the same collectives in the same order, independent of their speed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from keras_shardopt.backends.torch.bucket import Bucket, places_in_order
from keras_shardopt.backends.torch.nonfinite import is_sum_finite
from keras_shardopt.backends.traffic import Kind
from keras_shardopt.numerics import ReduceOp, Tensor


class CodedBucket(Bucket):
    """One bucket: gradients that are encoded and reduced together.

    Args:
        ranks: a `TorchProcessGroup`.
        places: for each gradient of this bucket, the position of its trainable variable.
        op: "sum" or "mean".
        flags: numbers that are summed over ranks without encoding. The reduction replaces them by the sums.
    """

    memory: tuple[Tensor, ...] = ()
    sent: Sequence[tuple[Kind, Sequence[Tensor]]] = ()

    def __init__(self, ranks: Any, places: Sequence[int], op: ReduceOp, flags: Tensor) -> None:
        self._ranks = ranks
        self.places = list(places)
        self.flags = flags
        self._op: ReduceOp = op
        self.results = {}
        self._grads: dict[int, Tensor] = {}
        self._legs: Generator[tuple[Kind, Sequence[Tensor]], list[Tensor], list[Tensor]] | None = None
        self._next: tuple[Kind, Sequence[Tensor]] | None = None  # the next collective to start
        self._receive: Callable[[], list[Tensor]] | None = None  # returns the result of the last `send`

    def put(self, i: int, grad: Tensor | None, weight: float) -> None:
        """Store `grad * weight` of variable `i`. If `grad` is None, the compression error is sent in a later step."""
        self._grads.pop(i, None)
        if grad is not None:
            self._grads[i] = grad if weight == 1 else grad * weight

    def encode(self, transfer: Any) -> None:
        """Encode the gradients. `legs_of` of `transfer`, a `Coded`, yields the collectives."""
        grads, self._grads = [self._grads.get(i) for i in self.places], {}
        self.sent = ()
        along = [self.flags] if self.flags.numel() else []
        self._legs = transfer.legs_of(self.places, grads, along, self._op)
        self._advance(None)

    @property
    def has_more(self) -> bool:
        """Whether the encoder needs another collective, or waits for its result."""
        return self._legs is not None

    def send(self) -> Any:
        """Start the next collective of this bucket."""
        assert self._next is not None
        (kind, tensors), self._next = self._next, None
        self.sent = (*self.sent, (kind, tensors))
        work, self._receive = self._ranks.begin(kind, tensors)
        return work

    def receive(self, adds: bool) -> None:
        """Pass the result of the last collective to the encoder."""
        del adds
        assert self._receive is not None
        self._advance(self._receive())

    def release(self) -> None:
        """Free the tensors of the last reduction."""
        self.sent, self.results, self._grads = (), {}, {}
        self._legs = self._next = self._receive = None

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

    def is_finite(self) -> Tensor:
        """Return a scalar bool tensor: whether the sum of squares of each reduced gradient is finite."""
        return torch.stack([is_sum_finite(result) for result in self.results.values()]).all()


def coded(
    ranks: Any, tensors: Sequence[Tensor], bucket_bytes: float, op: ReduceOp, num_flags: int
) -> list[CodedBucket]:
    """Return a `CodedBucket` for each group of gradients like `tensors`. The last also sums `num_flags` numbers."""
    groups = places_in_order(tensors, bucket_bytes)
    made = []
    for number, places in enumerate(groups):
        more = num_flags if number == len(groups) - 1 else 0
        flags = torch.zeros(more, dtype=torch.float32, device=tensors[places[0]].device)
        made.append(CodedBucket(ranks, places, op, flags))
    return made
