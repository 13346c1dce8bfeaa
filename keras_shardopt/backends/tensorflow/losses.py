"""Detects whether the loss of a replica's training step was divided by the number of replicas.

A gradient does not show how its loss was divided. So wrappers note the division while a step is traced, in the replica
context: in Keras' losses and penalties, `tf.nn.compute_average_loss`, `tf.nn.scale_regularization_loss`, and reads of
the number of replicas. If a step has several losses, the target of `GradientTape.gradient` shows to which loss a
gradient belongs.

Private names of Keras touched here (a test checks that each exists):
    `keras.src.losses.loss.reduce_values` - reduces the values of a loss to a scalar, and divides it.
    `keras.src.losses.loss.scale_loss_for_distribution` - divides penalties and added losses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.losses import loss as keras_loss

from keras_shardopt.backends.keras_callers import caller_module, running_instance

DIVIDED = "divided"
"""Recorded for a loss that is divided by the number of replicas, or is a plain sum. Its gradients must be summed."""

BY_NUMBER = "by number"
"""Recorded for a loss that Keras, TensorFlow or this package certainly divided by the number of replicas."""

UNDIVIDED = "undivided"
"""Recorded for a loss that Keras could not divide, because the loss function returned a scalar."""

BARE_TERM = "bare term"
"""Recorded for a wrong loss: one term is divided by the number of replicas, and another term is not."""

OWN_WEIGHTS = "own weights"
"""Recorded for a loss divided by the sum of sample weights of this replica's rows instead of all rows."""

BY_HAND = "by hand"
"""Recorded for a step that reads the number of replicas, probably to divide a loss."""

SUM = "sum"
"""Recorded for a loss that is a sum over rows, perhaps divided by a constant."""

IN_MODEL = "in model"
"""Recorded for a step that is a method of a model, such as `train_step`, not a custom function."""

_NOTES = "_keras_shardopt_losses"
_TENSORS = "_keras_shardopt_divided_losses"
_BARE = "_keras_shardopt_sources_of_bare_losses"

# Operations that `_terms` follows in the graph of a loss: they add inputs, pass one input on, or scale an input.
_ADDING = {"Add", "AddN", "AddV2", "Pack", "Sub"}
_PASSING = {"Cast", "ExpandDims", "Identity", "Neg", "Reshape", "Squeeze", "Sum"}
_MULTIPLYING = {"DivNoNan", "Mul", "MulNoNan", "RealDiv", "SelectV2"}
# Operations that `_terms` skips: they are no terms of a loss, or they call traced functions with unknown content.
_NO_TERM = {"Const", "PartitionedCall", "Placeholder", "ReadVariableOp", "StatefulPartitionedCall", "StopGradient"}
_LIBRARIES = ("tensorflow", "keras", "keras_shardopt")


def note(what: str) -> None:
    """Record a property of the losses of this replica's step, such as `DIVIDED`. Does nothing outside a step."""
    context = tf.distribute.get_replica_context()
    if context is not None and _num_replicas.fget(context.strategy) > 1:
        vars(context).setdefault(_NOTES, set()).add(what)


def note_divided(loss: Any, adds_up: bool = False) -> Any:
    """Return `loss`, and record that its gradients must be summed over replicas. `adds_up` marks a plain sum."""
    note(DIVIDED)
    if not adds_up:
        note(BY_NUMBER)
    context = tf.distribute.get_replica_context()
    if context is not None and _NOTES in vars(context):
        vars(context).setdefault(_TENSORS, []).append(loss)
    return loss


def undivided(loss: Any) -> Any:
    """Undo Keras' division of a loss by the number of replicas."""
    return loss * _num_replicas.fget(tf.distribute.get_strategy())


def divided(loss: Any) -> Any:
    """Undo Keras' multiplication of a loss by the number of replicas."""
    return loss * (1 / _num_replicas.fget(tf.distribute.get_strategy()))


def logged(loss: Any) -> Any:
    """Return a loss for logs: undo the division by the number of replicas if all terms of the loss were divided."""
    context = tf.distribute.get_replica_context()
    if context is None or not tf.is_symbolic_tensor(loss) or loss.shape.rank != 0 or BY_HAND in noted():
        return loss
    divided = {tensor.name for tensor in vars(context).get(_TENSORS, []) if tf.is_symbolic_tensor(tensor)}
    num_replicas = _num_replicas.fget(context.strategy)
    return loss * num_replicas if _adds_up_divided(loss, divided, num_replicas) else loss


def noted() -> set[str]:
    """Return the properties that `note` has recorded for this replica's step."""
    context = tf.distribute.get_replica_context()
    found: set[str] = set() if context is None else vars(context).get(_NOTES, set())
    return set(found) if model_of_step() is None else found | {IN_MODEL}


def is_bare(variables: Sequence[Any], grads: Sequence[Any]) -> bool:
    """Return whether no loss of these gradients has a term that was divided by the number of replicas.

    Return False if the step divides the gradients by the number of replicas instead.
    """
    context = tf.distribute.get_replica_context()
    bare = {} if context is None else vars(context).get(_BARE, {})
    known = [bare.get(id(v), bare.get(id(getattr(v, "value", v)), (v, False))) for v in variables]
    if not (known and all(is_bare for _, is_bare in known)):
        return False
    values = [getattr(grad, "values", grad) for grad in grads]
    return BY_HAND not in noted() or not any(
        _holds_number(value, _num_replicas.fget(context.strategy)) for value in values if value is not None
    )


def carried() -> Callable[[], None]:
    """Return a function that copies properties recorded by `note` into the replica context in which it is called."""
    context = tf.distribute.get_replica_context()
    seen, bare = noted(), {} if context is None else vars(context).get(_BARE, {})

    def copy_notes() -> None:
        for what in seen:
            note(what)
        vars(tf.distribute.get_replica_context()).setdefault(_BARE, {}).update(bare)

    return copy_notes


def model_of_step() -> keras.Model | None:
    """Return the model whose `train_step` or other method is running. None in a custom training loop."""
    model: keras.Model | None = running_instance(keras.Model)
    return model


_reduce_in_keras = keras_loss.reduce_values


@tf.autograph.experimental.do_not_convert
def _reduce_values(values: Any, sample_weight: Any = None, reduction: Any = "sum_over_batch_size") -> Any:
    """Replaces Keras' function of that name, to record whether it divides the loss."""
    loss = _reduce_in_keras(values, sample_weight, reduction)
    if reduction in (None, "none"):
        return loss
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        note(OWN_WEIGHTS)
    if reduction != "sum" and len(values.shape) == 0:
        note(UNDIVIDED)
        return loss
    return note_divided(loss, adds_up=reduction == "sum")


_scale_in_keras = keras_loss.scale_loss_for_distribution


@tf.autograph.experimental.do_not_convert
def _scale_loss_for_distribution(value: Any) -> Any:
    """Replaces Keras' function of that name, to record that it divides the value."""
    return note_divided(_scale_in_keras(value))


def noting_result(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of TensorFlow that divides a loss, to record that its result is divided."""

    @functools.wraps(function)
    def noting(*args: Any, **kwargs: Any) -> Any:
        return note_divided(function(*args, **kwargs))

    plain: Callable[..., Any] = tf.autograph.experimental.do_not_convert(noting)
    return plain


def noting_bare_losses(gradient: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `GradientTape.gradient` to record variables whose loss has no term divided by the number of replicas."""

    @functools.wraps(gradient)
    def noting_bare_losses(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        context = tf.distribute.get_replica_context()
        if context is None or _num_replicas.fget(context.strategy) == 1:
            return gradient(tape, target, sources, *args, **kwargs)
        divided = vars(context).get(_TENSORS, [])
        kinds = set()
        # Examine the terms of the loss only in a graph, because eager tensors do not record their inputs. Do not note
        # BARE_TERM (a sum of divided and undivided terms) if UNDIVIDED was noted, which already leads to a warning.
        if tf.is_symbolic_tensor(target):
            names = {tensor.name for tensor in divided if tf.is_symbolic_tensor(tensor)}
            kinds = _terms(target, names, _num_replicas.fget(context.strategy))
            if _adds_up_rows(target):
                note(SUM)
            if divided and UNDIVIDED not in noted() and {DIVIDED, BARE_TERM} <= kinds:
                note(BARE_TERM)
        graph = _graph_of(target)
        here = [tensor for tensor in divided if _graph_of(tensor) is graph]
        found, of_divided = gradient(tape, target, [sources, here], *args, **kwargs)
        # If divided losses are in other graphs, `target` can contain one of them, so do not record it as undivided.
        is_concrete = tf.is_tensor(target) and len(here) == len(divided) and (graph is None or kinds == {BARE_TERM})
        if BY_HAND in noted():
            num_replicas = _num_replicas.fget(context.strategy)
            # Do not record sums over rows either: the program may have divided them by the rows of all replicas, which
            # the graph does not show.
            is_concrete &= graph is not None and not (_adds_up_rows(target) or _holds_number(target, num_replicas))
        is_bare = is_concrete and all(value is None for value in of_divided)
        for source in tf.nest.flatten(sources):
            vars(context).setdefault(_BARE, {})[id(source)] = (source, is_bare)
        return found

    plain: Callable[..., Any] = tf.autograph.experimental.do_not_convert(noting_bare_losses)
    return plain


def _graph_of(tensor: Any) -> Any:
    return getattr(tensor, "graph", None)  # an eager tensor has none


def _terms(loss: Any, divided: set[str], num_replicas: int) -> set[str]:
    found: set[str] = set()
    pending, names = [loss], set()
    while pending:  # not recursion, because a model can have a thousand penalties, one for each weight
        tensor = pending.pop()
        kind, inputs = tensor.op.type, list(tensor.op.inputs)
        if tensor.name in names or (kind in _NO_TERM and tensor.name not in divided):
            continue
        names.add(tensor.name)
        if tensor.name in divided:
            found.add(DIVIDED)
        elif kind in _PASSING:
            pending.append(inputs[0])
        elif kind in _ADDING:
            pending.extend(inputs)
        elif kind in _MULTIPLYING:
            found |= _kinds_of_product(tensor, divided, num_replicas)
        else:
            found.add(BARE_TERM)
    return found


def _kinds_of_product(product: Any, divided: set[str], num_replicas: int) -> set[str]:
    kind, inputs = product.op.type, list(product.op.inputs)
    several = [kinds for kinds in (_terms(tensor, divided, num_replicas) for tensor in inputs) if kinds]
    if several == [{BARE_TERM}]:
        by_hand = {"Mul": 1 / num_replicas, "RealDiv": num_replicas}.get(kind, 0)
        factors = [tf.get_static_value(tensor) for tensor in inputs]
        is_divided = any(factor is not None and np.all(np.isclose(factor, by_hand)) for factor in factors)
        return {DIVIDED} if is_divided else several[0]
    if len(several) < 2:
        return several[0] if several else set()
    return {DIVIDED} if any(DIVIDED in kinds for kinds in several) else {BARE_TERM}


def _adds_up_divided(loss: Any, divided: set[str], num_replicas: int) -> bool:
    """Return whether a scalar adds up only losses that are divided by `num_replicas`: those named in `divided`."""
    pending = [loss]
    while pending:
        tensor = pending.pop()
        kind, inputs = tensor.op.type, list(tensor.op.inputs)
        if tensor.name in divided:
            continue
        if kind in _MULTIPLYING:
            factors = [factor for each in inputs if (factor := tf.get_static_value(each)) is not None]
            if len(factors) != len(inputs) - 1 or any(np.any(np.isclose(each, num_replicas)) for each in factors):
                return False
            pending.extend(each for each in inputs if tf.get_static_value(each) is None)
        elif kind in _ADDING | _PASSING and inputs:
            pending.extend(inputs if kind in _ADDING else inputs[:1])
        elif not inputs and tf.get_static_value(tensor) == 0:  # Python's `sum` starts from 0
            continue
        else:
            return False
    return True


def _holds_number(value: Any, num_replicas: int) -> bool:
    """Return whether a factor or divisor in a tensor's graph is the number of replicas, or its inverse."""
    pending, names = [value], set()
    while pending:
        tensor = pending.pop()
        if not tf.is_symbolic_tensor(tensor) or tensor.name in names:
            continue
        names.add(tensor.name)
        number = tf.get_static_value(tensor)
        if number is not None and np.size(number) == 1 and (number == num_replicas or number * num_replicas == 1):
            return True
        if tensor.op.type in _ADDING | _PASSING | _MULTIPLYING:
            pending.extend(tensor.op.inputs)
    return False


def _adds_up_rows(loss: Any) -> bool:
    """Return whether each term of a scalar in a graph is a sum over rows, perhaps divided by a constant."""
    is_sum, pending = False, [loss]
    while pending:
        tensor = pending.pop()
        kind, inputs = tensor.op.type, list(tensor.op.inputs)
        if tf.get_static_value(tensor) is not None:
            continue
        if kind == "Sum" and inputs[0].op.type != "Pack":
            values, shape = inputs[0].op, inputs[0].shape
            is_mean = values.type == "Mean" and 0 in np.ravel(tf.get_static_value(values.inputs[1]))
            if is_mean or not shape.rank or (shape.rank > 1 and shape[0] is not None):
                return False
            is_sum = True
        elif kind in _MULTIPLYING:
            dynamic = [factor for factor in inputs if tf.get_static_value(factor) is None]
            if len(dynamic) > 1:
                return False
            pending.extend(dynamic)
        elif kind in _ADDING | _PASSING:
            pending.extend(inputs if kind in _ADDING else inputs[:1])
        else:
            return False
    return is_sum


_num_replicas: Any = tf.distribute.Strategy.num_replicas_in_sync


def noting_reads(in_tensorflow: property) -> property:
    """Wrap the property `num_replicas_in_sync` to record each read by a training step."""

    def num_replicas_in_sync(strategy: Any) -> int:
        # Note only reads by the user's step, which probably divides by the number. TensorFlow and Keras read the number
        # too.
        if caller_module().partition(".")[0] not in _LIBRARIES:
            note(DIVIDED)
            note(BY_HAND)
        return int(_num_replicas.fget(strategy))

    return property(num_replicas_in_sync, doc=in_tensorflow.__doc__)
