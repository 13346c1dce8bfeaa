"""Sums over ranks that gradients go through, as those of layers that normalise with the rows of all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from keras_shardopt.backends.torch.process_group import explaining_failures, statistics_group, wait_for
from keras_shardopt.numerics import Tensor


class _Summed(torch.autograd.Function):
    """The sum over all ranks. Its gradient is the sum of theirs, as their losses add up to that of the whole batch."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, counts: bool) -> Tensor:
        ctx.counts = counts
        total = mine.contiguous().clone()
        statistics_group()
        with explaining_failures(call="exchanges the statistics of a batch"):
            # Not by names: the frame would hold the connections open when they fail.
            wait_for(dist.all_reduce(total, group=statistics_group(), async_op=True))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        # Not times zero: what comes from rows that do not count may be anything, also NaN.
        return _Summed.apply(grad if ctx.counts else torch.zeros_like(grad), True), None


def summed(mine: Tensor, counts: bool) -> Tensor:
    """The sum of the ranks' tensors of one shape. All ranks call it together, and so they do in their backward passes.

    Args:
        mine: of this rank.
        counts: whether the loss of this rank counts; else its gradient is taken for zero.
    """
    total: Tensor = _Summed.apply(mine, counts)
    return total
