"""Differentiable sums over ranks, for layers that normalize with the rows of all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from keras_shardopt.backends.torch.process_group import naming_missing_ranks, statistics_group, wait_for
from keras_shardopt.numerics import Tensor


class _Summed(torch.autograd.Function):
    """The sum of a tensor over ranks. Its gradient is the sum of all ranks' gradients, as if all losses were added."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, counts: bool) -> Tensor:
        ctx.counts = counts
        total = mine.contiguous().clone()
        statistics_group()
        with naming_missing_ranks(call="exchanges the statistics of a batch"):
            # Do not assign the group to a local name: after an error, this frame would keep its connections open.
            wait_for(dist.all_reduce(total, group=statistics_group(), async_op=True))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        # Replace gradients of rows that do not count. A product with zero would keep NaN.
        return _Summed.apply(grad if ctx.counts else torch.zeros_like(grad), True), None


def summed(mine: Tensor, counts: bool) -> Tensor:
    """Return the sum of the ranks' equal-shaped tensors. All ranks call it and run its backward pass together.

    `counts` is false if this rank's loss does not count. The gradient of `mine` is then zero.
    """
    total: Tensor = _Summed.apply(mine, counts)
    return total
