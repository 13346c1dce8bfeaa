"""Counts the bytes that replicas send in one update. Backends record each collective that they call."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from keras_shardopt.numerics import Tensor, dtype_of

Kind = Literal["all_reduce", "reduce_scatter", "all_to_all", "all_gather", "broadcast"]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One call of a collective operation, such as an all-reduce, through which replicas communicate."""

    kind: Kind
    dtypes: tuple[str, ...]
    """The dtypes of the collective's input tensors."""

    num_bytes: int
    """The size of the input tensors on this replica."""

    num_replicas: int

    @property
    def bytes_sent(self) -> float:
        """The bytes that each replica sends if the collective passes data along a ring of replicas."""
        others, size = self.num_replicas - 1, self.num_replicas
        factors = {"all_reduce": 2 * others / size, "all_gather": others}
        return self.num_bytes * factors.get(self.kind, others / size)


_open: contextvars.ContextVar[list[Collective] | None] = contextvars.ContextVar("collectives", default=None)


@contextlib.contextmanager
def recording() -> Iterator[list[Collective]]:
    """Yield a list of all collectives that the block calls. A compiled step calls them only during the trace."""
    found: list[Collective] = []
    token = _open.set(found)
    try:
        yield found
    finally:
        _open.reset(token)


def note(kind: Kind, tensors: Sequence[Tensor], num_replicas: int) -> None:
    """Record a collective with its input tensors."""
    found = _open.get()
    if found is not None and tensors:
        num_bytes = sum(_num_bytes(tensor) for tensor in tensors)
        dtypes = tuple(dict.fromkeys(map(dtype_of, tensors)))
        found.append(Collective(kind, dtypes, num_bytes, num_replicas))


def _num_bytes(tensor: Any) -> int:
    size = 1
    for length in tensor.shape:
        size *= int(length)
    dtype = dtype_of(tensor)
    return size * {"int8": 1, "uint8": 1, "bool": 1, "float16": 2, "bfloat16": 2, "int16": 2, "uint16": 2}.get(
        dtype, 8 if dtype.endswith("64") else 1 if dtype.startswith("float8") else 4
    )
