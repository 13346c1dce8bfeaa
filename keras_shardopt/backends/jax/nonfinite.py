"""Finite checks on JAX. On CPUs they sum squares, because XLA would write the whole result of `isfinite` to memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from keras_shardopt.numerics import Tensor, in_float32


def are_finite(values: Sequence[Tensor]) -> Tensor:
    """Return a vector with one bool per tensor: whether all its elements are finite."""
    found: Tensor = _are_finite(list(values))
    return found


# Compile this function, or each eager step would compile both branches of `platform_dependent` again.
@functools.partial(jax.jit, inline=True)
def _are_finite(values: list[Tensor]) -> Tensor:
    return jax.lax.platform_dependent(values, cpu=_by_squares, default=_by_elements)


def _by_elements(values: list[Tensor]) -> Tensor:
    return jnp.stack([jnp.all(jnp.isfinite(value)) for value in values])


def _by_squares(values: list[Tensor]) -> Tensor:
    found = jnp.stack([jnp.isfinite(jnp.sum(jnp.square(in_float32(value)))) for value in values])
    # Check each element if a sum is not finite, because squares can overflow although all elements are finite.
    return jax.lax.cond(jnp.all(found), lambda: found, lambda: _by_elements(values))
