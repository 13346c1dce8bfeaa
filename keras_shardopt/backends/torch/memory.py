"""Slices of weights in the memory of the weights, so that an update of a slice copies nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from keras_shardopt.backends.torch import communicator
from keras_shardopt.backends.torch.communicator import TorchProcessGroup, _tensor
from keras_shardopt.backends.torch.held import values_of
from keras_shardopt.backends.torch.process_group import explaining_failures, wait_for
from keras_shardopt.backends.traffic import note
from keras_shardopt.numerics import Tensor, Variable


@torch.no_grad()
def alias_slices(parts: Sequence[tuple[Variable, Variable, int, int]]) -> None:
    """Gives stand-ins for slices of flattened variables the values that these have now.

    Args:
        parts: the stand-ins, their variables, and where slices start and stop in them.
    """
    own, wholes = values_of([part[0] for part in parts]), values_of([part[1] for part in parts])
    for part, whole, (_, _, start, stop) in zip(own, wholes, parts):
        if whole.is_contiguous():
            # The same memory: an update of the slice is one of the weights. Each time anew, as a module may have
            # got other memory in between.
            part.data = whole.data.view(-1)[start:stop]
        else:
            part.copy_(whole.reshape(-1)[start:stop])


@torch.no_grad()
def assign_slices(variable: Variable, slices: Sequence[Tensor]) -> None:
    """Assigns flat slices that, joined, are the whole variable."""
    whole = _tensor(variable)
    if not whole.is_contiguous():
        whole.copy_(torch.cat(list(slices)).view(whole.shape))
        return
    start = 0
    for values in slices:
        whole.data.view(-1)[start : start + values.numel()].copy_(values)
        start += values.numel()


class Together:
    """Weights that lie in one memory, one after another, so that slices of all of them are gathered where they belong.

    Args:
        variables: whose.
        size: how many elements that memory has, at least as many as they have together.
    """

    def __init__(self, variables: Sequence[Variable], size: int) -> None:
        self._variables = list(variables)
        self._size = size
        self._flat: Tensor | None = None

    @torch.no_grad()
    def flat(self) -> Tensor | None:
        """The memory, into which they are moved when they lie elsewhere; None where they share theirs with others."""
        tensors = values_of(self._variables)
        if self._flat is not None and _lie_in(self._flat, tensors):
            return self._flat
        if not all(t.is_contiguous() and _is_apart(t) for t in tensors):
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
        """As large a memory by itself, with something in one of the rows that it is made of."""
        made = own.detach().new_zeros(self._size)
        made.view(-1, own.numel())[row].copy_(own)
        return made


_MOVED_TO = "_keras_shardopt_moved_to"


def _is_apart(tensor: Tensor) -> bool:
    """Whether nobody but another optimizer's `Together` has something in its memory."""
    memory = tensor.untyped_storage()
    return memory.nbytes() == tensor.nbytes or getattr(tensor, _MOVED_TO, None) == memory.data_ptr()


def together(replicas: Any, variables: Sequence[Variable], size: int) -> Together | None:
    """The weights of these variables in one memory; None where replicas cannot gather there."""
    return Together(variables, size) if isinstance(replicas, TorchProcessGroup) else None


def _lie_in(flat: Tensor, tensors: Sequence[Tensor]) -> bool:
    address, size = flat.data_ptr(), flat.element_size()
    for tensor in filter(torch.Tensor.numel, tensors):
        if tensor.data_ptr() != address or not tensor.is_contiguous() or tensor.dtype != flat.dtype:
            return False
        address += size * tensor.numel()
    return True


class Gathering:
    """Exchanges of slices that are under way.

    Args:
        replicas: whose.
    """

    def __init__(self, replicas: TorchProcessGroup) -> None:
        self._replicas = replicas
        self._under_way: list[Any] = []

    @torch.compiler.disable
    @torch.no_grad()
    def begin(self, flat: Tensor) -> None:
        """Begins to fill a tensor, of which each rank has its part, with those of the others."""
        rows = flat.view(self._replicas.num_replicas, -1)
        own, group = rows[self._replicas.replica_id], self._replicas._process_group
        note("all_gather", [own], self._replicas.num_replicas)
        if dist.get_backend(group) == "gloo":
            # Whose all-gather makes an array as large as `flat` first, and copies twice (PyTorch 2.13): 2.5 times the
            # time of the CPU of as many broadcasts, which write where they are to.
            for rank, row in zip(self._replicas.members, rows):
                with explaining_failures(self._under_way):
                    self._under_way.append(dist.broadcast(row, rank, group=group, async_op=True))
            return
        with explaining_failures(self._under_way):
            self._under_way.append(communicator._all_gather(flat, own, group=group, async_op=True))

    @torch.compiler.disable
    def finish(self) -> None:
        """Waits for all."""
        for number in range(len(self._under_way)):
            with explaining_failures(self._under_way):
                wait_for(self._under_way[number])
