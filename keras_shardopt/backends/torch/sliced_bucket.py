"""Gradients of which each rank gets its slices: those of a bucket are cut into as many chunks as there are ranks.

Gradients are laid into memory that the buckets share, and let go. Of all of them a rank holds its slices of the sums,
and besides them two buckets: one that is filled, and one that is under way (and what comes of it).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from keras_shardopt.backends.compression import dtype_sent, factors
from keras_shardopt.backends.torch import communicator
from keras_shardopt.backends.torch.nonfinite import is_sum_finite
from keras_shardopt.backends.traffic import Kind
from keras_shardopt.numerics import ReduceOp, Tensor, dtype_of

Pieces = Sequence[Sequence[tuple[int, int, int]]]
"""For each rank what it owns: variable, first element, the one after the last."""


@dataclasses.dataclass(frozen=True)
class Slices:
    """How gradients are cut."""

    buckets: Sequence[tuple[Sequence[int], Pieces]]
    """Of each bucket the variables, and who owns what of them."""

    shapes: dict[int, Any]
    """Of each variable the shape of this rank's slice."""


class SlicedBucket:
    """What is reduced at one time.

    Args:
        room: the memory that it shares with others.
        number: which of them it is.
        like: a tensor with the dtype and device of its variables.
        places: which variables.
        pieces: who owns what of them.
        shapes: of each variable the shape of this rank's slice.
        op: "sum" or "mean".
        rank: which one this is.
        compression: as of `Buckets`.
        num_flags: how many flags are sent along.
        checks_finite: whether to note which gradients are not finite.
    """

    can_resend = False
    num_under_way = 1
    transfer: Any = None
    failure = ""

    def __init__(
        self,
        room: Room,
        number: int,
        like: Tensor,
        places: Sequence[int],
        pieces: Pieces,
        shapes: dict[int, Any],
        op: ReduceOp,
        rank: int,
        compression: str | None,
        num_flags: int,
        checks_finite: bool,
    ) -> None:
        self._room = room
        self._number = number
        self.places = list(places)
        self._num_ranks = len(pieces)
        self._checks_finite = checks_finite
        sizes = [sum(stop - start for _, start, stop in mine) for mine in pieces]
        chunk = max(sizes)
        sent = getattr(torch, dtype_sent(dtype_of(like), compression))
        self.flags = torch.zeros(num_flags, dtype=sent, device=like.device)
        self._own = torch.zeros(chunk + num_flags, dtype=sent, device=like.device)
        self.wide = self._own[:chunk]
        if sent != like.dtype:
            self.wide = torch.zeros(chunk, dtype=like.dtype, device=like.device)
        # Sums are divided, which have fewer elements; but gradients where the dtype that is sent might overflow.
        self._divisor, self._factor = factors(op, self._num_ranks, divides=sent != like.dtype)
        self.num_missing = 0
        # Where each gradient goes in what is sent: first element there, first and last of the gradient.
        self._targets: dict[int, list[tuple[int, int, int]]] = {i: [] for i in places}
        self._unused: list[tuple[int, int]] = []
        own: dict[int, Tensor] = {}
        for r, mine in enumerate(pieces):
            start = at = r * (chunk + num_flags)
            for i, first, last in mine:
                self._targets[i].append((at, first, last))
                if r == rank:
                    own[i] = self.wide[at - start : at - start + last - first]
                at += last - first
            self._unused.append((at, start + chunk))
        self.results = {i: own.get(i, self.wide[:0]).view(shapes[i]) for i in places}
        """This rank's slice of each, after the reduction."""
        self._flat: Tensor | None = None
        self._filled: set[int] = set()
        self._waiting: dict[int, Tensor] = {}
        self._extremes: dict[int, Tensor] = {}

    @property
    def sent(self) -> list[tuple[Kind, Sequence[Tensor]]]:
        """By which collective it is sent, and something as large."""
        kind: Kind = "all_to_all" if dist.get_backend() == "gloo" else "reduce_scatter"
        return [(kind, [self._own.expand(self._num_ranks, -1)])]

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """Where results lie."""
        return self._own, self.wide

    def open(self) -> None:
        """Gives it the memory that gradients are laid into."""
        size = self._num_ranks * self._own.numel()
        self._flat = self._room.take(("sent", self._number % 2), size, self._own)
        self._filled = set()
        waiting, self._waiting = self._waiting, {}
        for i, grad in waiting.items():
            self._lay(i, grad)

    def put(self, i: int, grad: Tensor | None, weight: float) -> None:
        """Lays this variable's gradient there, as soon as there is memory for it; zeros for None."""
        self._extremes.pop(i, None)
        if grad is None:
            self._filled.discard(i)
            self._waiting.pop(i, None)
            return
        grad = grad.to_dense() if grad.is_sparse else grad
        grad = (grad if weight == 1 else grad * weight).reshape(-1)
        if self._checks_finite and grad.numel():  # while it is there
            self._extremes[i] = torch.stack(grad.aminmax())
        if self._flat is None:
            self._waiting[i] = grad
        else:
            self._lay(i, grad)

    def _lay(self, i: int, grad: Tensor) -> None:
        assert self._flat is not None
        self._filled.add(i)
        for at, first, last in self._targets[i]:
            target = self._flat[at : at + last - first]
            if self._divisor == 1:
                target.copy_(grad[first:last])
            else:
                torch.div(grad[first:last], self._divisor, out=target)

    def encode(self) -> None:
        """Gradients are sent as they lie there."""

    def send(self) -> Any:
        """Begins the reduction, and returns what to wait for."""
        flat = self._flat
        assert flat is not None
        for i, targets in self._targets.items():
            if i not in self._filled:
                for at, first, last in targets:
                    flat[at : at + last - first].zero_()
        for start, stop in self._unused:
            if stop > start:
                flat[start:stop].zero_()
        if self.flags.numel():
            flat.view(self._num_ranks, -1)[:, self.wide.numel() :] = self.flags
        if dist.get_backend() != "gloo":
            return communicator._reduce_scatter(self._own, flat, dist.ReduceOp.SUM, async_op=True)
        # Whose own reduce-scatter is an all-reduce of which a part is kept: twice the bytes (PyTorch 2.13).
        return dist.all_to_all_single(self._room.take("come", flat.numel(), flat), flat, async_op=True)

    def receive(self, adds: bool = False) -> None:
        """Fills `results` and `flags`, now that all is there.

        Args:
            adds: bool. Whether it comes on top of what `results` hold.
        """
        self._flat = None
        num_elements = self.wide.numel()
        before = self.wide.clone() if adds else None
        if dist.get_backend() == "gloo":
            size = self._num_ranks * self._own.numel()
            _add_up(self._room.take("come", size, self._own).view(self._num_ranks, -1), self._own)
        self.flags.copy_(self._own[num_elements:])
        if self._own.dtype != self.wide.dtype:
            self.wide.copy_(self._own[:num_elements])
            if self._factor != 1:
                self.wide.mul_(self._factor)
        elif self._factor != 1:
            self.wide.div_(self._num_ranks)
        if before is not None:
            self.wide.add_(before)

    def finish(self) -> None:
        """`receive` has filled them."""

    def release(self) -> None:
        """Its memory is kept for the next reduction."""

    def is_finite(self) -> Tensor:
        """Whether the sum of squares of `results` is: a scalar bool tensor."""
        return is_sum_finite(self.wide)

    def own_not_finite(self) -> list[int]:
        """Of which variables this rank's own gradient was not finite."""
        return [i for i, extremes in self._extremes.items() if not bool(extremes.isfinite().all())]


def _add_up(rows: Tensor, total: Tensor) -> None:
    if rows.dtype not in (torch.float32, torch.float64):  # is added up in more digits
        torch.sum(rows, 0, out=total)
        return
    torch.add(rows[0], rows[1], out=total)  # the same bits as a sum, in a third of its time
    for row in rows[2:]:
        total.add_(row)


class Room:
    """Memory for the buckets that are filled and under way."""

    def __init__(self) -> None:
        self._held: dict[Any, Tensor] = {}

    def take(self, what: Any, size: int, like: Tensor) -> Tensor:
        """So many elements, which whoever asks next for the same gets too."""
        key = what, like.dtype, like.device
        if key not in self._held or self._held[key].numel() < size:
            self._held[key] = torch.empty(size, dtype=like.dtype, device=like.device)
        return self._held[key][:size]


def cut_up(
    tensors: Sequence[Tensor],
    slices: Slices,
    op: ReduceOp,
    rank: int,
    compression: str | None,
    num_flags: int,
    checks_finite: bool,
) -> list[SlicedBucket]:
    """Buckets for the gradients of these tensors; along with the last one some flags are sent."""
    room = Room()
    # The one that is full last goes last, as the others may not overtake it.
    buckets = sorted(slices.buckets, key=lambda bucket: min(bucket[0]), reverse=True)
    made = []
    for number, (places, pieces) in enumerate(buckets):
        more = num_flags if number == len(buckets) - 1 else 0
        shapes = {i: slices.shapes[i] for i in places}
        like = tensors[places[0]]
        made.append(
            SlicedBucket(room, number, like, places, pieces, shapes, op, rank, compression, more, checks_finite)
        )
    return made
