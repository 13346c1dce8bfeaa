"""Slices of weights in the memory of the weights, so that an update of a slice copies nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from keras_shardopt.backends.torch import communicator
from keras_shardopt.backends.torch.communicator import TorchProcessGroup, _tensor
from keras_shardopt.backends.torch.process_group import explaining_failures
from keras_shardopt.numerics import Tensor, Variable


@torch.no_grad()
def alias_slice(stand_in: Variable, variable: Variable, start: int, stop: int) -> None:
    """Gives a stand-in for a slice of a flattened variable the values that the variable has now."""
    whole, part = _tensor(variable), _tensor(stand_in)
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
        tensors = [_tensor(variable) for variable in self._variables]
        if self._flat is not None and _lie_in(self._flat, tensors):
            return self._flat
        if not all(t.is_contiguous() and t.untyped_storage().nbytes() == t.nbytes for t in tensors):
            return None
        self._flat = tensors[0].detach().new_zeros(self._size)
        start = 0
        for tensor in tensors:
            part = self._flat[start : start + tensor.numel()]
            part.copy_(tensor.reshape(-1))
            tensor.data = part.view(tensor.shape)
            start += tensor.numel()
        return self._flat


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


@torch.compiler.disable
@torch.no_grad()
def gather_in_place(replicas: TorchProcessGroup, flats: Sequence[Tensor]) -> None:
    """Fills each tensor, of which each rank has its part, with those of the others."""
    under_way: list[Any] = []
    for flat in flats:
        own = flat.view(replicas.num_replicas, -1)[replicas.replica_id]
        own = own.clone() if dist.get_backend() == "gloo" else own
        with explaining_failures(under_way):
            under_way.append(communicator._all_gather(flat, own, group=replicas._process_group, async_op=True))
    for number in range(len(under_way)):
        with explaining_failures(under_way):
            under_way[number].wait()
