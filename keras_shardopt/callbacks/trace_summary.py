"""Traces one step with the profiler, and summarizes it: the shares of its time, and its longest operations."""

from __future__ import annotations

import itertools
import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from keras_shardopt.backends.phases import rounded

KINDS = ("computing", "exchange", "copies")
"""The kinds of operations. If several run at a moment, it counts for the first of these."""

_NUM_LONGEST = 5
_EXCHANGE = re.compile(
    r"nccl|gloo|c10d|collective|all.?reduce|all.?gather|reduce.?scatter|all.?to.?all"
    r"|\bp(sum|max|min|mean|permute|broadcast)",  # JAX's names
    re.IGNORECASE,
)
_COPY = re.compile(r"memcpy ?(htod|dtoh|h2d|d2h)|infeed|outfeed", re.IGNORECASE)  # between host and device

Operation = tuple[Any, str, float, float]
"""The thread or stream of an operation, its name, and the seconds at which it begins and ends."""


_running: list[StepTrace] = []
"""The trace whose profiler runs in this process, if any. A `fit` that raised an error may have left it running."""


class StepTrace:
    """A trace of one step by the framework's profiler, which writes it to a folder until `end` is called."""

    def __init__(self, measuring: Any, folder: str) -> None:
        """Start the profiler. `measuring` is the backend's module with `start_profile` and `operations`."""
        self._measuring, self._folder = measuring, folder
        self.summary: dict[str, Any] | None = None
        """The result of `summarize`; None while the profiler runs."""
        try:
            self._stop = measuring.start_profile(folder)
        except Exception as error:  # as in `summarize`: only this process could end its training
            self.summary = {"error": repr(error)}
            return
        self._since = time.perf_counter()
        _running.append(self)

    def end(self) -> None:
        """Stop the profiler, and summarize the trace."""
        _running.remove(self)
        self.summary = summarize(self._operations(), time.perf_counter() - self._since)

    def _operations(self) -> Iterator[Operation]:
        self._stop()
        yield from self._measuring.operations(self._folder)


def end_running_traces() -> None:
    """End a trace that an earlier `fit` has left running."""
    for trace in list(_running):
        trace.end()


def summarize(found: Iterable[Operation], seconds: float) -> dict[str, Any]:
    """Return the summary of a step that took `seconds`, or an "error" if the iteration of operations raises one."""
    try:
        operations = list(found)
        if not operations:
            return {"error": "the trace has no operations"}
        pieces = list(_own_pieces(operations))
        reached = [_length((a, b) for name, a, b in pieces if _kind(name) <= kind) for kind in range(len(KINDS))]
        total = max(seconds, reached[-1])
        shares = np.diff([0.0, *reached, total]) / total
        counts = Counter(name for _, name, _, _ in operations)
        own: Any = Counter()
        for name, begin, end in pieces:
            own[name] += end - begin
        longest = [(name, counts[name], round(1e3 * each, 4)) for name, each in own.most_common(_NUM_LONGEST)]
        return {
            "ms": round(1e3 * total, 4),
            **dict(zip((*KINDS, "idle"), shares.round(4).tolist())),
            "operations": [dict(zip(("name", "count", "ms"), each)) for each in longest],
        }
    except Exception as error:  # any error, because a summary must not end the training
        return {"error": repr(error)}


def lines(step: int, ranks: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Describe the summary of each rank in a line, and the longest operations of rank 0 in the last one."""
    names = [f"Traced step {step}" + (f", rank {rank}" if len(ranks) > 1 else "") for rank in range(len(ranks))]
    for name, each in zip(names, ranks):
        shares = ", ".join(f"{kind} {each[kind]:.0%}" for kind in (*KINDS, "idle") if each.get(kind, 0) > 0.005)
        found = f"no summary: {each['error']}" if "error" in each else f"{rounded(each['ms'])} ms: {shares}."
        yield f"{name}: {found}"
    longest = [
        f"{each['name'][:60]} {rounded(each['ms'])} ms ({each['count']}x)" for each in ranks[0].get("operations", ())
    ]
    if longest:
        yield f"{names[0]}, most own time: {', '.join(longest)}."


def _kind(name: str) -> int:
    return 1 if _EXCHANGE.search(name) else 2 if _COPY.search(name) else 0


def _own_pieces(operations: Iterable[Operation]) -> Iterator[tuple[str, float, float]]:
    """Yield the pieces of time in which an operation runs, and no other one inside it on the same thread."""
    in_order = sorted(operations, key=lambda each: (str(each[0]), each[2], -each[3]))
    for _, thread in itertools.groupby(in_order, lambda each: each[0]):
        running, now = list[tuple[float, str]](), 0.0
        for _, name, begin, end in [*thread, (None, "", math.inf, math.inf)]:
            while running and running[-1][0] <= begin:
                until, ended = running.pop()
                yield ended, now, max(now, until)
                now = max(now, until)
            if running:
                yield running[-1][1], now, begin
            now = begin
            running.append((end, name))


def _length(pieces: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of some pieces of time."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(pieces):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
