"""Finite checks on JAX that only read: XLA for CPUs would write a mask as large as the gradient, and read it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from keras_shardopt.numerics import Tensor, in_float32


def are_finite(values: Sequence[Tensor]) -> Tensor:
    """For each tensor, whether all elements are finite."""
    found: Tensor = _are_finite(list(values))
    return found


# Compiled where a step is not, in which each branch would be compiled in each call.
@functools.partial(jax.jit, inline=True)
def _are_finite(values: list[Tensor]) -> Tensor:
    return jax.lax.platform_dependent(values, cpu=_by_squares, default=_by_elements)


def _by_elements(values: list[Tensor]) -> Tensor:
    return jnp.stack([jnp.all(jnp.isfinite(value)) for value in values])


def _by_squares(values: list[Tensor]) -> Tensor:
    found = jnp.stack([jnp.isfinite(jnp.sum(jnp.square(in_float32(value)))) for value in values])
    # Squares overflow before their elements do.
    return jax.lax.cond(jnp.all(found), lambda: found, lambda: _by_elements(values))
