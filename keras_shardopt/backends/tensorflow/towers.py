"""Towers on TensorFlow: copies of a model on several devices, each for a part of a batch of unknown size."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_shardopt.numerics import Tensor


def on_device(device: str) -> contextlib.AbstractContextManager[Any]:
    """Return a scope that computes on this device. Weights stay on their own devices."""
    scope: contextlib.AbstractContextManager[Any] = tf.device(device)
    return scope


def divide_rows(tensor: Tensor, num_parts: int) -> list[Tensor] | None:
    """Split a tensor into parts along its first dimension. Return None if its size is known: the caller splits then."""
    if isinstance(tensor, tf.SparseTensor):
        return list(tf.sparse.split(sp_input=tensor, num_split=num_parts, axis=0))
    if tensor.shape[0] is not None:
        return None
    if isinstance(tensor, tf.RaggedTensor):
        size = tensor.nrows() // num_parts
        return [tensor[k * size : (k + 1) * size] for k in range(num_parts)]
    # Do not assert that the split is possible, because XLA drops assertions. The error of `tf.split` contains the name.
    return list(tf.split(tensor, num_parts, name="num_towers_must_divide_the_batch"))


@contextlib.contextmanager
def running_if_divisible(tensors: Sequence[Tensor], divisor: int, rule: str, remedy: str) -> Iterator[None]:
    """Make the operations of this block fail unless `divisor` divides the first dimension of each tensor.

    Sizes may be unknown during the trace. The error message contains `rule`, the size and `remedy`.
    """
    sizes = [_num_rows(tensor) for tensor in tensors]
    assertions = [tf.debugging.Assert(tf.equal(size % divisor, 0), [rule, size, remedy]) for size in sizes]
    with tf.variable_creator_scope(_created_anyway), tf.control_dependencies(assertions):
        yield


def _created_anyway(create: Callable[..., Any], **arguments: Any) -> Any:
    # XLA computes the initial values of variables outside the function, so they must not wait for an assertion.
    with tf.control_dependencies(None):
        return create(**arguments)


def _num_rows(tensor: Tensor) -> Tensor:
    if isinstance(tensor, tf.SparseTensor):
        return tensor.dense_shape[0]
    return tensor.nrows() if isinstance(tensor, tf.RaggedTensor) else tf.shape(tensor)[0]
