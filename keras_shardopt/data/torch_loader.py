"""This process's part of a `torch.utils.data.DataLoader`.

Private names of PyTorch touched here (test_data.py holds them):
    `DataLoader._iterator` - workers that outlive an epoch, which a copy of a loader must not share.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Iterator
from typing import Any

from keras_shardopt import arguments as check
from keras_shardopt.data.part import Part, drawing_alike, permutation


def part_of_loader(loader: Any, shuffle: bool, seed: int, part: Part) -> Any:
    """A copy of the loader with a sampler, or a stream, of this process's part."""
    data = sys.modules["torch.utils.data"]
    sampler, batch_sampler = loader.sampler, loader.batch_sampler
    for found in samplers_of(loader):
        if isinstance(found, data.DistributedSampler):
            raise ValueError(
                "A `DataLoader` must give all rows, for `shard_data` to split them. Received: one with a "
                f"{type(found).__name__}, which has split them already, and pads or drops rows where they do not "
                "divide. Leave that sampler out, and say `shuffle=True` to the `DataLoader` instead."
            )
    # A copy and not a new loader: every argument stays, also of a subclass. DataLoader forbids to assign.
    mine = copy.copy(loader)
    changed = mine.__dict__
    changed["_iterator"] = None
    if isinstance(loader.dataset, data.IterableDataset):
        if shuffle:
            raise ValueError(
                "`shuffle` is not for a `DataLoader` of an `IterableDataset`, which has rows in its own order only. "
                "Received: shuffle=True. Shuffle inside the dataset, alike on every process."
            )
        # The length for several workers cannot be known: it is each worker's stream that is divided.
        sized = hasattr(loader.dataset, "__len__") and loader.num_workers <= 1
        if sized:
            part.check_enough(len(loader.dataset), "rows")
        changed["dataset"] = (PartOfSizedStream if sized else PartOfStream)(loader.dataset, part)
    elif loader.batch_size is None and batch_sampler is not None:
        changed["batch_sampler"] = PartOfSampler(batch_sampler, "batches", shuffle, seed, part)
    else:
        changed["sampler"] = PartOfSampler(sampler, "rows", shuffle, seed, part)
        if batch_sampler is not None:
            changed["batch_sampler"] = data.BatchSampler(changed["sampler"], loader.batch_size, loader.drop_last)
    return mine


def set_epoch(loader: Any, epoch: int) -> None:
    """Calls `set_epoch(epoch)` of each sampler of a `DataLoader` that has it, as `DistributedSampler` does."""
    for sampler in samplers_of(loader):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def samplers_of(loader: Any) -> list[Any]:
    """The samplers of a `DataLoader`, and those inside them, each once."""
    found: dict[int, Any] = {}
    for sampler in (loader.sampler, loader.batch_sampler):
        while sampler is not None and id(sampler) not in found:
            found[id(sampler)] = sampler
            sampler = getattr(sampler, "sampler", None)
    return list(found.values())


class PartOfSampler:
    """Every n-th of what a sampler draws, drawn alike on every process. Each iteration is an epoch."""

    def __init__(self, sampler: Any, things: str, shuffle: bool, seed: int, part: Part) -> None:
        if not hasattr(sampler, "__len__"):
            raise ValueError(
                "A sampler must have a length, for its part to be known. "
                f"Received: {check.with_article(sampler)} without `__len__`. Add it to the class."
            )
        part.check_enough(len(sampler), things)
        self.sampler, self._shuffle, self._seed, self._part = sampler, shuffle, seed, part
        self._epoch = 0

    def __len__(self) -> int:
        return self._part.size(len(self.sampler))

    def __iter__(self) -> Iterator[Any]:
        found = (self.sampler, getattr(self.sampler, "sampler", None))
        generators = [g for owner in found if (g := getattr(owner, "generator", None)) is not None]
        epoch, self._epoch = self._epoch, self._epoch + 1
        with drawing_alike(self._seed, epoch, generators=generators):
            drawn = list(self.sampler)
        if self._shuffle:
            drawn = [drawn[i] for i in permutation(len(drawn), self._seed, epoch)]
        return iter(drawn[self._part.slice])


class PartOfStream:
    """Every n-th row of an `IterableDataset`. It has the attributes of that, which a `worker_init_fn` may set."""

    _dataset: Any
    _part: Part

    def __init__(self, dataset: Any, part: Part) -> None:
        object.__setattr__(self, "_dataset", dataset)
        object.__setattr__(self, "_part", part)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._dataset), self._part.index, None, self._part.num_parts)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copying and pickling look for is ours
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __reduce__(self) -> Any:
        return type(self), (self._dataset, self._part)


class PartOfSizedStream(PartOfStream):
    """One that knows its length."""

    def __len__(self) -> int:
        return self._part.size(len(self._dataset))
