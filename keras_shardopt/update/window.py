"""Counts the micro-batches of an update: the accumulation window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras import ops

from keras_shardopt.backends.active import runtime
from keras_shardopt.numerics import Variable
from keras_shardopt.update.known import Known


class Window:
    """The number of micro-batches so far, and whether the latest one was the first or the last of its update.

    Args:
        num_steps: int >= 1. Number of micro-batches per update.
    """

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.counter: Variable = None
        """The number of micro-batches so far; None before `build`."""
        self.starts: Any = None
        """Whether the latest micro-batch was the first of its update: a bool or a tensor."""
        self.is_complete: Any = None
        """Whether the latest micro-batch was the last of its update: a bool or a tensor, equal on all replicas."""
        self.snapshots: list[Variable] = []
        """Copies of variables that forward passes change (moving means), from before the first micro-batch."""
        self._ends: bool | None = None
        self._known = Known()

    def build(self, add_variable: Callable[..., Variable]) -> None:
        """Create the counter."""
        self.counter = add_variable(shape=(), initializer="zeros", dtype="int", name="micro_steps")

    def decide(self, ends: bool) -> None:
        """Set whether the next micro-batch is the last of its update, instead of counting to `num_steps`."""
        self._ends = ends

    def count(self) -> None:
        """Count a micro-batch, and set `starts` and `is_complete`."""
        ends: Any = self._ends
        self._ends = None
        if runtime.version(self.counter) is None:  # in a compiled step
            before = ops.copy(ops.convert_to_tensor(self.counter))
            ends = ops.equal(before + 1, self.num_steps) if ends is None else ends
            self.counter.assign(ops.where(ends, ops.zeros_like(before), before + 1))
            self.starts, self.is_complete = ops.equal(before, 0), ends
            return
        num_before = self.num_taken
        self.is_complete = num_before + 1 == self.num_steps if ends is None else ends
        self.starts = num_before == 0
        num_after = 0 if self.is_complete else num_before + 1
        self.counter.assign(num_after)
        self._known.note(self.counter, num_after)

    @property
    def ends_next(self) -> bool:
        """Whether the next micro-batch is the last of its update; False in compiled steps, and before `build`."""
        if self.counter is None:
            return False
        if self._ends is not None:
            return self._ends
        return self._known.is_current(self.counter) and self.num_taken + 1 == self.num_steps

    @property
    def num_taken(self) -> int:
        """The number of micro-batches so far, as an int; 0 before `build`."""
        if self.counter is None:
            return 0
        # Do not note this count. After other code assigns it, the sums are unknown, so `ends_next` must stay False.
        is_known = self._known.is_current(self.counter)
        return int(self._known.of(self.counter) if is_known else ops.convert_to_numpy(self.counter))

    def reset(self) -> None:
        """Discard the micro-batches so far: the next one is the first of its update."""
        if self.counter is not None:
            self.counter.assign(ops.zeros(self.counter.shape, self.counter.dtype))
