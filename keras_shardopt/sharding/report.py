"""The memory of each replica: its optimizer state, and the other memory that training keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from keras_shardopt.backends import for_backend
from keras_shardopt.numerics import Variable, dtype_of


class Bytes(NamedTuple):
    """The bytes of one kind of memory on one replica."""

    predicted: int | None
    """Computed from shapes, dtypes and layouts. None if the package cannot compute it."""

    measured: int | None
    """Bytes of the arrays that exist now. None if the backend does not show them."""


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """The memory of each replica, in bytes. `print` formats it.

    `held`, `whole` and `replicated` are about the state of the wrapped optimizers and their master weights.
    """

    held: list[int | None]
    """Bytes on each replica; under a `ModelParallel`, on each device. None if this process lacks the shapes of another
    replica's state (Adafactor)."""

    whole: int
    """Bytes of all state. If each replica holds this many, no state is divided."""

    replicated: list[tuple[str, int, str]]
    """State that each replica holds whole: the path, its bytes, and the reason."""

    kinds: dict[str, Bytes] = dataclasses.field(default_factory=dict)
    """The memory of this process's replica by kind. If the process has several replicas, the largest memory counts.

    - "weights": all weights of the compiled model; without one, the trainable variables.
    - "gradients": one gradient per trainable variable, and the sums of `gradient_accumulation_steps`. Measured on
      PyTorch only, because they exist only inside the compiled steps of TensorFlow and JAX.
    - "state": the optimizer state.
    - "buffers": memory that updates keep: buckets (joined arrays to send), slices of weights, compression errors,
      counters. Temporary memory of a step is not included. Buckets of compressed gradients are not predicted.
    - "host copies": predicted: the host memory of one sharded checkpoint. Measured: all copies that saves hold now.
    """

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
        lines += ["bytes on this replica:       predicted        measured"] if self.kinds else []
        for kind, each in self.kinds.items():
            shown = ["unknown" if number is None else f"{number:,}" for number in each]
            lines.append(f"  {kind:20} {shown[0]:>15} {shown[1]:>15}")
        return "\n".join(lines)


def size_of(variable: Variable) -> int:
    """Return the number of elements of a variable."""
    return int(np.prod(variable.shape))


def item_size(variable: Variable) -> int:
    """Return the bytes of one element of a variable."""
    dtype = dtype_of(variable)
    if dtype.startswith("float8"):
        return 1
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


# JAX only (otherwise None): divides a variable among devices.
_layouts = for_backend({"jax": "keras_shardopt.backends.jax.placement"})


def bytes_on_a_replica(variables: Sequence[Variable]) -> int:
    """Return the bytes of these variables on a replica (or device), computed from shapes and layouts."""
    if _layouts is None:
        return sum(size_of(v) * item_size(v) for v in variables)
    return sum(max(_layouts.bytes_per_device(v)) for v in variables)


def laid_out_report(state: Sequence[Variable]) -> MemoryReport:
    """Return a `MemoryReport` of state that one program holds on its devices."""
    sizes = [size_of(v) * item_size(v) for v in state]
    rows = [[size] for size in sizes] if _layouts is None else [_layouts.bytes_per_device(v) for v in state]
    held: list[int | None] = [sum(column) for column in zip(*rows)]
    replicated = [
        (v.path, size, "a scalar" if not v.shape else f"no dimension of {tuple(v.shape)} is a multiple of {len(row)}")
        for v, size, row in zip(state, sizes, rows)
        if len(row) > 1 and min(row) == size
    ]
    return MemoryReport(held, sum(sizes), replicated)
