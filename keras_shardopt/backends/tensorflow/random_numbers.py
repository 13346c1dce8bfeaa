"""Random numbers that differ between the replicas of a strategy, drawn from equal seeds.

All replicas have equal copies of a seed generator's state, and would draw the same dropout mask and noise for their own
rows. On a replica, a multiple of its id is therefore added to every seed drawn from a generator. States remain equal,
so files hold the same states as after training on one device. Replica 0 draws the same numbers as one device. Integer
seeds are unchanged.

Private names of Keras touched here (a test checks that each exists):
    `draw_seed` in `keras.src.backend.tensorflow.random` and `.image` - returns the seed for each draw.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow import random as tf_random

_BETWEEN_REPLICAS = 0x9E3779B1

_part: contextvars.ContextVar[Any] = contextvars.ContextVar("part", default=None)

_draw_seed_in_keras = tf_random.draw_seed


@contextlib.contextmanager
def as_part(number: Any) -> Iterator[None]:
    """Make random numbers that are drawn in the block depend on the scalar `number` instead of the replica id."""
    token = _part.set(number)
    try:
        yield
    finally:
        _part.reset(token)


def _draw_seed(seed: Any) -> Any:
    """Replaces Keras' `draw_seed`. Adds a multiple of the replica's id, so replicas draw different numbers."""
    drawn = _draw_seed_in_keras(seed)
    number = _part.get()
    if number is None:
        replica = tf.distribute.get_replica_context()
        number = 0 if replica is None or replica.num_replicas_in_sync == 1 else replica.replica_id_in_sync_group
    if isinstance(seed, int) or (isinstance(number, int) and number == 0):
        return drawn
    other = tf.cast(number, "int64") * _BETWEEN_REPLICAS
    return drawn + tf.cast(tf.stack([other, tf.zeros_like(other)]), drawn.dtype)
