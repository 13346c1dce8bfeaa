"""Replicas on PyTorch: the ranks of `torch.distributed`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from keras_shardopt.backends.communicator import Communicator, GradientState, in_buckets
from keras_shardopt.backends.torch.ddp import DDPs
from keras_shardopt.backends.torch.group_failures import GroupFailures
from keras_shardopt.backends.torch.process_group import (
    EXCHANGE,
    _all_gather,
    naming_missing_ranks,
    wait_for,
)
from keras_shardopt.backends.traffic import Kind, note
from keras_shardopt.numerics import Gradients, Groups, ReduceOp, Tensor, Variable

BUCKET_BYTES = 25 * 2**20
"""The default size limit of a bucket of gradients that are sent together, as in PyTorch's DDP."""


# PyTorch 2.13 renamed this function, and the old name warns.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TorchProcessGroup(Communicator):
    """The ranks of the default process group, or of a group that `split` made."""

    is_spmd = False
    is_multi_process = True

    def __init__(self) -> None:
        self.num_replicas = dist.get_world_size()
        self.replica_id = dist.get_rank()
        # Keep a weak reference, because a group that outlives `destroy_process_group` crashes the interpreter at exit.
        self._default_group = weakref.ref(dist.group.WORLD)
        self._process_group: Any = None
        self._groups_by_ranks: dict[tuple[tuple[int, ...], ...], TorchProcessGroup] = {}
        self.ddps = DDPs()
        self.failures = GroupFailures()

    @torch.compiler.disable
    def split(self, groups: Groups) -> Communicator:
        """Return the communicator of this rank's group. All ranks must make the first call together."""
        key = tuple(tuple(sorted(ranks)) for ranks in groups)
        if len(key) == 1:
            return self
        if key not in self._groups_by_ranks:
            with naming_missing_ranks():
                made = [dist.new_group(list(ranks)) for ranks in key]
            number = next(i for i, ranks in enumerate(key) if self.replica_id in ranks)
            part: Any = super().split(groups)
            part.replica_id, part._process_group = key[number].index(self.replica_id), made[number]
            self._groups_by_ranks[key] = part
        return self._groups_by_ranks[key]

    def are_current(self) -> bool:
        """Return whether this object's process group is still the default process group."""
        group = self._default_group()
        return group is not None and group is dist.group.WORLD

    def forget_groups(self) -> None:
        """Release the groups that `split` made, because they are destroyed with the default group."""
        self._groups_by_ranks.clear()

    @property
    def _joint_call(self) -> str:
        return EXCHANGE if self._process_group is None else ""

    @torch.compiler.disable
    def gradient_state(self, grads: Gradients, variables: Sequence[Variable]) -> GradientState:
        return GradientState.GLOBAL if self.ddps.have_reduced(variables[0]) else GradientState.LOCAL

    @torch.compiler.disable
    @torch.no_grad()
    def all_reduce(self, tensors: Sequence[Tensor], op: ReduceOp) -> list[Tensor]:
        reduce = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
        result: list[Tensor] = [None] * len(tensors)
        flats = []
        under_way: list[Any] = []
        for indices in buckets_by_dtype(tensors, range(len(tensors)), BUCKET_BYTES):
            flat = torch.cat([_dense(tensors[i]).reshape(-1) for i in indices])
            note("all_reduce", [flat], self.num_replicas)
            with naming_missing_ranks(under_way):
                under_way.append(dist.all_reduce(flat, reduce, group=self._process_group, async_op=True))
            flats.append((indices, flat))
        for number, (indices, flat) in enumerate(flats):
            with naming_missing_ranks(under_way):
                wait_for(under_way[number], call=self._joint_call)
            if op == "mean":
                flat.div_(self.num_replicas)
            for i, part in zip(indices, flat.split([tensors[i].numel() for i in indices])):
                result[i] = part.view(tensors[i].shape)
        return result

    @torch.compiler.disable
    @torch.no_grad()
    def reduce_scatter(self, tensors: Sequence[Tensor], op: ReduceOp) -> list[Tensor]:
        parts = [self._scattered(tensor.contiguous()) for tensor in tensors]
        return [part.div_(self.num_replicas) for part in parts] if op == "mean" else parts

    def _scattered(self, tensor: Tensor) -> Tensor:
        group, size = self._process_group, self.num_replicas
        if dist.get_backend(group) == "gloo":
            # Use an all-to-all: gloo runs a reduce-scatter as an all-reduce, with twice the bytes (PyTorch 2.13).
            gathered = torch.empty_like(tensor)
            note("all_to_all", [tensor], size)
            with naming_missing_ranks():
                wait_for(dist.all_to_all_single(gathered, tensor, group=group, async_op=True), call=self._joint_call)
            return gathered.view(size, -1).sum(0)
        part = tensor.new_empty(tensor.numel() // size)
        note("reduce_scatter", [tensor], size)
        with naming_missing_ranks():
            _reduce_scatter(part, tensor, dist.ReduceOp.SUM, group=group)
        return part

    @torch.compiler.disable
    @torch.no_grad()
    def all_to_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return self._run("all_to_all", tensors)

    @torch.compiler.disable
    @torch.no_grad()
    def all_gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return self._run("all_gather", tensors)

    def _run(self, kind: Kind, tensors: Sequence[Tensor]) -> list[Tensor]:
        note(kind, tensors, self.num_replicas)
        under_way: list[Any] = []
        with naming_missing_ranks(under_way):
            work, result = self.begin(kind, tensors)
            under_way.append(work)
            del work  # or this frame would keep its connections open after a failure
            wait_for(under_way[0], call=self._joint_call)
        return result()

    @torch.no_grad()
    def begin(self, kind: Kind, tensors: Sequence[Tensor]) -> tuple[Any, Callable[[], list[Tensor]]]:
        """Begin an all-to-all, all-gather or all-reduce sum.

        Return the pending collective for `wait_for`, and a function that returns the result after the wait.
        """
        group, size = self._process_group, self.num_replicas
        if kind == "all_reduce":
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            work = dist.all_reduce(flat, dist.ReduceOp.SUM, group=group, async_op=True)
            parts = flat.split([tensor.numel() for tensor in tensors])
            return work, (lambda: [part.view(t.shape) for part, t in zip(parts, tensors)])
        # Send the bytes of all tensors together. In an all-to-all, the bytes for rank 0 come first.
        rows = [_bytes(tensor).view(size if kind == "all_to_all" else 1, -1) for tensor in tensors]
        sent = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
        received = sent.new_empty(size, sent.shape[1])
        run = dist.all_to_all_single if kind == "all_to_all" else _all_gather
        work = run(received.view(-1), sent.view(-1), group=group, async_op=True)
        return work, (lambda: _joined(received, rows, tensors))

    @torch.compiler.disable
    @torch.no_grad()
    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> list[Tensor]:
        result: list[Tensor] = [None] * len(tensors)
        for indices in buckets_by_dtype(tensors, range(len(tensors)), BUCKET_BYTES):
            # Send bytes, because they work for all dtypes and preserve all bits.
            flat = torch.cat([_bytes(tensors[i]) for i in indices])
            with naming_missing_ranks():
                wait_for(dist.broadcast(flat, self.members[root], group=self._process_group, async_op=True))
            sizes = [tensors[i].numel() * tensors[i].element_size() for i in indices]
            for i, part in zip(indices, flat.split(sizes)):
                result[i] = part.clone().view(tensors[i].dtype).view(tensors[i].shape)
        return result

    def broadcast_object(self, thing: Any, root: int) -> Any:
        """Return rank `root`'s picklable object on every rank."""
        things = [thing]
        with naming_missing_ranks():
            dist.broadcast_object_list(things, root)
        return things[0]


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def _bytes(tensor: Tensor) -> Tensor:
    # Add a dimension, because an empty tensor from NumPy has a stride of 0, which PyTorch cannot view as bytes.
    return tensor.detach().contiguous().unsqueeze(-1).view(torch.uint8).reshape(-1)


def _joined(received: Tensor, rows: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Concatenate each tensor's slices from all ranks. `received` has a row per rank: the bytes of its slices."""
    parts = received.split([row.shape[1] for row in rows], 1)
    return [part.reshape(-1).view(tensor.dtype) for part, tensor in zip(parts, tensors)]


def buckets_by_dtype(tensors: Sequence[Tensor], order: Iterable[int], bucket_bytes: float) -> Iterator[list[int]]:
    """Group the positions of tensors, given in `order`, by dtype and device, at most `bucket_bytes` bytes per group."""
    alike: dict[Any, list[int]] = {}
    for i in order:
        alike.setdefault((tensors[i].dtype, tensors[i].device), []).append(i)
    num_bytes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    for positions in alike.values():
        yield from in_buckets(num_bytes, positions, bucket_bytes)
