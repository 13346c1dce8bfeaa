"""Slices of weights in the memory of the weights, so that an update of a slice copies nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from keras_shardopt.backends.torch.communicator import _tensor
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
