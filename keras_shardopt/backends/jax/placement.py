"""Where variables live on JAX."""

from __future__ import annotations

from collections.abc import Sequence


def dividing_axis(shape: Sequence[int], num_replicas: int) -> int | None:
    """The first dimension that replicas can divide equally; None if there is none."""
    return next((axis for axis, size in enumerate(shape) if size and size % num_replicas == 0), None)
