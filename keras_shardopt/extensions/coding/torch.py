"""Gradients that are sent coded, several at a time, in reductions of more than one collective.

One bucket is under way while the next one is filled. When that is full, the second collective of the one before begins,
and then its own first; what is left begins when the backward pass is over. So all ranks begin the same collectives in
the same order, whenever each of them does.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from keras_shardopt.backends.communicator import largest_bucket
from keras_shardopt.backends.torch.communicator import alike_in_buckets
from keras_shardopt.backends.torch.flat_bucket import CALL
from keras_shardopt.backends.torch.nonfinite import is_sum_finite
from keras_shardopt.backends.torch.process_group import explaining_failures, wait_for
from keras_shardopt.backends.traffic import Kind
from keras_shardopt.numerics import ReduceOp, Tensor


class CodedBucket:
    """What is reduced at one time.

    Args:
        ranks: a `TorchProcessGroup`.
        number: which of the buckets it is.
        places: which variables' gradients.
        op: "sum" or "mean".
        flags: what is sent along as it is; after the reduction its sum.
        under_way: for each bucket that is sent what to wait for.
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
        """What has failed, after which other ranks wait for what was to be sent."""
        self.transfer: Any = None
        """Codes the gradients of this step: `legs_of(places, grads, along, op)` yields collectives."""
        self.sent: list[tuple[Kind, Sequence[Tensor]]] = []
        """The collectives of the last reduction, and what they were given, until `release`."""
        self.results: dict[int, Tensor] = {}
        self._grads: dict[int, Tensor] = {}
        self._legs: Generator[tuple[Kind, Sequence[Tensor]], list[Tensor], list[Tensor]] | None = None
        self._next: tuple[Kind, Sequence[Tensor]] | None = None  # the collective that is to begin
        self._come: Callable[[], list[Tensor]] | None = None  # holds no collective, or connections stay open

    def open(self) -> None:
        """It has no memory."""

    def put(self, i: int, grad: Tensor | None, weight: float) -> None:
        """Takes this variable's gradient; what is not sent of it yet waits where it is None."""
        self._grads.pop(i, None)
        if grad is not None:
            self._grads[i] = grad if weight == 1 else grad * weight

    def encode(self) -> None:
        """Codes the gradients. What is raised here is no failure of a collective."""
        grads, self._grads = [self._grads.get(i) for i in self.places], {}
        self.sent = []
        along = [self.flags] if self.flags.numel() else []
        self._legs = self.transfer.legs_of(self.places, grads, along, self._op)
        self._code(None)

    def send(self) -> Any:
        """Begins the reduction, and returns what to wait for."""
        assert self._next is not None
        (kind, tensors), self._next = self._next, None
        self.sent.append((kind, tensors))
        work, self._come = self._ranks.begin(kind, tensors)
        return work

    def receive(self, adds: bool = False) -> None:
        """Begins the next collective, now that the first one has ended."""
        del adds
        self._go_on()

    def finish(self) -> None:
        """Begins those that are left, and fills `results` and `flags`."""
        while self._come is not None:
            with explaining_failures(self._under_way, CALL):
                wait_for(self._under_way[self._number])
            self._go_on()

    def release(self) -> None:
        """Lets go of what the last reduction has left here."""
        self.sent, self.results, self._grads = [], {}, {}
        self.transfer = self._legs = self._next = self._come = None

    def _go_on(self) -> None:
        assert self._come is not None
        self._code(self._come())
        if self._next is not None:
            with explaining_failures(self._under_way, CALL):
                self._under_way[self._number] = self.send()

    def _code(self, come: Any) -> None:
        """Makes what the next collective sends, or the results, of what has come of the last one."""
        assert self._legs is not None
        try:
            self._next = self._legs.send(come)
        except StopIteration as end:
            self._legs = self._come = None
            self.results = dict(zip(self.places, end.value))
            for total in end.value[len(self.places) :]:
                self.flags.copy_(total)
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
            self.failure = f"coding them has failed on this rank, so that others wait for them ({words})"
            raise

    def own_not_finite(self) -> list[int]:
        """Nothing is noted of gradients that are still there."""
        return []

    def is_finite(self) -> Tensor:
        """Whether the sums of squares of `results` are: a scalar bool tensor."""
        return torch.stack([is_sum_finite(result) for result in self.results.values()]).all()


def coded(
    ranks: Any, tensors: Sequence[Tensor], bucket_bytes: float, op: ReduceOp, num_flags: int, under_way: list[Any]
) -> list[CodedBucket]:
    """Buckets for the gradients of these tensors; along with the last one some flags are sent."""
    bucket_bytes = largest_bucket(sum(tensor.nbytes for tensor in tensors), bucket_bytes)
    # The one that is full last goes last, as the others may not overtake it.
    groups = sorted(alike_in_buckets(tensors, reversed(range(len(tensors))), bucket_bytes), key=min, reverse=True)
    made = []
    for number, places in enumerate(groups):
        more = num_flags if number == len(groups) - 1 else 0
        flags = torch.zeros(more, dtype=torch.float32, device=tensors[places[0]].device)
        made.append(CodedBucket(ranks, number, places, op, flags, under_way))
    return made
