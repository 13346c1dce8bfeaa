"""Measures how long a read from the job's key-value store takes, and profiles a process."""

from __future__ import annotations

import glob
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

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


def operations(folder: str) -> Iterator[tuple[Any, str, float, float]]:
    """Yield the operations of a trace: thread or stream, name, and the seconds at which it begins and ends."""
    files = glob.glob(os.path.join(glob.escape(folder), "plugins", "profile", "*", "*.xplane.pb"))
    planes = list(jax.profiler.ProfileData.from_file(max(files, key=os.path.getmtime)).planes)
    on_device = [each for each in planes if each.name.startswith("/device:")]
    for plane in on_device or planes:
        for i, line in enumerate(plane.lines):
            if on_device and not line.name.startswith(("Stream", "XLA Ops")):
                continue  # a line of whole programs or steps
            for each in line.events:
                if on_device or (each.name[0] != "$" and "hlo_op" in dict(each.stats)):  # "$" is a line of Python
                    name = re.sub(r"\.\d+$", "", each.name.partition(" = ")[0].lstrip("%"))
                    yield (plane.name, i), name, 1e-9 * each.start_ns, 1e-9 * (each.start_ns + each.duration_ns)
