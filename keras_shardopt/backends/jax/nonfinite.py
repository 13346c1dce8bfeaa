"""Finite checks on JAX that only reduce. On CPUs, XLA would write and read a mask of the gradient's size."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from keras_shardopt.numerics import Tensor, in_float32


def are_finite(values: Sequence[Tensor]) -> Tensor:
    """Return whether all elements of each tensor are finite."""
    found: Tensor = _are_finite(list(values))
    return found


# Compiled, or each eager step would compile each branch again.
@functools.partial(jax.jit, inline=True)
def _are_finite(values: list[Tensor]) -> Tensor:
    return jax.lax.platform_dependent(values, cpu=_by_squares, default=_by_elements)


def _by_elements(values: list[Tensor]) -> Tensor:
    return jnp.stack([jnp.all(jnp.isfinite(value)) for value in values])


def _by_squares(values: list[Tensor]) -> Tensor:
    found = jnp.stack([jnp.isfinite(jnp.sum(jnp.square(in_float32(value)))) for value in values])
    # Squares overflow before elements do.
    return jax.lax.cond(jnp.all(found), lambda: found, lambda: _by_elements(values))
