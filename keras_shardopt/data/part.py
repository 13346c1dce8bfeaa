"""Which rows are this process's part."""

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
    """Every `num_parts`-th of something, from `index` on."""

    num_parts: int
    index: int

    @property
    def slice(self) -> slice:
        """Every `num_parts`-th thing, from this process's own on."""
        return slice(self.index, None, self.num_parts)

    def size(self, total: int) -> int:
        """How many of `total` things belong to this part."""
        return len(range(self.index, total, self.num_parts))

    def check_enough(self, total: int, things: str) -> None:
        """Raises ValueError where a process would get nothing."""
        if total < self.num_parts:
            raise ValueError(
                f"There must be at least one of the {things} of `x` for each process. "
                f"Received: {total} {things} for {self.num_parts} processes. Use more data or fewer processes."
            )


def permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """An order of rows that is the same on all processes."""
    return np.random.default_rng([seed, epoch]).permutation(size)


@contextlib.contextmanager
def drawing_alike(*key: int, generators: Sequence[Any] = ()) -> Iterator[None]:
    """Seeds everybody's random numbers for the time of the block; `generators` are PyTorch's."""
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
