"""Measures how long a read from the job's key-value store takes, and profiles a process."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax

from keras_shardopt.backends.jax.processes import coordinator


def seconds_of_message() -> float:
    """Return how many seconds a read from the job's key-value store takes."""
    client, key = coordinator(), f"keras_shardopt/message/{jax.process_index()}"
    client.key_value_set(key, "1", allow_overwrite=True)
    begin = time.perf_counter()
    client.blocking_key_value_get(key, 60_000)
    return time.perf_counter() - begin


def start_profile(folder: str) -> Callable[[], None]:
    """Start the profiler. Return a function that stops it and writes the trace to the folder."""
    jax.profiler.start_trace(folder)
    return jax.profiler.stop_trace
