"""Measures how long a read from the job's key-value store takes, and profiles a rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from keras_shardopt.backends.torch.process_group import job_store


def seconds_of_message() -> float:
    """Return how many seconds a read from the job's key-value store takes."""
    store, key = job_store(), f"keras_shardopt/message/{dist.get_rank()}"
    store.set(key, "1")
    begin = time.perf_counter()
    store.get(key)
    return time.perf_counter() - begin


def start_profile(folder: str) -> Callable[[], None]:
    """Start the profiler. Return a function that stops it and writes the trace to the folder."""
    profile = torch.profiler.profile()
    profile.start()

    def stop() -> None:
        profile.stop()
        os.makedirs(folder, exist_ok=True)
        profile.export_chrome_trace(os.path.join(folder, "trace.json"))

    return stop
