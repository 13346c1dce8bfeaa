"""How much of the optimizer state each replica holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from keras_shardopt.backends import for_backend
from keras_shardopt.numerics import Variable, dtype_of


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """How much optimizer state the replicas hold, in bytes. `print` shows it in words.

    What is counted is the state of the optimizers inside, and their master weights; not accumulated gradients, of which
    each replica has its own.
    """

    held: list[int | None]
    """By replica; None where this process cannot know it (Adafactor's rows and columns on other replicas)."""

    whole: int
    """All state, once. None of it is divided where `held` is as large."""

    replicated: list[tuple[str, int, str]]
    """State that each replica holds all of: the path, its bytes, and why."""

    @property
    def ideal(self) -> float:
        """An equal share of all state."""
        return self.whole / len(self.held)

    @property
    def max_over_ideal(self) -> float:
        """The largest replica's share divided by `ideal` (1.0 is perfectly even), as far as known."""
        return max((held for held in self.held if held is not None), default=0) / max(self.ideal, 1e-9)

    def __str__(self) -> str:
        lines = [
            f"optimizer state: {self.whole:,} bytes, ideally {self.ideal:,.0f} on each of {len(self.held)} replicas"
        ]
        for replica, held in enumerate(self.held):
            told = "unknown here" if held is None else f"{held:,} bytes, {held / max(self.ideal, 1e-9):.3f} of ideal"
            lines.append(f"  replica {replica}: {told}")
        lines += [f"  on every replica: {path}, {size:,} bytes: {why}" for path, size, why in self.replicated]
        return "\n".join(lines)


def plus(held: list[int | None], replica: int, size: int) -> list[int | None]:
    """`held` with `size` more on one replica."""
    return [(h or 0) + size if r == replica else h for r, h in enumerate(held)]


def size_of(variable: Variable) -> int:
    """How many elements it has."""
    return int(np.prod(variable.shape))


def item_size(variable: Variable) -> int:
    """How many bytes an element has."""
    dtype = dtype_of(variable)
    if dtype.startswith("float8"):
        return 1
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


# Where a variable can lie on several devices in parts.
_layouts = for_backend({"jax": "keras_shardopt.backends.jax.placement"})


def laid_out_report(state: Sequence[Variable]) -> MemoryReport:
    """The report of state that one program holds on one device or several."""
    sizes = [size_of(v) * item_size(v) for v in state]
    rows = [[size] for size in sizes] if _layouts is None else [_layouts.bytes_per_device(v) for v in state]
    held: list[int | None] = [sum(column) for column in zip(*rows)]
    replicated = [
        (v.path, size, "a number" if not v.shape else f"no dimension of {tuple(v.shape)} divides by {len(row)}")
        for v, size, row in zip(state, sizes, rows)
        if len(row) > 1 and min(row) == size
    ]
    return MemoryReport(held, sum(sizes), replicated)
