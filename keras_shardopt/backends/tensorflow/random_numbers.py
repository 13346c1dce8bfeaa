"""Random numbers that differ between the replicas of a strategy, drawn from seeds that are equal on all of them.

Each replica has a copy of a seed generator's state, and all copies are equal, so that replicas would draw the same
dropout mask and the same noise for the first row of each. So inside a replica a multiple of its number is added to
every seed that is drawn from a generator. States stay as they are: files hold what one device would have. Replica 0
draws what a single device draws. A seed that is a number is left unchanged.

Private names of Keras touched here (a test holds each of them):
    `draw_seed` in `keras.src.backend.tensorflow.random` and `.image` - gives them the seed of what they draw.
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
    """For the time of the block, what is drawn depends on this number, a scalar, in place of the replica's."""
    token = _part.set(number)
    try:
        yield
    finally:
        _part.reset(token)


def _draw_seed(seed: Any) -> Any:
    """Stands in for Keras' function of that name."""
    drawn = _draw_seed_in_keras(seed)
    number = _part.get()
    if number is None:
        replica = tf.distribute.get_replica_context()
        number = 0 if replica is None or replica.num_replicas_in_sync == 1 else replica.replica_id_in_sync_group
    if isinstance(seed, int) or (isinstance(number, int) and number == 0):
        return drawn
    other = tf.cast(number, "int64") * _BETWEEN_REPLICAS
    return drawn + tf.cast(tf.stack([other, tf.zeros_like(other)]), drawn.dtype)
