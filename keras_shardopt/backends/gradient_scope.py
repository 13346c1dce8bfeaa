"""Facts that a `CrossShard` records for its inner optimizers, such as whether gradients are reduced over replicas."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

_lock = threading.Lock()


class GradientScope:
    """Facts about the gradients of all optimizers inside a `CrossShard`. A nested `CrossShard` has another scope."""

    def __init__(self, outer: GradientScope | None = None, group_axis: str | None = None) -> None:
        self.outer = outer
        """The scope around the `CrossShard`, or None. Facts of that scope also apply in this one."""
        self._group_axis = group_axis
        self._holds_slices = False
        self._updates_differ = False
        self._num_inside = 0

    @property
    def group_axis(self) -> str | None:
        """The name of the replica axis if gradients are reduced only within groups of replicas. Otherwise None."""
        return self._group_axis if self._group_axis is not None or self.outer is None else self.outer.group_axis

    @property
    def holds_slices(self) -> bool:
        """Whether this replica has only slices of the gradients, so a norm needs a sum over replicas."""
        return self._holds_slices or (self.outer is not None and self.outer.holds_slices)

    @holds_slices.setter
    def holds_slices(self, value: bool) -> None:
        self._holds_slices = value

    @property
    def updates_differ(self) -> bool:
        """Whether gradients are not reduced, so updates can differ between replicas."""
        return self._updates_differ or (self.outer is not None and self.outer.updates_differ)

    @updates_differ.setter
    def updates_differ(self, value: bool) -> None:
        self._updates_differ = value

    @property
    def is_reduced(self) -> bool:
        """Whether the gradients that optimizers receive are already reduced over all replicas or a group."""
        return self._num_inside > 0 or (self.outer is not None and self.outer.is_reduced)

    @contextlib.contextmanager
    def reduced(self) -> Iterator[None]:
        """Mark gradients in this scope as reduced during the block."""
        # Count the open blocks, because under MirroredStrategy each replica opens the block in its own thread.
        self._enter(1)
        try:
            yield
        finally:
            self._enter(-1)

    def give_to(self, optimizers: Sequence[Any]) -> None:
        """Assign this scope to nested optimizers, outermost first. Stop at a `CrossShard`, which has its own scope."""
        for optimizer in optimizers:
            if hasattr(optimizer, "_scope"):
                optimizer._scope = self
            if hasattr(optimizer, "scope_inside"):
                optimizer.scope_inside.outer = self
                break

    def _enter(self, count: int) -> None:
        with _lock:
            self._num_inside += count


OUTSIDE = GradientScope()
"""The scope of optimizers outside any `CrossShard`. Their gradients are not reduced."""


@contextlib.contextmanager
def claim_reduction(cross_shards: Sequence[Any]) -> Iterator[None]:
    """Mark gradients that reach these `CrossShard`s in the block as reduced, because the trainer reduces them."""
    with contextlib.ExitStack() as scopes:
        for optimizer in cross_shards:
            scopes.enter_context(optimizer._scope.reduced())
        yield
