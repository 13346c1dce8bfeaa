"""Finds the first non-finite gradient of a reduction, and the rank that has sent it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from keras_shardopt.backends.torch.bucket import Bucket
from keras_shardopt.backends.torch.nonfinite import first_not_finite
from keras_shardopt.backends.torch.process_group import naming_missing_ranks
from keras_shardopt.backends.torch.sliced_bucket import SlicedBucket
from keras_shardopt.numerics import ALL_FINITE, UNKNOWN, Gradients, Tensor


def nonfinite_source(
    ranks: Any, buckets: Iterable[Bucket], found: Gradients, own: Callable[[], Gradients]
) -> tuple[int, int, int]:
    """Return (1, rank, position) of the first non-finite gradient, or `ALL_FINITE`, for `Step.found_inf`.

    All ranks must make this call after each reduction.

    Args:
        ranks: the ranks of the default process group (`TorchProcessGroup`).
        buckets: the buckets of the reduction.
        found: the reduced gradients.
        own: returns this rank's gradients. Not called for `SlicedBucket`s, which check gradients before sending.
    """
    buckets = list(buckets)
    device = buckets[-1].flags.device
    # First check one sum per bucket. The sum can overflow on some ranks only, because ranks can add in different
    # orders. So check each element before starting a collective: that result is equal on all ranks.
    is_finite = torch.stack([bucket.is_finite().to(device) for bucket in buckets]).all()
    sliced = [bucket for bucket in buckets if isinstance(bucket, SlicedBucket)]
    if sliced:
        return _source_of_slices(ranks, sliced, found, is_finite)
    if bool(is_finite):
        return ALL_FINITE
    place = first_not_finite(found)
    if not place:
        return ALL_FINITE
    # Find the rank with the bad gradient: check own gradients outside the buckets' memory, which now holds sums.
    mine = first_not_finite([None if _is_kept(grad, buckets) else grad for grad in own()])
    return _source(ranks, mine, place, device)


def _source_of_slices(
    ranks: Any, buckets: list[SlicedBucket], found: Gradients, is_finite: Tensor
) -> tuple[int, int, int]:
    last = len(found) + 1
    some = torch.logical_not(is_finite).to(torch.int32)
    with naming_missing_ranks():
        dist.all_reduce(some, dist.ReduceOp.MAX)
    if not bool(some):
        return ALL_FINITE
    mine = first_not_finite(found)
    first = torch.tensor(last - mine if mine else 0, dtype=torch.int32, device=is_finite.device)
    with naming_missing_ranks():
        dist.all_reduce(first, dist.ReduceOp.MAX)
    if not int(first):
        return ALL_FINITE
    places = [i for bucket in buckets for i in bucket.local_nonfinite()]
    return _source(ranks, min(places) + 1 if places else 0, last - int(first), is_finite.device)


def _source(ranks: Any, mine: int, place: int, device: torch.device) -> tuple[int, int, int]:
    """Return (1, rank, position) of the first non-finite gradient.

    `mine` is its position among this rank's gradients, and `place` among the sums, counted from 1. 0 means none.
    """
    first = torch.zeros(ranks.num_replicas, dtype=torch.int32, device=device)
    first[ranks.replica_id] = mine
    with naming_missing_ranks():
        dist.all_reduce(first)
    places = first.tolist()
    rank = next((rank for rank, theirs in enumerate(places) if theirs), UNKNOWN)
    return 1, rank, (place if rank == UNKNOWN else places[rank]) - 1


def _is_kept(grad: Tensor | None, buckets: list[Bucket]) -> bool:
    if grad is None or grad.is_sparse:
        return False
    memory = grad.untyped_storage().data_ptr()
    return any(memory == t.untyped_storage().data_ptr() for b in buckets for t in b.memory)
