"""Finds the slow process of a job from the times that all processes have measured.

In each step, all processes wait for the slowest process, so steps take equally long on all. Processes differ in their
own time, in which they do not wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from keras_shardopt.backends.phases import rounded

OWN = ("input", "step", "updating", "callbacks", "saving")
"""The phases of a step in which a process does not wait for other processes."""

PHASES = (*OWN, "waiting", "sending")
"""All phases of a step. "sending" is the time of an exchange between processes that are all ready for it."""

PROBES = ("forward pass", "message")
"""Calls that each process times once per window (a span of steps): a forward pass, and a message to process 0."""

HIDDEN = ("step", "updating")
"""The phases that Python cannot measure if the step is compiled or runs on a device."""

_MACHINE = "Check the slow rank's machine for other programs, fewer cores or threads, swapping, or throttling."
_FIXES = {
    "input": "Cache or prefetch batches, use more workers, or copy the data to a local disk.",
    "callbacks": "Reduce the work of callbacks in each batch, or use `verbose=2`.",
    "saving": "Save less often, or with `ShardedCheckpoint`.",
    "message": "Check the network interface, cable and route of the slow rank's machine.",
}
_MIN_SECONDS = 1e-3
"""A forward pass or message is slow only if it takes this much longer than those of other processes. Less is noise."""

_MESSAGE_FACTOR = 2.0
"""A message is slow only if its additional time exceeds this multiple of the median of other processes."""


class Slow(NamedTuple):
    """The process that all other processes wait for."""

    rank: int
    phase: str
    seconds: float
    """The seconds of this process in the phase, per step; or the seconds of a forward pass or message."""

    others: float
    """The median of the same seconds on all other processes."""

    def __str__(self) -> str:
        name = "forward and backward" if self.phase == "step" else self.phase
        return f"rank {self.rank}: {name} {rounded(self.seconds * 1e3)} ms, others {rounded(self.others * 1e3)} ms"

    @property
    def fix(self) -> str:
        """The remedy, as a sentence."""
        return _FIXES.get(self.phase, _MACHINE)


def table_of(rows: Sequence[Sequence[float]]) -> np.ndarray:
    """Return `rows` (seconds of each process) as an array, with a new column "sending": the shortest wait of all."""
    table = np.insert(np.array(rows, "float64"), len(PHASES) - 1, 0.0, axis=1)
    waiting, sending = len(OWN), len(OWN) + 1
    table[:, sending] = table[:, waiting].min()
    table[:, waiting] -= table[:, sending]
    return table


def own_seconds(table: np.ndarray) -> np.ndarray:
    """Return the seconds per step in which each process does not wait."""
    return table[:, : len(OWN)].sum(axis=1)


def seconds_per_step(table: np.ndarray) -> float:
    """Return the mean wall time of a step."""
    return float(table[:, : len(PHASES)].sum(axis=1).mean())


def slowest(tables: Sequence[np.ndarray], threshold: float, is_hidden: bool, remote: Sequence[int] = ()) -> Slow | None:
    """Return the process that was slow in the same phase in all windows (spans of steps), or None.

    Args:
        tables: the results of `table_of` for successive windows.
        threshold: a process is slow if its extra time exceeds this fraction of a step, or of a forward pass.
        is_hidden: whether to ignore the phases in `HIDDEN`, because steps are compiled or run on a device.
        remote: the processes on other machines than process 0. Only their messages to process 0 are compared. If empty,
            the messages of all processes except process 0 are compared.
    """
    values = np.array(tables)
    if values.shape[1] == 1:
        return None
    phases = [i for i, name in enumerate(OWN) if not (is_hidden and name in HIDDEN)]
    steps = np.array([seconds_per_step(table) for table in tables])[:, None, None]
    excesses = ((values - _others(values)) / steps)[:, :, phases]
    # Require half of the threshold in each window, because noise does not repeat in the same process and phase.
    excess = np.where(excesses.min(axis=0) > threshold / 2, excesses.mean(axis=0), 0.0)
    rank, i = (int(index) for index in np.unravel_index(excess.argmax(), excess.shape))
    if excess[rank, i] > threshold:
        return _slow(values.mean(axis=0), rank, phases[i])
    best = values.min(axis=0)  # the fastest of several windows, because the time of one short call is noisy
    # Process 0 receives the messages, so messages from its machine are fast. Compare messages from other machines.
    ranks_and_factors = (range(len(best)), threshold), (remote or range(1, len(best)), _MESSAGE_FACTOR)
    for probe, (ranks, factor) in enumerate(ranks_and_factors, len(PHASES)):
        compared = best[ranks]
        if len(ranks) > 1 and compared[:, probe].all():  # a time is 0 if the forward pass has failed
            slow = _slow(compared, int(compared[:, probe].argmax()), probe)
            if slow.seconds - slow.others > max(factor * slow.others, _MIN_SECONDS):
                return slow._replace(rank=ranks[slow.rank])
    return None


def _slow(table: np.ndarray, rank: int, column: int) -> Slow:
    return Slow(rank, (*PHASES, *PROBES)[column], float(table[rank, column]), float(_others(table)[rank, column]))


def _others(values: np.ndarray) -> np.ndarray:
    """Replace the value of each process (the last dimension but one) by the median of all other processes' values."""
    return np.stack([np.median(np.delete(values, i, -2), -2) for i in range(values.shape[-2])], -2)


def summary(table: np.ndarray, slow: Slow | None, is_hidden: bool, is_compared: bool = True) -> tuple[str, str]:
    """Describe the share of each phase in a mean step, and how processes differ, in one line each.

    `is_compared` is False before enough windows for a comparison have ended. For `is_hidden`, see `slowest`.
    """
    total, mean = seconds_per_step(table), table.mean(axis=0)
    names = ("input", "step" if is_hidden else "forward and backward", *PHASES[2:])
    parts = [f"{name} {value / total:.0%}" for name, value in zip(names, mean) if value > 0.005 * total]
    own = ", ".join(rounded(seconds * 1e3) for seconds in own_seconds(table))
    verdict = "No rank is slow." if is_compared else "Too few windows to compare."
    compared = f"{verdict} Own ms per step, by rank: {own}." if slow is None else f"Slow: {slow}. {slow.fix}"
    shares = f"{rounded(total * 1e3)} ms per step: {', '.join(parts)}."
    return shares, compared if len(table) > 1 else "One process, so no other to compare with."
