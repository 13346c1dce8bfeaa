"""Collects the facts of all processes, and measures facts that need several: all-reduces, clocks, shared folders."""

from __future__ import annotations

import contextlib
import datetime
import os
import pathlib
import secrets
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_shardopt.backends import for_backend, jobs
from keras_shardopt.backends.active import processes
from keras_shardopt.doctor.facts import Facts

SIZES = {"1 KB": (2**10, 20), "1 MB": (2**20, 10), "64 MB": (2**26, 3)}
"""The sizes of measured all-reduces in bytes, each with its number of repetitions."""

# For each backend, the module with its all-reduce.
_REDUCERS = {name: f"keras_shardopt.doctor.{name}" for name in ("tensorflow", "jax", "torch")}


def examine(mine: Facts, seconds: float, store: Callable[[list[Facts]], None]) -> None:
    """Connect this process to the others. Pass the facts of all processes to `store`, now and after each measurement.

    Args:
        mine: the facts of this process.
        seconds: the time limit for the connection. Large all-reduces that need half of this time are omitted.
        store: a function that gets a list of one dict per process, in the order of processes.

    Raises:
        Exception: any error of the framework, if the processes cannot connect.
    """
    with processes.open(None, datetime.timedelta(seconds=seconds)) as world:
        jobs.check_joined(world.num_processes, mine["process"]["framework"])
        mine["world"] = {
            "process": world.process_id,
            "processes": world.num_processes,
            "replicas": world.num_replicas,
            "devices": list(world.devices),
        }
        token = facts_of_all(secrets.token_hex(4))[0]
        measurements: dict[str, Callable[[], Any]] = {
            "shares": lambda: _processes_in(mine.get("files", {}).get("path"), token, world.process_id),
            "memory_speed": _memory_speed,
        }
        module = for_backend(_REDUCERS)
        if world.num_replicas > 1 and module is not None:
            reducer = module.all_reduce
            measurements |= {"clock": lambda: _ticks(reducer), "reduce": lambda: _seconds(reducer, seconds)}
        store(facts_of_all(mine))
        for name, measure in measurements.items():
            mine[name] = measure()
            store(facts_of_all(mine))


def facts_of_all(value: Any) -> list[Any]:
    """Return the values of all processes, ordered by process. All processes must call this together."""
    return processes.gather_objects(value)


def _processes_in(path: str | None, token: str, process: int) -> list[int]:
    """Return the numbers of the processes for which `path` is the same directory as for this process."""
    files = [pathlib.Path(path or os.devnull, f".doctor-{token}-{i}") for i in range(len(facts_of_all(None)))]
    with contextlib.suppress(OSError):
        files[process].touch()
    facts_of_all(None)
    found = [i for i, file in enumerate(files) if os.path.exists(file)]
    facts_of_all(None)
    with contextlib.suppress(OSError):
        files[process].unlink()
    return found


def _memory_speed() -> float:
    """Return the bytes per second that a copy in memory reads and writes."""
    source = np.ones(2**26, "uint8")
    target = np.zeros_like(source)
    facts_of_all(None)  # wait, so all processes measure at the same time, as in training
    return 2 * source.size / min(_timed(lambda: np.copyto(target, source)) for _ in range(3))


def _ticks(reducer: Callable[[int], Callable[[], None]]) -> list[float]:
    """Return the times on this process's clock at the ends of several all-reduces, which all processes end together."""
    reduce, ticks = reducer(1), []
    for _ in range(9):
        reduce()
        ticks.append(time.time())
    return ticks


def _seconds(reducer: Callable[[int], Callable[[], None]], limit: float) -> dict[str, float]:
    """Return the median time of an all-reduce by size. Omit the largest size if it would need half of `limit`."""
    found: dict[str, float] = {}
    for name, (size, times) in SIZES.items():
        # All processes must decide alike, so take the largest time of all.
        expected = max(facts_of_all(64 * found.get("1 MB", 0.0)))
        if expected * (times + 1) > limit / 2:
            break
        reduce = reducer(size // 4)
        reduce()
        found[name] = statistics.median(_timed(reduce) for _ in range(times))
    return found


def _timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
