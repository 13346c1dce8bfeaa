"""Buckets (gradients that ranks send together) for sharded optimizer state: each rank receives its slices of the sums.

A bucket consists of a chunk for each rank, with that rank's slices. Gradients are copied into memory that buckets
share, and freed. Besides its slices, a rank holds memory for only three things: the bucket being filled, the bucket
being sent, and received data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from keras_shardopt.backends.compression import dtype_sent, factors
from keras_shardopt.backends.torch import communicator
from keras_shardopt.backends.torch.bucket import Bucket
from keras_shardopt.backends.torch.nonfinite import is_sum_finite
from keras_shardopt.backends.traffic import Kind
from keras_shardopt.numerics import ReduceOp, Tensor, dtype_of

Pieces = Sequence[Sequence[tuple[int, int, int]]]
"""For each rank, its parts of gradients: (position of the variable, start and end in the flattened gradient)."""


@dataclasses.dataclass(frozen=True)
class Slices:
    """For each bucket (group of gradients), its variables and each rank's slices. Also this rank's slice shapes."""

    buckets: Sequence[tuple[Sequence[int], Pieces]]
    shapes: dict[int, Any]

    @property
    def in_order(self) -> list[tuple[Sequence[int], Pieces]]:
        """The buckets in the order in which a backward pass fills them, and ranks send them: last variables first."""
        return sorted(self.buckets, key=lambda bucket: min(bucket[0]), reverse=True)


class SlicedBucket(Bucket):
    """A bucket (group of gradients) for sharded optimizer state.

    Args:
        pool: the memory that all buckets share.
        number: the index of this bucket.
        like: a tensor with the dtype and device of the variables.
        places: the positions of the variables.
        pieces: for each rank, its slices of the gradients.
        shapes: by position, the shape of this rank's slice of the variable.
        op: "sum" or "mean".
        rank: this rank.
        compression: the half-precision dtype to send in, or None.
        num_flags: the number of flags to send after the gradients.
        checks_finite: whether to record which gradients are not finite, before the gradients are freed.
    """

    can_resend = False

    def __init__(
        self,
        pool: MemoryPool,
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
        self._pool = pool
        self._number = number
        self.places = list(places)
        self._num_ranks = len(pieces)
        self._checks_finite = checks_finite
        chunk = max(sum(stop - start for _, start, stop in mine) for mine in pieces)
        sent = getattr(torch, dtype_sent(dtype_of(like), compression))
        self.flags = torch.zeros(num_flags, dtype=sent, device=like.device)
        self._own = torch.zeros(chunk + num_flags, dtype=sent, device=like.device)
        self.wide = self._own[:chunk]
        if sent != like.dtype:
            self.wide = torch.zeros(chunk, dtype=like.dtype, device=like.device)
        # For a mean, divide the sums, because this rank's slices have fewer elements than the gradients. In half
        # precision, divide the gradients before sending, because sums could overflow.
        self._divisor, self._factor = factors(op, self._num_ranks, divides=sent != like.dtype)
        self._targets, self._unused = _layout(pieces, places, chunk, num_flags)
        lengths = [stop - start for _, start, stop in pieces[rank]]
        own = dict(zip([i for i, *_ in pieces[rank]], self.wide[: sum(lengths)].split(lengths)))
        self.results = {i: own.get(i, self.wide[:0]).view(shapes[i]) for i in places}
        """This rank's slice of each gradient, after the reduction."""
        self._flat: Tensor | None = None
        self._filled: set[int] = set()
        self._waiting: dict[int, Tensor] = {}
        self._extremes: dict[int, Tensor] = {}

    @property
    def sent(self) -> list[tuple[Kind, Sequence[Tensor]]]:
        kind: Kind = "all_to_all" if dist.get_backend() == "gloo" else "reduce_scatter"
        return [(kind, [self._own.expand(self._num_ranks, -1)])]

    @property
    def memory(self) -> tuple[Tensor, ...]:
        return self._own, self.wide

    @property
    def shared(self) -> list[Tensor]:
        """The memory that all buckets share to send and receive."""
        return list(self._pool.held.values())

    def open(self) -> None:
        """Take a block of the shared memory, and copy into it the gradients that `put` has stored."""
        size = self._num_ranks * self._own.numel()
        self._flat = self._pool.take(("sent", self._number % 2), size, self._own)
        self._filled = set()
        waiting, self._waiting = self._waiting, {}
        for i, grad in waiting.items():
            self._copy(i, grad)

    def put(self, i: int, grad: Tensor | None, weight: float) -> None:
        """Copy a gradient times `weight`, or zeros for None, into the shared memory. Before `open`, only store it."""
        self._extremes.pop(i, None)
        if grad is None:
            self._filled.discard(i)
            self._waiting.pop(i, None)
            return
        grad = grad.to_dense() if grad.is_sparse else grad
        grad = (grad if weight == 1 else grad * weight).reshape(-1)
        if self._checks_finite and grad.numel():  # check now, because the gradient is freed later
            self._extremes[i] = torch.stack(grad.aminmax())
        if self._flat is None:
            self._waiting[i] = grad
        else:
            self._copy(i, grad)

    def _copy(self, i: int, grad: Tensor) -> None:
        assert self._flat is not None
        self._filled.add(i)
        for at, first, last in self._targets[i]:
            target = self._flat[at : at + last - first]
            if self._divisor == 1:
                target.copy_(grad[first:last])
            else:
                torch.div(grad[first:last], self._divisor, out=target)

    def send(self) -> Any:
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
        # Use an all-to-all: gloo runs a reduce-scatter as an all-reduce, with twice the bytes (PyTorch 2.13).
        return dist.all_to_all_single(self._pool.take("received", flat.numel(), flat), flat, async_op=True)

    def receive(self, adds: bool) -> None:
        self._flat = None
        num_elements = self.wide.numel()
        before = self.wide.clone() if adds else None
        if dist.get_backend() == "gloo":
            size = self._num_ranks * self._own.numel()
            _sum_rows(self._pool.take("received", size, self._own).view(self._num_ranks, -1), self._own)
        self.flags.copy_(self._own[num_elements:])
        if self._own.dtype != self.wide.dtype:
            self.wide.copy_(self._own[:num_elements])
            if self._factor != 1:
                self.wide.mul_(self._factor)
        elif self._factor != 1:
            self.wide.div_(self._num_ranks)
        if before is not None:
            self.wide.add_(before)

    def is_finite(self) -> Tensor:
        return is_sum_finite(self.wide)

    def local_nonfinite(self) -> list[int]:
        """Return the positions of this rank's non-finite gradients, which were freed after sending."""
        return [i for i, extremes in self._extremes.items() if not bool(extremes.isfinite().all())]


def _layout(
    pieces: Pieces, places: Sequence[int], chunk: int, num_flags: int
) -> tuple[dict[int, list[tuple[int, int, int]]], list[tuple[int, int]]]:
    """Return where the parts of each gradient lie in the memory that is sent, and the unused end of each rank's chunk.

    A part is (offset in the memory, start and end in the flattened gradient); an unused end is (start, end).
    """
    targets: dict[int, list[tuple[int, int, int]]] = {i: [] for i in places}
    unused = []
    for rank, mine in enumerate(pieces):
        start = at = rank * (chunk + num_flags)
        for i, first, last in mine:
            targets[i].append((at, first, last))
            at += last - first
        unused.append((at, start + chunk))
    return targets, unused


def _sum_rows(rows: Tensor, total: Tensor) -> None:
    if rows.dtype not in (torch.float32, torch.float64):  # `torch.sum` adds half precision in float32
        torch.sum(rows, 0, out=total)
        return
    torch.add(rows[0], rows[1], out=total)  # bitwise equal to `torch.sum`, in a third of its time
    for row in rows[2:]:
        total.add_(row)


class MemoryPool:
    """The memory that sliced buckets share, for the buckets being filled, sent and received."""

    def __init__(self) -> None:
        self.held: dict[Any, Tensor] = {}

    def take(self, purpose: Any, size: int, like: Tensor) -> Tensor:
        """Return memory of `size` elements, of the dtype of `like`. Calls for the same purpose get the same memory."""
        key = purpose, like.dtype, like.device
        if key not in self.held or self.held[key].numel() < size:
            self.held[key] = torch.empty(size, dtype=like.dtype, device=like.device)
        return self.held[key][:size]


def sliced_buckets(
    tensors: Sequence[Tensor],
    slices: Slices,
    op: ReduceOp,
    rank: int,
    compression: str | None,
    num_flags: int,
    checks_finite: bool,
) -> list[SlicedBucket]:
    """Return a `SlicedBucket` per bucket in `slices`. The last also sends flags: whether a rank still trains, etc."""
    pool = MemoryPool()
    made = []
    for number, (places, pieces) in enumerate(slices.in_order):
        more = num_flags if number == len(slices.buckets) - 1 else 0
        shapes = {i: slices.shapes[i] for i in places}
        like = tensors[places[0]]
        made.append(
            SlicedBucket(pool, number, like, places, pieces, shapes, op, rank, compression, more, checks_finite)
        )
    return made
