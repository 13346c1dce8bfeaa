"""Selects this process's part of a `torch.utils.data.DataLoader`.

Private names of PyTorch touched here (test_data.py checks that each exists):
    `DataLoader._iterator` - persistent workers, which a copy of a loader must not share.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Iterator
from typing import Any

from keras_shardopt import arguments as check
from keras_shardopt.data.part import Part, permutation, same_random_numbers


def part_of_loader(loader: Any, shuffle: bool, seed: int, part: Part) -> Any:
    """Returns a copy of the loader that yields this process's part of the rows."""
    data = sys.modules["torch.utils.data"]
    sampler, batch_sampler = loader.sampler, loader.batch_sampler
    for found in samplers_of(loader):
        if isinstance(found, data.DistributedSampler):
            raise ValueError(
                f"`shard_data` splits rows, but the sampler {type(found).__name__} has already split them, and pads or "
                "drops rows. Received: a `DataLoader` with that sampler. Leave the sampler out, and pass "
                "`shuffle=True` to the `DataLoader`."
            )
    # Copy the loader, to keep all its arguments. Set entries of `vars`, because `DataLoader` forbids some assignments.
    mine = copy.copy(loader)
    changed = mine.__dict__
    changed["_iterator"] = None
    if isinstance(loader.dataset, data.IterableDataset):
        if shuffle:
            raise ValueError(
                "`shuffle` is not for a `DataLoader` of an `IterableDataset`, because such a dataset cannot be "
                "reordered. Received: shuffle=True. Shuffle inside the dataset, in the same order on every process."
            )
        # With several workers, each yields a part of its own stream of unknown length, so the total is unknown.
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
    """Calls `set_epoch(epoch)` on each sampler of a `DataLoader` that has this method, such as `DistributedSampler`."""
    for sampler in samplers_of(loader):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def samplers_of(loader: Any) -> list[Any]:
    """Returns the samplers of a `DataLoader` and the samplers inside them, each once."""
    found: dict[int, Any] = {}
    for sampler in (loader.sampler, loader.batch_sampler):
        while sampler is not None and id(sampler) not in found:
            found[id(sampler)] = sampler
            sampler = getattr(sampler, "sampler", None)
    return list(found.values())


class PartOfSampler:
    """This process's items of a sampler: every n-th item, with n processes. Each call of `iter` begins an epoch.

    Every process draws all items of the sampler, in the same order, and keeps its part.
    """

    def __init__(self, sampler: Any, things: str, shuffle: bool, seed: int, part: Part) -> None:
        if not hasattr(sampler, "__len__"):
            raise ValueError(
                "A sampler must have a length, because `shard_data` computes each process's part from the length. "
                f"Received: {check.with_article(sampler)} without `__len__`. Add `__len__` to the class."
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
        with same_random_numbers(self._seed, epoch, generators=generators):
            drawn = list(self.sampler)
        if self._shuffle:
            drawn = [drawn[i] for i in permutation(len(drawn), self._seed, epoch)]
        return iter(drawn[self._part.slice])


class PartOfStream:
    """This process's rows of an `IterableDataset`: every n-th row, with n processes.

    Attributes are read from the dataset and set on it, because a user's `worker_init_fn` may set them.
    """

    _dataset: Any
    _part: Part

    def __init__(self, dataset: Any, part: Part) -> None:
        object.__setattr__(self, "_dataset", dataset)
        object.__setattr__(self, "_part", part)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._dataset), self._part.index, None, self._part.num_parts)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `copy` and `pickle` must find the special methods of this class only
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __reduce__(self) -> Any:
        return type(self), (self._dataset, self._part)


class PartOfSizedStream(PartOfStream):
    """This process's rows of an `IterableDataset` that has a length."""

    def __len__(self) -> int:
        return self._part.size(len(self._dataset))
