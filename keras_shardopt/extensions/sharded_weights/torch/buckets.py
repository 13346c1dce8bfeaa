"""Weights in buckets: each rank holds 1/N of each bucket, and gathers a bucket while layers use its weights.

Autograd saves a description (`pack`) of gathered values, so a bucket's memory is freed after its last use, and gathered
again by the backward pass.

Ranks must gather in the same order. Each rank records the order of a step. In the next step, a gather in this order
needs no further communication, and begins before it is needed. Other gathers are announced to all ranks.

Private names of PyTorch: `UntypedStorage._cdata` - the address of a storage; `Tensor._version` - counts changes in
place.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from keras_shardopt.backends.torch.memory import Gathering
from keras_shardopt.backends.torch.process_group import announce, another_group
from keras_shardopt.numerics import Tensor

NUM_RECENT = 2
"""The number of buckets that stay in memory after use, so a layer can alternate between two."""

_bucket_of_memory: dict[int, Bucket] = {}
"""The gathered buckets, by the address of their memory in PyTorch."""

place_of_memory: dict[int, tuple[weakref.ref[Bucket], int]] = {}
"""The bucket, and the position in it, of a weight without values, by the address of the weight's memory."""


class Bucket:
    """Weights that are gathered together. `own`: this rank's slice (`chunk` elements). `flat`: all, if gathered."""

    def __init__(self, number: int, gathers: Gathers, path: str, parameters: Sequence[Any], chunk: int) -> None:
        self.number, self.gathers, self.path, self.parameters = number, gathers, path, list(parameters)
        self._chunk = chunk
        self.own = parameters[0].detach().new_zeros(chunk)
        self.flat: Tensor | None = None
        self._gathering: Gathering | None = None
        """The gathering of `flat`, until it has finished."""
        self._version = 0
        """PyTorch's version of `flat` when it was gathered or stored. Changes in place increase it."""

    @torch.no_grad()
    def begin(self) -> None:
        """Begin to gather this bucket."""
        ranks = self.gathers.ranks
        self.flat = self.own.new_empty(ranks.num_replicas * self._chunk)
        self._own_row(self.flat).copy_(self.own)
        self._gathering = Gathering(ranks)
        self._gathering.begin(self.flat, self.gathers.group)

    def finish(self) -> Tensor:
        """Return the gathered values, when all have arrived."""
        flat = self.flat
        assert flat is not None
        if self._gathering is not None:
            self._gathering.finish()
            self._gathering, self._version = None, flat._version
        _bucket_of_memory[flat.untyped_storage()._cdata] = self
        return flat

    def release(self) -> None:
        """Store changes of this rank's slice, and free the gathered values."""
        if self.flat is not None:
            flat = self.finish()
            self.store_changes(flat, self._version)
            del _bucket_of_memory[flat.untyped_storage()._cdata]
            self.flat = None

    @torch.no_grad()
    def store_changes(self, flat: Tensor, version: int) -> None:
        """Store this rank's slice of `flat`, the gathered values, if it was changed in place since `version`."""
        now = flat._version
        if now == version:
            return
        self.own.copy_(self._own_row(flat))
        if self.flat is flat:
            self._version = now
        else:  # if it was gathered again before the change, free the old values
            self.release()

    def _own_row(self, flat: Tensor) -> Tensor:
        row: Tensor = flat.view(-1, self._chunk)[int(self.gathers.ranks.replica_id)]
        return row


class Gathers:
    """Gathers the buckets of an optimizer in the same order on all ranks, `prefetch` of them before they are needed."""

    def __init__(self, ranks: Any, prefetch: int) -> None:
        self.ranks = ranks
        self.buckets: list[Bucket] = []
        self.num_updates = 0
        """The number of updates of the weights. An update outdates values that autograd has saved."""
        self._prefetch = prefetch
        self._group: Any = None
        self._trains = False
        self._orders: dict[bool, list[Bucket]] = {}
        self._order: list[Bucket] | None = None
        self._expected: list[Bucket] = []
        self._recent: list[Bucket] = []

    @property
    def group(self) -> Any:
        """A separate process group for gathers: their order relative to exchanges of gradients can differ by rank."""
        group = None if self._group is None else self._group()
        if group is None:
            group = another_group()
            self._group = weakref.ref(group)
        return group

    def begin_pass(self, trains: bool) -> None:
        """Begin a training step (`trains`) or test step. The step should gather in the order of the last such step."""
        self.release_all()
        self._trains, self._order, self._expected = trains, [], self._orders.get(trains, [])
        self._begin_expected()

    def end_pass(self) -> None:
        """Release all weights, and remember the order of gathers."""
        assert self._order is not None
        self.release_all()
        self._orders[self._trains], self._order, self._expected = self._order, None, []

    def release_all(self) -> None:
        """Free the gathered values of all buckets."""
        self._recent = []
        for bucket in self.buckets:
            bucket.release()

    def gathered(self, bucket: Bucket) -> Tensor:
        """Return the memory of a bucket, gathered over all ranks. All ranks must make the same calls in a step."""
        recent = [each for each in self._recent if each.flat is not None]
        if bucket in recent:
            assert bucket.flat is not None
            return bucket.flat
        at = len(self._order or ())
        if self._expected[at : at + 1] != [bucket]:
            self._expected = []
            numbers = [number for number, _ in announce("gathers a weight", bucket.number)]
            if len(set(numbers)) > 1:
                raise ValueError(
                    "With `ShardedWeights`, all ranks must use the layers in the same order. Received, by rank: the "
                    f"weights {[self.buckets[n].path for n in numbers]}. Remove conditions on the rank or on values "
                    "from `call`."
                )
        if bucket.flat is None:
            bucket.begin()
        flat = bucket.finish()
        if self._order is not None:
            self._order.append(bucket)
        self._recent = [*recent[1 - NUM_RECENT :], bucket]
        kept = [*self._recent, *self._ahead()]
        for other in self.buckets:
            if other not in kept:
                other.release()
        self._begin_expected()
        return flat

    def _ahead(self) -> list[Bucket]:
        at = len(self._order or ())
        return self._expected[at : at + self._prefetch]

    def _begin_expected(self) -> None:
        for bucket in self._ahead():
            if bucket.flat is None:
                bucket.begin()


def pack(tensor: Tensor) -> Any:
    """Return a description of a tensor that autograd saves, if a bucket holds its values; otherwise the tensor."""
    address = tensor.untyped_storage()._cdata
    reference, at = place_of_memory.get(address, (None, 0))
    held = reference() if reference is not None else None
    if held is not None:  # a function of the program saves the weight itself, such as a `torch.autograd.Function`
        return held, held.gathers.num_updates, tensor.shape, torch.empty(tensor.shape, device="meta").stride(), at
    found = _bucket_of_memory.get(address)
    if found is None or found.flat is None or tensor.dtype != found.flat.dtype:
        return tensor
    return found, found.gathers.num_updates, tensor.shape, tensor.stride(), tensor.storage_offset()


def unpack(packed: Any) -> Tensor:
    """Return the tensor that `pack` described. All ranks must call this together."""
    if isinstance(packed, torch.Tensor):
        return packed
    bucket, num_updates, *layout = packed
    if bucket.gathers.num_updates != num_updates:
        raise RuntimeError(
            "A backward pass needs the weights of its forward pass. Received: a backward pass after the weights were "
            "updated. Compute all gradients before `optimizer.apply`."
        )
    return torch.as_strided(bucket.gathers.gathered(bucket), *layout)
