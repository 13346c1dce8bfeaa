"""What a trainer tells the optimizer about the batch: this replica's rows, and who ends training."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

from keras import ops

from keras_shardopt.backends.communicator import ReplicaBackend


@dataclasses.dataclass(frozen=True)
class Part:
    """This replica's part of the global batch of the step that is running."""

    num_rows: Any
    """How many rows of the batch here count: an int, or a scalar tensor where it differs within one program."""

    num_rows_of_all: Any
    """How many rows the replicas' parts have together."""

    replicas: ReplicaBackend
    """With whom the batch is shared."""

    losses_are_divided: bool = False
    """Whether the gradients of the replicas are summed (`Arrival.LOCAL_PRESCALED`) rather than averaged."""

    ends_early: bool = False
    """Whether rows beyond `num_rows` may be there too, as padding that must not count."""

    @property
    def equal_part(self) -> Any:
        """How many rows each replica would have if all had as many."""
        if isinstance(self.num_rows_of_all, int):
            return self.num_rows_of_all / self.replicas.num_replicas
        return ops.cast(self.num_rows_of_all, "float32") / self.replicas.num_replicas

    @property
    def share(self) -> Any:
        """The rows here in units of an equal part: 1 where all replicas have as many, 0 where there are none."""
        if isinstance(self.num_rows, int) and isinstance(self.num_rows_of_all, int):
            return self.num_rows / self.equal_part
        return ops.cast(self.num_rows, "float32") / self.equal_part


_part: contextvars.ContextVar[Part | None] = contextvars.ContextVar("part", default=None)


_num_parts_open = 0


_parts_lock = threading.Lock()


@contextlib.contextmanager
def part_of_batch(part: Part) -> Iterator[None]:
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


def current_part() -> Part | None:
    """What `part_of_batch` said last, or None where nobody knows."""
    # Not asked for nothing: torch.compile breaks a step apart at every look into a context variable.
    return _part.get() if _num_parts_open else None


_ends_together: contextvars.ContextVar[bool] = contextvars.ContextVar("ends_together", default=False)


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """Says, for the time of the block, that somebody else sees to it that all replicas end training together."""
    token = _ends_together.set(True)
    try:
        yield
    finally:
        _ends_together.reset(token)


def ends_together() -> bool:
    """Whether somebody else sees to it that all replicas end training together."""
    return _ends_together.get()
