"""Whether the loss of a replica's step was divided by the number of replicas, as far as that can be seen.

A gradient does not show it. What divides can be seen at work: Keras' losses and penalties, `tf.nn.compute_average_loss`
and `tf.nn.scale_regularization_loss`, and a step that reads the number of replicas itself. What was seen belongs to the
step of one replica, and is noted with its replica context. It is seen where Python runs: while a step is traced.
Where a step has several losses, the tape says which one a gradient is of.

Private names of Keras touched here (a test holds each of them):
    `keras.src.losses.loss.reduce_values` - makes a scalar of the values of a loss, and divides it.
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
"""A loss that counts as it should where gradients are summed: divided by the number of replicas, or a plain sum."""

BY_NUMBER = "by number"
"""A loss that Keras, TensorFlow or a prepared step has divided by the number of replicas for sure."""

UNDIVIDED = "undivided"
"""A loss that Keras could not divide, because its function returned a scalar."""

BARE_TERM = "bare term"
"""A loss of which one term is divided and another is not."""

OWN_WEIGHTS = "own weights"
"""A loss divided by the sample weights of this replica's rows only."""

BY_HAND = "by hand"
"""The step reads the number of replicas, and so divides a loss itself."""

SUM = "sum"
"""A loss that adds up over rows, and is divided by a number at most."""

IN_MODEL = "in model"
"""The step is a method of a model."""

_NOTES = "_keras_shardopt_losses"
_TENSORS = "_keras_shardopt_divided_losses"
_BARE = "_keras_shardopt_sources_of_bare_losses"

# Operations of which each input is a term, that pass one term on, and that make one term of several inputs.
_ADDING = {"Add", "AddN", "AddV2", "Pack", "Sub"}
_PASSING = {"Cast", "ExpandDims", "Identity", "Neg", "Reshape", "Squeeze", "Sum"}
_MULTIPLYING = {"DivNoNan", "Mul", "MulNoNan", "RealDiv", "SelectV2"}
# What is no term of a loss by itself; of a function that was traced nothing is known.
_NO_TERM = {"Const", "PartitionedCall", "Placeholder", "ReadVariableOp", "StatefulPartitionedCall", "StopGradient"}
_OF_OTHERS = ("tensorflow", "keras", "keras_shardopt")


def note(what: str) -> None:
    """Notes something about the losses of this replica's step; outside of one it does nothing."""
    context = tf.distribute.get_replica_context()
    if context is not None and _num_replicas.fget(context.strategy) > 1:
        vars(context).setdefault(_NOTES, set()).add(what)


def note_divided(loss: Any, adds_up: bool = False) -> Any:
    """Notes a loss that counts as it should where gradients are summed, perhaps as it `adds_up`. Returns it."""
    note(DIVIDED)
    if not adds_up:
        note(BY_NUMBER)
    context = tf.distribute.get_replica_context()
    if context is not None and _NOTES in vars(context):
        vars(context).setdefault(_TENSORS, []).append(loss)
    return loss


def undivided(loss: Any) -> Any:
    """A loss that Keras has divided by the number of replicas as it was before."""
    return loss * _num_replicas.fget(tf.distribute.get_strategy())


def divided(loss: Any) -> Any:
    """A loss that Keras has multiplied by the number of replicas as it was before."""
    return loss * (1 / _num_replicas.fget(tf.distribute.get_strategy()))


def logged(loss: Any) -> Any:
    """What a metric is to hold of a loss: where it adds up losses that Keras has divided, as if that were not so."""
    context = tf.distribute.get_replica_context()
    if context is None or not tf.is_symbolic_tensor(loss) or loss.shape.rank != 0 or BY_HAND in noted():
        return loss
    divided = {tensor.name for tensor in vars(context).get(_TENSORS, []) if tf.is_symbolic_tensor(tensor)}
    num_replicas = _num_replicas.fget(context.strategy)
    return loss * num_replicas if _adds_up_divided(loss, divided, num_replicas) else loss


def noted() -> set[str]:
    """What was noted in this replica's step."""
    context = tf.distribute.get_replica_context()
    found: set[str] = set() if context is None else vars(context).get(_NOTES, set())
    return set(found) if model_of_step() is None else found | {IN_MODEL}


def is_bare(variables: Sequence[Any], grads: Sequence[Any]) -> bool:
    """Whether in this replica's step the latest gradients of all these were of losses without a divided one in them.

    Where the step reads the number of replicas it may divide the gradients as well.
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
    """A function that notes what is noted here in the replica context in which it is called."""
    context = tf.distribute.get_replica_context()
    seen, bare = noted(), {} if context is None else vars(context).get(_BARE, {})

    def carry() -> None:
        for what in seen:
            note(what)
        vars(tf.distribute.get_replica_context()).setdefault(_BARE, {}).update(bare)

    return carry


def model_of_step() -> keras.Model | None:
    """The model whose method the step is that calls this; None in a custom training loop."""
    model: keras.Model | None = running_instance(keras.Model)
    return model


_reduce_in_keras = keras_loss.reduce_values


@tf.autograph.experimental.do_not_convert
def _reduce_values(values: Any, sample_weight: Any = None, reduction: Any = "sum_over_batch_size") -> Any:
    """Stands in for Keras' function of that name."""
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
    """Stands in for Keras' function of that name."""
    return note_divided(_scale_in_keras(value))


def dividing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return TensorFlow's function that divides a loss, and notes the result."""

    @functools.wraps(function)
    def noting(*args: Any, **kwargs: Any) -> Any:
        return note_divided(function(*args, **kwargs))

    plain: Callable[..., Any] = tf.autograph.experimental.do_not_convert(noting)
    return plain


def looking(gradient: Callable[..., Any]) -> Callable[..., Any]:
    """Return TensorFlow's function that computes gradients, and notes the kind of loss."""

    @functools.wraps(gradient)
    def looking(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        context = tf.distribute.get_replica_context()
        if context is None or _num_replicas.fget(context.strategy) == 1:
            return gradient(tape, target, sources, *args, **kwargs)
        divided = vars(context).get(_TENSORS, [])
        kinds = set()
        # Of eager tensors it is not known what they were made of. Where Keras had a scalar that has been said.
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
        # A function that was traced may hide a divided loss.
        is_concrete = tf.is_tensor(target) and len(here) == len(divided) and (graph is None or kinds == {BARE_TERM})
        if BY_HAND in noted():
            num_replicas = _num_replicas.fget(context.strategy)
            # A sum may be divided by the rows of all replicas, whatever that number is.
            is_concrete &= graph is not None and not (_adds_up_rows(target) or _holds_number(target, num_replicas))
        is_bare = is_concrete and all(value is None for value in of_divided)
        for source in tf.nest.flatten(sources):
            vars(context).setdefault(_BARE, {})[id(source)] = (source, is_bare)
        return found

    plain: Callable[..., Any] = tf.autograph.experimental.do_not_convert(looking)
    return plain


def _graph_of(tensor: Any) -> Any:
    return getattr(tensor, "graph", None)  # an eager tensor has none


def _terms(loss: Any, divided: set[str], num_replicas: int) -> set[str]:
    """Of which kinds the terms are that a scalar in a graph adds up."""
    found: set[str] = set()
    waiting, names = [loss], set()
    while waiting:  # not by recursion: a model may have a penalty for each of a thousand weights
        tensor = waiting.pop()
        kind, inputs = tensor.op.type, list(tensor.op.inputs)
        if tensor.name in names or (kind in _NO_TERM and tensor.name not in divided):
            continue
        names.add(tensor.name)
        if tensor.name in divided:
            found.add(DIVIDED)
        elif kind in _PASSING:
            waiting.append(inputs[0])
        elif kind in _ADDING:
            waiting.extend(inputs)
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
    """Whether a scalar in a graph adds up these losses and nothing else, with factors other than that number."""
    waiting = [loss]
    while waiting:
        tensor = waiting.pop()
        kind, inputs = tensor.op.type, list(tensor.op.inputs)
        if tensor.name in divided:
            continue
        if kind in _MULTIPLYING:
            factors = [factor for each in inputs if (factor := tf.get_static_value(each)) is not None]
            if len(factors) != len(inputs) - 1 or any(np.any(np.isclose(each, num_replicas)) for each in factors):
                return False
            waiting.extend(each for each in inputs if tf.get_static_value(each) is None)
        elif kind in _ADDING | _PASSING and inputs:
            waiting.extend(inputs if kind in _ADDING else inputs[:1])
        elif not inputs and tf.get_static_value(tensor) == 0:  # with which `sum` begins
            continue
        else:
            return False
    return True


def _holds_number(value: Any, num_replicas: int) -> bool:
    """Whether a tensor in a graph was multiplied or divided by the number of replicas, or by a product with it."""
    waiting, names = [value], set()
    while waiting:
        tensor = waiting.pop()
        if not tf.is_symbolic_tensor(tensor) or tensor.name in names:
            continue
        names.add(tensor.name)
        number = tf.get_static_value(tensor)
        if number is not None and np.size(number) == 1 and (number == num_replicas or number * num_replicas == 1):
            return True
        if tensor.op.type in _ADDING | _PASSING | _MULTIPLYING:
            waiting.extend(tensor.op.inputs)
    return False


def _adds_up_rows(loss: Any) -> bool:
    """Whether each term of a scalar in a graph is a sum over rows, divided by a number that is known before at most."""
    is_sum, waiting = False, [loss]
    while waiting:
        tensor = waiting.pop()
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
            waiting.extend(dynamic)
        elif kind in _ADDING | _PASSING:
            waiting.extend(inputs if kind in _ADDING else inputs[:1])
        else:
            return False
    return is_sum


_num_replicas: Any = tf.distribute.Strategy.num_replicas_in_sync


def noting_number(in_tensorflow: property) -> property:
    """Return TensorFlow's property that holds the number of replicas, and notes each read by a step."""

    def num_replicas_in_sync(strategy: Any) -> int:
        # A step that reads this number divides by it. TensorFlow and Keras read it for purposes of their own.
        if caller_module().partition(".")[0] not in _OF_OTHERS:
            note(DIVIDED)
            note(BY_HAND)
        return int(_num_replicas.fget(strategy))

    return property(num_replicas_in_sync, doc=in_tensorflow.__doc__)
