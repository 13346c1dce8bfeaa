"""What is not finite on JAX, in one pass that only reads: in sums of squares.

A mask as large as a gradient would be written to memory, and read once more.
"""

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
    sums = [jnp.isfinite(jnp.sum(jnp.square(in_float32(value)))) for value in values]

    def look() -> Tensor:
        """Squares overflow before their elements do."""
        return jnp.stack([jnp.all(jnp.isfinite(value)) for value in values])

    found = jnp.stack(sums)
    return jax.lax.cond(jnp.all(found), lambda: found, look)
