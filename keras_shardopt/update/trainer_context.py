"""What the optimizer learns from a trainer about the batch: this replica's rows, and who ends training."""

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
    """This replica's part of the global batch of the step that is running."""

    local_batch_size: Any
    """How many rows of the batch here count: an int, or a scalar tensor where it differs within one program."""

    all_rows: Any
    """How many rows the replicas' parts have together, or a function that waits until that is known."""

    replicas: Communicator
    """With whom the batch is shared."""

    losses_are_divided: bool = False
    """Whether the gradients of the replicas are summed (`GradientState.LOCAL_PRESCALED`) rather than averaged."""

    ends_early: bool = False
    """Whether rows beyond `local_batch_size` may be there too, as padding that must not count."""

    rows_here: Any = None
    """How many rows the batch here has, with padding: an int, a scalar tensor, or None where that is not known."""

    @property
    def global_batch_size(self) -> Any:
        """How many rows the replicas' parts have together."""
        return self.all_rows() if callable(self.all_rows) else self.all_rows

    @property
    def equal_part(self) -> Any:
        """How many rows each replica would have if all had as many."""
        all_rows = self.global_batch_size
        if isinstance(all_rows, int):
            return all_rows / self.replicas.num_replicas
        return ops.cast(all_rows, "float32") / self.replicas.num_replicas

    @property
    def row_share(self) -> Any:
        """The rows here in units of an equal part: 1 where all replicas have as many, 0 where there are none."""
        if isinstance(self.local_batch_size, int) and isinstance(self.global_batch_size, int):
            return self.local_batch_size / self.equal_part
        return ops.cast(self.local_batch_size, "float32") / self.equal_part


_part: contextvars.ContextVar[BatchShare | None] = contextvars.ContextVar("part", default=None)
_num_parts_open = 0
_parts_lock = threading.Lock()


@contextlib.contextmanager
def batch_shared(part: BatchShare) -> Iterator[None]:
    """Says, for the time of the block, which part of the global batch this replica works on."""
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
    """What `batch_shared` said last, or None where nobody knows."""
    # Not asked for nothing: torch.compile breaks a step apart at every look into a context variable.
    return _part.get() if _num_parts_open else None


_joins_uneven_inputs: contextvars.ContextVar[bool] = contextvars.ContextVar("joins_uneven_inputs", default=False)


@contextlib.contextmanager
def joining_uneven_inputs() -> Iterator[None]:
    """Says, for the time of the block, that somebody else sees to it that all replicas end training together."""
    token = _joins_uneven_inputs.set(True)
    try:
        yield
    finally:
        _joins_uneven_inputs.reset(token)


def joins_uneven_inputs() -> bool:
    """Whether somebody else sees to it that all replicas end training together."""
    return _joins_uneven_inputs.get()


def row_share() -> Any:
    """This replica's rows in units of an equal part of the batch."""
    part = current_share()
    return 1.0 if part is None else part.row_share
