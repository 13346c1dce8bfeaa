"""Measures how long a read from the job's key-value store takes, and profiles a worker.

Private names of TensorFlow touched here (test_private_names.py checks that it exists):
    `tensorflow.tsl.profiler.protobuf.xplane_pb2.XSpace` - the format of a trace.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from keras_shardopt.backends.tensorflow.processes import processes


def seconds_of_message() -> float:
    """Return how many seconds a read from the job's key-value store takes."""
    key = f"keras_shardopt/message/{processes.process()[1]}"
    with contextlib.suppress(tf.errors.AlreadyExistsError):
        context.context().set_config_key_value(key, "1")
    begin = time.perf_counter()
    context.context().get_config_key_value(key)
    return time.perf_counter() - begin


def start_profile(folder: str) -> Callable[[], None]:
    """Start the profiler. Return a function that stops it and writes the trace to the folder."""
    tf.profiler.experimental.start(folder)
    return tf.profiler.experimental.stop


def operations(folder: str) -> Iterator[tuple[Any, str, float, float]]:
    """Yield the operations of a trace: thread or stream, name, and the seconds at which it begins and ends."""
    from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace  # not in all versions

    files = glob.glob(os.path.join(glob.escape(folder), "plugins", "profile", "*", "*.xplane.pb"))
    with open(max(files, key=os.path.getmtime), "rb") as file:
        planes = XSpace.FromString(file.read()).planes
    on_device = [each for each in planes if each.name.startswith("/device:") and each.lines]
    for plane in on_device or planes:
        for line in plane.lines:
            if not line.name.startswith(("Stream", "XLA Ops")) if on_device else line.name.startswith("tf_data"):
                continue  # a line of whole programs or steps, or a thread that loads batches
            for each in line.events:
                name = plane.event_metadata[each.metadata_id].name
                # Of an operation of a graph on the host: "dense/MatMul:MatMul". Others prepare data.
                kind = re.fullmatch(r"[^:\s]+:(?!IteratorGetNext)(\w+)", name)
                if on_device or kind:
                    begin = 1e-9 * line.timestamp_ns + 1e-12 * each.offset_ps
                    yield (plane.id, line.id), kind[1] if kind else name, begin, begin + 1e-12 * each.duration_ps
