"""Changes how Keras's trainer compiles steps.

Private names of Keras touched here (test_private_names.py checks that each exists):
    `keras.src.backend.jax.trainer.jit` - compiles the step of a model's `make_train_function` or `make_test_function`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from keras.src.backend.jax import trainer as jax_trainer


@contextlib.contextmanager
def making_steps(change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """In this block, make Keras compile steps with `change(jit)` instead of `jit`."""
    jit = jax_trainer.jit
    jax_trainer.jit = change(jit)
    try:
        yield
    finally:
        jax_trainer.jit = jit
