"""Measurements of a process: the time of a message, and a profile.

Private names of JAX touched here: `jax._src.distributed.global_state` - the client of the coordinator.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed


def seconds_of_message() -> float:
    """Return the seconds in which the job's key-value store answers."""
    client: Any = distributed.global_state.client
    key = f"keras_shardopt/message/{jax.process_index()}"
    client.key_value_set(key, "1", allow_overwrite=True)
    begin = time.perf_counter()
    client.blocking_key_value_get(key, 60_000)
    return time.perf_counter() - begin


def start_profile(folder: str) -> Callable[[], None]:
    """Start the profiler. Return a function that stops it and writes the trace to the folder."""
    jax.profiler.start_trace(folder)
    return jax.profiler.stop_trace
