"""Describes the part of the data that one process gets: every n-th row or batch, with n processes."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of one process: every `num_parts`-th item of a sequence, starting at position `index`."""

    num_parts: int
    index: int

    @property
    def slice(self) -> slice:
        """The slice that selects this part's items from a sequence."""
        return slice(self.index, None, self.num_parts)

    def size(self, total: int) -> int:
        """Returns how many of `total` items belong to this part."""
        return len(range(self.index, total, self.num_parts))

    def check_enough(self, total: int, things: str) -> None:
        """Raises ValueError if there are fewer items than processes. `things` names the items in the error message."""
        if total < self.num_parts:
            raise ValueError(
                f"`x` must have at least as many {things} as there are processes. "
                f"Received: {total} {things} for {self.num_parts} processes. Use more data or fewer processes."
            )


def permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the integers 0 to `size - 1` in a random order that is the same on all processes."""
    return np.random.default_rng([seed, epoch]).permutation(size)


@contextlib.contextmanager
def same_random_numbers(*key: int, generators: Sequence[Any] = ()) -> Iterator[None]:
    """Seeds the global random generators and PyTorch's `generators` with `key`. Restores the states after the block."""
    seed = int(np.random.SeedSequence(key).generate_state(1)[0])
    torch = sys.modules.get("torch")
    generators = [*generators, *([] if torch is None else [torch.default_generator])]
    before = random.getstate(), np.random.get_state(), [generator.get_state() for generator in generators]
    random.seed(seed)
    np.random.seed(seed)
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        for generator, state in zip(generators, before[2]):
            generator.set_state(state)
