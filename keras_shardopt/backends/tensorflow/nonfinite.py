"""Finite checks on TensorFlow that sum the squares of a gradient in one pass.

`tf.math.is_finite` of a gradient would write a tensor of the gradient's size to memory and read it again.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from keras_shardopt.numerics import Tensor, in_float32


def are_finite(values: Sequence[Tensor]) -> Tensor:
    """Return a vector with one bool per tensor: whether all its elements are finite."""
    found = tf.math.is_finite(tf.stack([tf.cast(tf.nn.l2_loss(in_float32(value)), "float32") for value in values]))

    def by_elements() -> Tensor:
        """Check each element, because the sum of squares can overflow although all elements are finite."""
        return tf.stack([tf.reduce_all(tf.math.is_finite(value)) for value in values])

    return tf.cond(tf.reduce_all(found), lambda: found, by_elements)
