"""The bytes of optimizer state on each replica."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from keras_shardopt.backends import for_backend
from keras_shardopt.numerics import Variable, dtype_of


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """The optimizer state of each replica, in bytes. `print` formats it.

    Counts the state of the wrapped optimizers and their master weights, but not accumulated gradients.
    """

    held: list[int | None]
    """Bytes on each replica; under a `ModelParallel`, on each device. None if this process lacks the shapes of another
    replica's state (Adafactor)."""

    whole: int
    """Bytes of all state. If each replica holds this many, no state is divided."""

    replicated: list[tuple[str, int, str]]
    """State that each replica holds whole: the path, its bytes, and the reason."""

    @property
    def ideal(self) -> float:
        """The bytes on each replica if all state were divided equally."""
        return self.whole / len(self.held)

    @property
    def max_over_ideal(self) -> float:
        """The largest known share divided by `ideal`; 1.0 is perfectly even."""
        return max((held for held in self.held if held is not None), default=0) / max(self.ideal, 1e-9)

    def __str__(self) -> str:
        lines = [
            f"optimizer state: {self.whole:,} bytes, ideally {self.ideal:,.0f} on each of {len(self.held)} replicas"
        ]
        for replica, held in enumerate(self.held):
            text = "unknown here" if held is None else f"{held:,} bytes, {held / max(self.ideal, 1e-9):.3f} of ideal"
            lines.append(f"  replica {replica}: {text}")
        lines += [f"  on every replica: {path}, {size:,} bytes: {why}" for path, size, why in self.replicated]
        return "\n".join(lines)


def plus(held: list[int | None], replica: int, size: int) -> list[int | None]:
    """Return `held` with `size` added for one replica."""
    return [(h or 0) + size if r == replica else h for r, h in enumerate(held)]


def size_of(variable: Variable) -> int:
    """Return the number of elements."""
    return int(np.prod(variable.shape))


def item_size(variable: Variable) -> int:
    """Return the bytes of an element."""
    dtype = dtype_of(variable)
    if dtype.startswith("float8"):
        return 1
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


# Backends that can divide a variable among devices.
_layouts = for_backend({"jax": "keras_shardopt.backends.jax.placement"})


def laid_out_report(state: Sequence[Variable]) -> MemoryReport:
    """Return a `MemoryReport` of state that one program holds on its devices."""
    sizes = [size_of(v) * item_size(v) for v in state]
    rows = [[size] for size in sizes] if _layouts is None else [_layouts.bytes_per_device(v) for v in state]
    held: list[int | None] = [sum(column) for column in zip(*rows)]
    replicated = [
        (v.path, size, "a scalar" if not v.shape else f"no dimension of {tuple(v.shape)} divides by {len(row)}")
        for v, size, row in zip(state, sizes, rows)
        if len(row) > 1 and min(row) == size
    ]
    return MemoryReport(held, sum(sizes), replicated)
