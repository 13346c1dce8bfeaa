"""How gradients arrive at an inner optimizer, as set by the wrappers around it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

_lock = threading.Lock()


class GradientScope:
    """The inside of one `CrossShard`, which gives it to every optimizer in there, up to the next `CrossShard`."""

    def __init__(self, outer: GradientScope | None = None, group_axis: str | None = None) -> None:
        self.outer = outer
        """The scope that the `CrossShard` is in itself."""
        self._group_axis = group_axis
        self._holds_slices = False
        self._updates_differ = False
        self._num_inside = 0

    @property
    def group_axis(self) -> str | None:
        """The axis along which reduced gradients still differ, because replicas reduce in groups; None: they do not."""
        return self._group_axis if self._group_axis is not None or self.outer is None else self.outer.group_axis

    @property
    def holds_slices(self) -> bool:
        """Whether gradients are those of this replica's slices only, so that what is found in them must be joined."""
        return self._holds_slices or (self.outer is not None and self.outer.holds_slices)

    @holds_slices.setter
    def holds_slices(self, value: bool) -> None:
        self._holds_slices = value

    @property
    def updates_differ(self) -> bool:
        """Whether gradients are each replica's own, so that replicas may decide differently what becomes of them."""
        return self._updates_differ or (self.outer is not None and self.outer.updates_differ)

    @updates_differ.setter
    def updates_differ(self, value: bool) -> None:
        self._updates_differ = value

    @property
    def is_reduced(self) -> bool:
        """Whether the gradients that come now are reduced already, over all replicas or over a group."""
        return self._num_inside > 0 or (self.outer is not None and self.outer.is_reduced)

    @contextlib.contextmanager
    def reduced(self) -> Iterator[None]:
        """Says, for the time of the block, that gradients in this scope are reduced.

        Counted rather than once per thread: MirroredStrategy runs every replica in a thread of its own, switches
        between them in the middle of an update, and continues parts of it in further threads. Replicas enter and leave
        together, so while any of them is inside, all of them are.
        """
        self._enter(1)
        try:
            yield
        finally:
            self._enter(-1)

    def give_to(self, optimizers: Sequence[Any]) -> None:
        """Gives it to wrappers inside, up to the next `CrossShard`, which has given its own to those further in.

        Args:
            optimizers: from the outside in.
        """
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
"""That of optimizers inside no `CrossShard`: nobody has reduced their gradients."""


@contextlib.contextmanager
def claim_reduction(cross_shards: Sequence[Any]) -> Iterator[None]:
    """For trainers that reduce: says, for the time of the block, that these need not, nor may any of them."""
    with contextlib.ExitStack() as scopes:
        for optimizer in cross_shards:
            scopes.enter_context(optimizer._scope.reduced())
        yield
