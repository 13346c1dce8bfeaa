"""Notifies open scopes of each new optimizer that reduces gradients."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from keras_shardopt.backends import for_backend
from keras_shardopt.numerics import Optimizer

# TensorFlow: losses are watched from the first such optimizer on.
_watching = for_backend({"tensorflow": "keras_shardopt.backends.tensorflow.processes"})

_collections: list[weakref.WeakSet[Any]] = []


@contextlib.contextmanager
def collected() -> Iterator[weakref.WeakSet[Any]]:
    """Collects the optimizers noted during the block. Weak references: deleted optimizers disappear."""
    found: weakref.WeakSet[Any] = weakref.WeakSet()
    _collections.append(found)
    try:
        yield found
    finally:
        # By identity: `remove` compares contents, and two collections may be equal.
        _collections[:] = [other for other in _collections if other is not found]


def register_created(optimizer: Optimizer) -> None:
    """Notes a new or newly prepared optimizer that communicates with other replicas."""
    for found in _collections:
        found.add(optimizer)
    if _watching is not None:
        _watching.optimizer_created(optimizer)
