"""Runs PyTorch with one CPU thread, as `torchrun` does. With more threads, kernels round differently."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import keras
import torch


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run PyTorch with one thread in this block."""
    num_before = torch.get_num_threads()
    if num_before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_before)


@contextlib.contextmanager
def equal_initial_weights() -> Iterator[None]:
    """Make initial weights in this block bitwise equal for any number of threads."""
    # Of Keras' initializers, only this one decomposes a matrix, with results that depend on the threads.
    initializer = keras.initializers.Orthogonal
    real = initializer.__call__

    @functools.wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        with one_thread():
            return real(*args, **kwargs)

    initializer.__call__ = call
    try:
        yield
    finally:
        initializer.__call__ = real
