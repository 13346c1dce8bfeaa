"""Measures how long a read from the job's key-value store takes, and profiles a worker."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

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
