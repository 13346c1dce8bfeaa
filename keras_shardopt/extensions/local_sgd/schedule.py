"""The schedule of local SGD: which weights replicas average, and after which updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from keras import ops

from keras_shardopt.backends.active import runtime
from keras_shardopt.numerics import Variable
from keras_shardopt.update.known import Known


class SyncSchedule:
    """Counts updates, and schedules the sync steps of each group of weights (fragment).

    Arguments named `count` are numbers of updates: ints if Python runs in each update, otherwise traced tensors.

    Args:
        settings: the `LocalSGD` of the optimizer.
    """

    def __init__(self, settings: Any) -> None:
        self._settings = settings
        self._every: Callable[[Any], Any] = settings.updates_per_sync
        self.num_fragments: int = settings.fragments
        self.fragments: list[list[int]] = []
        """For each group of weights that are averaged together (fragment), the indices of its trainable variables."""
        self.count: Variable = None
        """The number of updates so far."""
        self.last_syncs: Variable = None
        """The update at which each fragment's interval began: its last average, or an earlier one set by `restart`."""
        self._known_count, self._known_syncs = Known(), Known()

    def build(self, variables: Sequence[Variable], add_variable: Callable[..., Variable]) -> None:
        """Create the variables, and divide the weights into fragments."""
        self.fragments = fragments_of([int(np.prod(v.shape)) for v in variables], self.num_fragments)
        self.count = add_variable((), "zeros", dtype="int", name="local_updates")
        self.last_syncs = add_variable((self.num_fragments,), "zeros", dtype="int", name="last_rounds")
        with runtime.init_scope():
            self.restart(0)

    def counted(self) -> Any:
        """Return the number of updates so far: an int if Python runs in each update, otherwise a traced tensor."""
        if runtime.version(self.count) is None:
            return ops.copy(ops.convert_to_tensor(self.count))
        return int(self._known_count.of(self.count))

    def set_count(self, count: Any) -> None:
        """Set the number of updates so far."""
        self.count.assign(count)
        if isinstance(count, int):
            self._known_count.note(self.count, count)

    def restart(self, count: Any) -> None:
        """Schedule the first sync step of each fragment, spread evenly over updates after `count` and the warm-up."""
        if isinstance(count, int):
            count = max(count, self._settings.warmup_steps)
        every, number = self._every(count), self.num_fragments
        firsts = [count + (i + 1) * every // number - every for i in range(number)]
        self.last_syncs.assign(ops.stack([ops.cast(first, self.last_syncs.dtype) for first in firsts]))

    def is_due(self, number: int, count: Any) -> Any:
        """Return whether fragment `number` is averaged after update `count`: a bool, or a traced tensor."""
        if isinstance(count, int):
            since: Any = int(self._known_syncs.of(self.last_syncs)[number])
        else:
            since = ops.convert_to_tensor(self.last_syncs)[number]
        return count - since >= self._length(since)

    def synced(self, number: int, count: Any) -> None:
        """Record that fragment `number` was averaged after update `count`."""
        if isinstance(count, int):
            known = self._known_syncs.of(self.last_syncs).copy()
            known[number] = count
            self.last_syncs.assign(known)
            self._known_syncs.note(self.last_syncs, known)
            return
        last = ops.convert_to_tensor(self.last_syncs)
        is_this = ops.equal(ops.arange(self.num_fragments), number)
        self.last_syncs.assign(ops.where(is_this, ops.cast(count, last.dtype), last))

    def _length(self, since: Any) -> Any:
        """Return the number of updates between the average of weights at update `since` and the next average."""
        start = self._settings.warmup_steps
        return self._every(max(since, start) if isinstance(since, int) else ops.maximum(since, start))

    # -- outside of a training step ----------------------------------------------------------------------------------

    @property
    def num_updates(self) -> int:
        """The number of updates so far; 0 before `build`."""
        return 0 if self.count is None else int(ops.convert_to_numpy(self.count))

    def current_length(self) -> int:
        """Return the number of updates between the last sync step and the next one."""
        return int(self._length(int(max(ops.convert_to_numpy(self.last_syncs)))))

    def unsynced(self) -> list[int]:
        """Return the indices of the weights that were updated since replicas last averaged them."""
        count = self.num_updates
        starts = np.maximum(ops.convert_to_numpy(self.last_syncs), self._settings.warmup_steps)
        return sorted(i for positions, start in zip(self.fragments, starts) if count > start for i in positions)


def fragments_of(sizes: Sequence[int], number: int) -> list[list[int]]:
    """Divide the indices of `sizes` into nonempty groups of similar total size, by adding large sizes first."""
    groups: list[list[int]] = [[] for _ in range(number)]
    totals = [0] * number
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        least = min(range(number), key=lambda group: (totals[group], len(groups[group])))
        groups[least].append(i)
        totals[least] += sizes[i]
    return [sorted(group) for group in groups]
