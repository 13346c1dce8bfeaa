"""Provides an all-reduce over PyTorch's ranks, to measure its time."""

from __future__ import annotations

from collections.abc import Callable

import torch

from keras_shardopt.backends.torch.runtime import runtime


def all_reduce(num_floats: int) -> Callable[[], None]:
    """Return a function that sums a vector of `num_floats` floats over all replicas, and waits for the result."""
    vector = torch.ones(num_floats, device="cuda" if torch.cuda.is_available() else "cpu")

    def run() -> None:
        runtime.communicator("").all_reduce([vector], "sum")[0][:1].cpu()

    return run
