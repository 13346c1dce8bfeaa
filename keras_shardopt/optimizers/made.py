"""The context manager `collected` lists the optimizers that are created in its block."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from keras_shardopt.backends import for_backend
from keras_shardopt.numerics import Optimizer

# TensorFlow only (otherwise None): once an optimizer exists, detects losses divided by the number of replicas.
_watching = for_backend({"tensorflow": "keras_shardopt.backends.tensorflow.processes"})

_collections: list[weakref.WeakSet[Any]] = []


@contextlib.contextmanager
def collected() -> Iterator[weakref.WeakSet[Any]]:
    """Yields a set to which each optimizer created in the block is added. The set drops deleted optimizers."""
    found: weakref.WeakSet[Any] = weakref.WeakSet()
    _collections.append(found)
    try:
        yield found
    finally:
        # Compare identities, because `remove` compares contents, and two sets may have equal contents.
        _collections[:] = [other for other in _collections if other is not found]


def register_created(optimizer: Optimizer) -> None:
    """Adds a `CrossShard`, or an optimizer around one, to the sets of all open `collected` blocks."""
    for found in _collections:
        found.add(optimizer)
    if _watching is not None:
        _watching.optimizer_created(optimizer)
