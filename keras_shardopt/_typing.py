"""The few type aliases that the package shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

Tensor = Any
"""A tensor of whichever framework runs Keras (on TensorFlow also `tf.IndexedSlices`)."""

Variable = Any
"""A `keras.Variable`, or on TensorFlow the `tf.Variable` inside it."""

Gradients = Sequence[Any]
"""One `Tensor` or `None` per variable."""

ReduceOp = Literal["sum", "mean", "max"]
"""What a reduction over replicas computes, element by element."""

Groups = Sequence[Sequence[int]]
"""Disjoint, equally large, ascending lists of replica ids that together name every replica once."""

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
"""Any function."""
