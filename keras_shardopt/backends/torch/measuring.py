"""Measures how long a read from the job's key-value store takes, and profiles a rank."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

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


def operations(folder: str) -> Iterator[tuple[Any, str, float, float]]:
    """Yield the operations of a trace: thread or stream, name, and the seconds at which it begins and ends."""
    with open(os.path.join(folder, "trace.json"), encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    on_device = [each for each in events if each.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    for each in on_device or events:
        name = str(each.get("name"))
        is_on_host = each.get("cat") == "cpu_op" and "::" in name and "autograd::" not in name
        if on_device or is_on_host or name.startswith(("gloo:", "## Call CompiledFxGraph")):
            yield (each["pid"], each["tid"]), name, 1e-6 * each["ts"], 1e-6 * (each["ts"] + each["dur"])
