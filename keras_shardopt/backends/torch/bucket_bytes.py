"""Predicts and measures the memory of gradients, and of the buckets in which ranks send gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from keras_shardopt.backends.compression import dtype_sent
from keras_shardopt.backends.torch.sliced_bucket import SlicedBucket, Slices
from keras_shardopt.numerics import Tensor, Variable, dtype_of


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of memory that tensors use. Memory that several tensors share counts once."""
    return sum(_memories(tensors).values())


def _memories(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the number of bytes of each tensor's storage, keyed by address."""
    return {each.data_ptr(): each.nbytes() for each in (tensor.untyped_storage() for tensor in tensors)}


def measured(variables: Sequence[Variable], buckets: Any) -> tuple[int, int]:
    """Return the bytes of the variables' gradients, and the bytes of the memory used to send gradients.

    Args:
        variables: the trainable variables.
        buckets: the `Buckets`, groups of gradients that ranks send together, or None.
    """
    grads = [variable.value.grad for variable in variables]
    kept, sent = [grad for grad in grads if grad is not None and not grad.is_sparse], []
    for bucket in () if buckets is None else buckets:
        if isinstance(bucket, SlicedBucket):
            kept += bucket.memory
            sent += bucket.shared
        else:
            sent += bucket.memory
    sending = _memories(sent)
    return sum(size for place, size in _memories(kept).items() if place not in sending), sum(sending.values())


def predicted(
    num_ranks: int, variables: Sequence[Variable], narrow: str | None, slices: Slices | None
) -> tuple[int, int]:
    """Predict the bytes of memory for this rank's slices of gradients, and for sending gradients.

    Args:
        num_ranks: the number of ranks.
        variables: the trainable variables.
        narrow: the half-precision dtype to send in, or None.
        slices: the slices of each rank if state is sharded, or None.
    """
    tensors = [variable.value for variable in variables]
    sizes = [_item_sizes(tensor, narrow) for tensor in tensors]
    if slices is None:
        return 0, sum(tensor.numel() * sum(each) for tensor, each in zip(tensors, sizes))
    kept, sent = 0, [0, 0]
    for number, (places, pieces) in enumerate(slices.in_order):
        chunk = max(sum(stop - start for _, start, stop in mine) for mine in pieces)
        of_sent, of_wide = sizes[places[0]]
        kept += chunk * (of_sent + of_wide)
        sent[number % 2] = max(sent[number % 2], num_ranks * chunk * of_sent)
    return kept, sum(sent) + (max(sent) if dist.get_backend() == "gloo" else 0)


def _item_sizes(tensor: Tensor, narrow: str | None) -> tuple[int, int]:
    """Return the bytes of an element when sent, and of its copy in the variable's dtype (0 if the dtypes are equal)."""
    sent = getattr(torch, dtype_sent(dtype_of(tensor), narrow))
    return sent.itemsize, tensor.element_size() if sent != tensor.dtype else 0
