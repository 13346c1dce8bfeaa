"""Arithmetic with one thread on a CPU, as ranks of `torchrun` have: kernels round otherwise with others."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import keras
import torch


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Within it PyTorch works with one thread."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def equal_initial_weights() -> Iterator[None]:
    """Within it initial weights have the same bits for any number of threads.

    Of Keras' initializers only `Orthogonal` has others, which recurrent layers begin with: it decomposes a matrix.
    """
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
