"""Context that a trainer sets: this replica's rows, and whether all replicas end training together."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

from keras import ops

from keras_shardopt.backends.communicator import Communicator


@dataclasses.dataclass(frozen=True)
class BatchShare:
    """This replica's part of the global batch in the running step."""

    local_batch_size: Any
    """Number of this replica's rows without padding: an int, or a tensor if it differs among devices."""

    all_rows: Any
    """Number of rows on all replicas, or a function that waits for this number and returns it."""

    replicas: Communicator
    """The replicas that share the batch."""

    losses_are_divided: bool = False
    """Whether losses are divided by the number of replicas, because gradients will be summed, not averaged."""

    ends_early: bool = False
    """Whether padding rows can follow the first `local_batch_size` rows."""

    rows_here: Any = None
    """Number of this replica's rows including padding: an int, a scalar tensor, or None if unknown."""

    @property
    def global_batch_size(self) -> Any:
        """Number of rows on all replicas."""
        return self.all_rows() if callable(self.all_rows) else self.all_rows

    @property
    def equal_part(self) -> Any:
        """The mean number of rows per replica."""
        all_rows = self.global_batch_size
        if isinstance(all_rows, int):
            return all_rows / self.replicas.num_replicas
        return ops.cast(all_rows, "float32") / self.replicas.num_replicas

    @property
    def row_share(self) -> Any:
        """This replica's number of rows divided by the mean number per replica; 0 without rows."""
        if isinstance(self.local_batch_size, int) and isinstance(self.global_batch_size, int):
            return self.local_batch_size / self.equal_part
        return ops.cast(self.local_batch_size, "float32") / self.equal_part


_part: contextvars.ContextVar[BatchShare | None] = contextvars.ContextVar("part", default=None)
_num_parts_open = 0
_parts_lock = threading.Lock()


@contextlib.contextmanager
def batch_shared(part: BatchShare) -> Iterator[None]:
    """During the block, `current_share` returns `part`, this replica's part of the global batch."""
    _count_parts(1)
    token = _part.set(part)
    try:
        yield
    finally:
        _part.reset(token)
        _count_parts(-1)


def _count_parts(change: int) -> None:
    global _num_parts_open
    with _parts_lock:
        _num_parts_open += change


def current_share() -> BatchShare | None:
    """Return this replica's part of the global batch, as set by the innermost `batch_shared`, or None."""
    # Check the count first, because each read of a context variable splits the graph of torch.compile.
    return _part.get() if _num_parts_open else None


_joins_uneven_inputs: contextvars.ContextVar[bool] = contextvars.ContextVar("joins_uneven_inputs", default=False)


@contextlib.contextmanager
def joining_uneven_inputs() -> Iterator[None]:
    """In this block, a trainer makes all replicas end training together, even with different numbers of batches."""
    token = _joins_uneven_inputs.set(True)
    try:
        yield
    finally:
        _joins_uneven_inputs.reset(token)


def joins_uneven_inputs() -> bool:
    """Whether a trainer makes all replicas end training together."""
    return _joins_uneven_inputs.get()


def row_share() -> Any:
    """Return this replica's number of rows, divided by the mean number per replica; 1.0 outside `batch_shared`."""
    part = current_share()
    return 1.0 if part is None else part.row_share
