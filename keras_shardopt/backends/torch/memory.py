"""Slices of weights as views of the weights' memory, so an optimizer can update a slice without copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from keras_shardopt.backends.torch.communicator import TorchProcessGroup
from keras_shardopt.backends.torch.held import tensor_of, values_of
from keras_shardopt.backends.torch.process_group import _all_gather, naming_missing_ranks, wait_for
from keras_shardopt.backends.traffic import note
from keras_shardopt.numerics import Tensor, Variable


@torch.no_grad()
def alias_slices(parts: Sequence[tuple[Variable, Variable, int, int]]) -> None:
    """Let each slice variable share memory with its slice of a weight. If that is impossible, copy the values.

    `parts` has tuples of the slice variable, its weight, and the start and end of the slice in the flattened weight.
    """
    own, wholes = values_of([part[0] for part in parts]), values_of([part[1] for part in parts])
    for part, whole, (_, _, start, stop) in zip(own, wholes, parts):
        if whole.is_contiguous():
            # Share memory, so updating the slice updates the weight. Repeat this in each update, because functions such
            # as `Module.to` can have moved the weight to other memory.
            part.data = whole.data.view(-1)[start:stop]
        else:
            part.copy_(whole.reshape(-1)[start:stop])


@torch.no_grad()
def assign_slices(variable: Variable, slices: Sequence[Tensor]) -> None:
    """Assign to a variable the concatenation of flat slices."""
    whole = tensor_of(variable)
    if not whole.is_contiguous():
        whole.copy_(torch.cat(list(slices)).view(whole.shape))
        return
    start = 0
    for values in slices:
        whole.data.view(-1)[start : start + values.numel()].copy_(values)
        start += values.numel()


class Together:
    """Moves weights into one contiguous block of `size` elements, so an all-gather writes all slices in place."""

    def __init__(self, variables: Sequence[Variable], size: int) -> None:
        self._variables = list(variables)
        self._size = size
        self._flat: Tensor | None = None

    @torch.no_grad()
    def flat(self) -> Tensor | None:
        """Return the block of memory, with the weights in it. None if weights share memory with other tensors."""
        tensors = values_of(self._variables)
        if self._flat is not None and _lie_in(self._flat, tensors):
            return self._flat
        if not all(t.is_contiguous() and _has_own_memory(t) for t in tensors):
            return None
        self._flat = tensors[0].detach().new_zeros(self._size)
        start = 0
        for tensor in tensors:
            part = self._flat[start : start + tensor.numel()]
            part.copy_(tensor.reshape(-1))
            tensor.data = part.view(tensor.shape)
            setattr(tensor, _MOVED_TO, self._flat.untyped_storage().data_ptr())
            start += tensor.numel()
        return self._flat

    @torch.no_grad()
    def room(self, row: int, own: Tensor) -> Tensor:
        """Return a new tensor for an all-gather, with a row per rank: `own` at index `row`, zeros elsewhere."""
        made = own.detach().new_zeros(self._size)
        made.view(-1, own.numel())[row].copy_(own)
        return made


_MOVED_TO = "_keras_shardopt_moved_to"


def _has_own_memory(tensor: Tensor) -> bool:
    """Return whether the tensor shares its memory with no other tensor, except with weights in the same `Together`."""
    memory = tensor.untyped_storage()
    return memory.nbytes() == tensor.nbytes or getattr(tensor, _MOVED_TO, None) == memory.data_ptr()


def together(replicas: Any, variables: Sequence[Variable], size: int) -> Together | None:
    """Return a `Together` of these variables, or None if the replicas cannot gather slices into its memory."""
    return Together(variables, size) if isinstance(replicas, TorchProcessGroup) else None


def _lie_in(flat: Tensor, tensors: Sequence[Tensor]) -> bool:
    address, size = flat.data_ptr(), flat.element_size()
    for tensor in filter(torch.Tensor.numel, tensors):
        if tensor.data_ptr() != address or not tensor.is_contiguous() or tensor.dtype != flat.dtype:
            return False
        address += size * tensor.numel()
    return True


class Gathering:
    """Runs all-gathers of weight slices: begins several, then waits for all."""

    def __init__(self, replicas: TorchProcessGroup) -> None:
        self._replicas = replicas
        self._under_way: list[Any] = []

    @torch.compiler.disable
    @torch.no_grad()
    def begin(self, flat: Tensor, group: Any = None) -> None:
        """Begin an in-place all-gather of `flat`, in which each rank has filled its own slice.

        `group` is another process group of the same ranks, or None for the group of the replicas.
        """
        rows = flat.view(self._replicas.num_replicas, -1)
        own, group = rows[self._replicas.replica_id], group or self._replicas._process_group
        note("all_gather", [own], self._replicas.num_replicas)
        if dist.get_backend(group) == "gloo":
            # Broadcast each row instead: gloo's all-gather allocates an array of this size and copies twice (PyTorch
            # 2.13). Broadcasts write in place, in 40 % of the CPU time.
            for rank, row in zip(self._replicas.members, rows):
                with naming_missing_ranks(self._under_way):
                    self._under_way.append(dist.broadcast(row, rank, group=group, async_op=True))
            return
        with naming_missing_ranks(self._under_way):
            self._under_way.append(_all_gather(flat, own, group=group, async_op=True))

    @torch.compiler.disable
    def finish(self) -> None:
        for number in range(len(self._under_way)):
            with naming_missing_ranks(self._under_way):
                wait_for(self._under_way[number])
