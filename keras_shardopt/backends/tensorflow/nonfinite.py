"""Finite checks on TensorFlow in one pass of sums of squares.

A mask of the gradient's size would be written to memory and read again.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from keras_shardopt.numerics import Tensor, in_float32


def are_finite(values: Sequence[Tensor]) -> Tensor:
    """Return whether all elements of each tensor are finite."""
    found = tf.math.is_finite(tf.stack([tf.cast(tf.nn.l2_loss(in_float32(value)), "float32") for value in values]))

    def by_elements() -> Tensor:
        """Check elements, because squares overflow first."""
        return tf.stack([tf.reduce_all(tf.math.is_finite(value)) for value in values])

    return tf.cond(tf.reduce_all(found), lambda: found, by_elements)
