"""Whether the loss of a replica's step was divided by the number of replicas, as far as that can be seen.

A gradient does not show it. What divides can be seen at work: Keras' losses and penalties, `tf.nn.compute_average_loss`
and `tf.nn.scale_regularization_loss`, and a step that reads the number of replicas itself. What was seen belongs to the
step of one replica, and is noted with its replica context. It is seen where Python runs: while a step is traced.

Private names of Keras touched here (a test holds each of them):
    `keras.src.losses.loss.reduce_values` - makes a scalar of the values of a loss, and divides it.
    `keras.src.losses.loss.scale_loss_for_distribution` - divides penalties and added losses.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses import loss as keras_loss

DIVIDED = "divided"
"""A loss that counts as it should where gradients are summed: divided by the number of replicas, or a plain sum."""

UNDIVIDED = "undivided"
"""A loss that Keras could not divide, because its function returned a scalar."""

OWN_WEIGHTS = "own weights"
"""A loss divided by the sample weights of this replica's rows only."""

IN_MODEL = "in model"
"""The step is a method of a model."""

_NOTES = "_keras_shardopt_losses"
_OF_OTHERS = ("tensorflow", "keras", "keras_shardopt")


def watch() -> None:
    """Begins to look, for the rest of the program. Doing it twice changes nothing."""
    if keras_loss.reduce_values is _reduce_values:
        return
    keras_loss.reduce_values = _reduce_values
    keras_loss.scale_loss_for_distribution = _scale_loss_for_distribution
    tf.nn.compute_average_loss = _dividing(tf.nn.compute_average_loss)
    tf.nn.scale_regularization_loss = _dividing(tf.nn.scale_regularization_loss)
    tf.distribute.Strategy.num_replicas_in_sync = property(_num_replicas_in_sync, doc=_num_replicas.__doc__)


def note(what: str) -> None:
    """Notes something about the losses of this replica's step; outside of one it does nothing."""
    context = tf.distribute.get_replica_context()
    if context is not None and _num_replicas.fget(context.strategy) > 1:
        vars(context).setdefault(_NOTES, set()).add(what)


def noted() -> set[str]:
    """What was noted in this replica's step."""
    context = tf.distribute.get_replica_context()
    found: set[str] = set() if context is None else vars(context).get(_NOTES, set())
    return set(found) if model_of_step() is None else found | {IN_MODEL}


def model_of_step() -> keras.Model | None:
    """The model whose method the step is that calls this; None in a custom training loop."""
    frame = sys._getframe(1)
    while frame is not None:
        model = frame.f_locals.get("self")
        if isinstance(model, keras.Model):
            return model
        frame = frame.f_back  # type: ignore[assignment]
    return None


_reduce_in_keras = keras_loss.reduce_values


@tf.autograph.experimental.do_not_convert
def _reduce_values(values: Any, sample_weight: Any = None, reduction: Any = "sum_over_batch_size") -> Any:
    """Stands in for Keras' function of that name."""
    if reduction == "sum":
        note(DIVIDED)
    elif reduction not in (None, "none"):
        note(UNDIVIDED if len(values.shape) == 0 else DIVIDED)
        if reduction == "mean_with_sample_weight" and sample_weight is not None:
            note(OWN_WEIGHTS)
    return _reduce_in_keras(values, sample_weight, reduction)


_scale_in_keras = keras_loss.scale_loss_for_distribution


@tf.autograph.experimental.do_not_convert
def _scale_loss_for_distribution(value: Any) -> Any:
    """Stands in for Keras' function of that name."""
    note(DIVIDED)
    return _scale_in_keras(value)


def _dividing(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def noting(*args: Any, **kwargs: Any) -> Any:
        note(DIVIDED)
        return function(*args, **kwargs)

    plain: Callable[..., Any] = tf.autograph.experimental.do_not_convert(noting)
    return plain


_num_replicas: Any = tf.distribute.Strategy.num_replicas_in_sync


def _num_replicas_in_sync(strategy: Any) -> int:
    # A step that reads this number divides by it. TensorFlow and Keras read it for purposes of their own.
    if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] not in _OF_OTHERS:
        note(DIVIDED)
    return int(_num_replicas.fget(strategy))
