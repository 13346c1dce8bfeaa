"""`BatchNormalization(synchronized=True)`: statistics of all rows of the global batch, on every backend.

Keras has it on TensorFlow only. In the steps of a prepared model each replica takes mean and variance of its own
rows, which are then exchanged and joined by the formula of Chan, Golub and LeVeque (1979):

    n = sum n_r,   mean = sum n_r mean_r / n,   variance = sum (M_r + n_r (mean_r - mean)^2) / n

with n_r how many values of a channel replica r has, and M_r the sum of their squared differences from mean_r. Unlike
E[x^2] - E[x]^2 it loses no digits where the mean is large. That is one small exchange in the forward pass, and one in
the backward pass: gradients go through it.

Private names of Keras touched here (a test holds each of them):
    `BatchNormalization.__init__` - refuses `synchronized=True` on other backends than TensorFlow.
    `BatchNormalization._moments`, `_reduction_axes` - mean and variance of a batch, and the axes to take them over.
    `keras.src.backend.common.symbolic_scope.in_symbolic_scope` - whether shapes are computed, and no values.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, TypeVar

import keras
from keras import ops
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from keras_shardopt import arguments as check
from keras_shardopt.backends import for_backend
from keras_shardopt.backends.active import processes, runtime
from keras_shardopt.backends.models import layers_of
from keras_shardopt.backends.patches import install
from keras_shardopt.backends.user_warnings import warn
from keras_shardopt.numerics import Tensor, dtype_of
from keras_shardopt.update.trainer_context import BatchShare, current_share

_Layer = keras.layers.BatchNormalization
Layer = TypeVar("Layer")

# Where the sum over replicas has no gradient by itself, and where Keras synchronises by itself.
_sums = for_backend({"torch": "keras_shardopt.backends.torch.summed"})
_in_keras_too = for_backend({"tensorflow": "keras_shardopt.backends.tensorflow"}) is not None
# Backends whose own layers can stand in a model of Keras.
_modules = for_backend({"torch": "keras_shardopt.backends.torch.module_buffers"})


def synchronize_batch_normalization(model: Layer) -> Layer:
    """Lets every `BatchNormalization` of a model normalise with all rows of the global batch.

    It sets `synchronized=True`, as `keras.layers.BatchNormalization(synchronized=True)` does. On JAX and PyTorch Keras
    takes that argument inside `data_parallel()`, or once there is a `CrossShard`. In the training steps of a prepared
    model (`fit`, `train_on_batch`) such a layer uses the mean and variance of the rows of all replicas, and gradients
    go through them, so that the update is that of one process with the whole batch. Replicas may have different numbers
    of rows, or none. A `mask` is taken into account. With one replica nothing changes.

    Without it each replica normalises with its own rows on TensorFlow and PyTorch; on JAX statistics are those of the
    whole batch anyway, except where `CrossShard` needs each replica's own gradients.

    Elsewhere replicas do not wait for each other. In a plain `model(x, training=True)`, or a custom training loop, a
    layer uses the rows that it is given, and on several ranks of PyTorch a warning says so; put the loop into
    `train_step` of the model, and prepare it. On TensorFlow Keras synchronises in every `strategy.run`. In inference
    nothing is exchanged.

    A `torch.nn.BatchNorm1d` (`2d`, `3d`) inside a PyTorch module stays as it is, and a warning names it.

    Args:
        model: a `keras.Model` or a layer. Layers inside of it are changed at any depth, in place.

    Returns:
        The same model. A file of it says `synchronized: True`. Load it inside `data_parallel()` on JAX and PyTorch.

    Raises:
        TypeError: if `model` is neither.

    Example:
        >>> import keras, keras_shardopt as ks
        >>> layers = [keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        >>> model = ks.synchronize_batch_normalization(keras.Sequential(layers))
        >>> model.layers[0].synchronized
        True

    References:
        Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979.
    """
    install("optimizers")
    if not isinstance(model, keras.Layer):
        raise TypeError(
            f"`model` must be a `keras.Model` or a layer. Received: model={model!r} (of type {type(model).__name__})"
        )
    others = [] if _modules is None else _modules.batch_normalizations_in(layers_of(model))
    if others:
        warn(
            "`synchronize_batch_normalization` changes layers of Keras only. Received: a model with "
            f"{check.listed(others, ', ')}, which normalizes with the rows of one rank. "
            "Use `keras.layers.BatchNormalization` in its place."
        )
    for layer in layers_of(model):
        if isinstance(layer, _Layer):
            layer.synchronized = True
        if isinstance(layer, keras.Model):  # what was traced before does not know
            layer.train_function = layer.test_function = layer.predict_function = None
    return model


def synchronized_statistics(model: Any) -> set[int]:
    """The `id` of each moving statistic that is that of all replicas, also on one without rows."""
    layers = [each for each in layers_of(model) if isinstance(each, _Layer) and each.synchronized]
    return {id(variable) for layer in layers for variable in layer.non_trainable_variables}


def taking_synchronized(in_keras: Callable[..., None]) -> Callable[..., None]:
    """Return the constructor that takes `synchronized=True` on every backend."""

    @functools.wraps(in_keras)
    def init(layer: Any, *args: Any, synchronized: bool = False, **kwargs: Any) -> None:
        in_keras(layer, *args, **kwargs)
        if synchronized:
            layer.synchronized = synchronized

    # Keras makes a config of arguments by it, and does not look through a wrapper everywhere.
    vars(init)["__signature__"] = inspect.signature(in_keras)
    return init


_moments_in_keras = _Layer._moments


@functools.wraps(_moments_in_keras)
def _moments(layer: Any, inputs: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Stands in for Keras' method of that name."""
    if not layer.synchronized:
        return _moments_in_keras(layer, inputs, mask)
    part = None if in_symbolic_scope() else current_share()
    if part is not None:
        return runtime.no_compile(_moments_of_all, inputs, mask, tuple(layer._reduction_axes), part)
    if _in_keras_too and processes.num_replicas() > 1:
        return _moments_in_keras(layer, inputs, mask)
    runtime.no_compile(_warn_if_apart, layer)
    # Keras does not look at `synchronized` where there is a mask.
    return ops.moments(inputs, layer._reduction_axes) if mask is None else _moments_in_keras(layer, inputs, mask)


def _moments_of_all(x: Tensor, mask: Tensor | None, axes: tuple[int, ...], part: BatchShare) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel over the rows of all replicas."""
    counting = _rows_that_count(x, part)
    if mask is not None:
        mask = ops.cast(ops.expand_dims(mask, -1), "bool")
        counting = mask if counting is None else ops.logical_and(mask, counting)
    mine = ops.stack([ops.reshape(value, (-1,)) for value in _own_moments(x, counting, axes)])
    replicas = ops.reshape(ops.arange(part.replicas.num_replicas), (-1, 1, 1))
    # A sum in which each replica has a place of its own: unlike a gather, every backend is fast at it.
    placed = ops.where(ops.equal(replicas, part.replicas.replica_id), mine[None], ops.zeros_like(mine))
    everyones = _sum_over_replicas(placed, part)
    counts, means, squares = ops.stop_gradient(everyones[:, 0]), everyones[:, 1], everyones[:, 2]
    total = ops.maximum(ops.sum(counts, axis=0), 1.0)
    mean = ops.sum(counts * means, axis=0) / total
    return mean, ops.sum(squares + counts * ops.square(means - mean), axis=0) / total


def _own_moments(x: Tensor, counting: Tensor | None, axes: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Of each channel the number of values, their mean, and the sum of their squared differences from it."""
    if counting is not None:
        counting = ops.broadcast_to(counting, ops.shape(x))
        count = ops.sum(ops.cast(counting, dtype_of(x)), axes, keepdims=True)
        mean = ops.sum(ops.where(counting, x, 0.0), axes, keepdims=True) / ops.maximum(count, 1.0)
        return count, mean, ops.sum(ops.square(ops.where(counting, x - mean, 0.0)), axes, keepdims=True)
    sizes = [ops.shape(x)[axis] for axis in axes]
    mean, variance = ops.mean(x, axes), ops.var(x, axes)
    count = ops.ones_like(mean) * math.prod(ops.cast(size, dtype_of(x)) for size in sizes)
    # On TensorFlow a replica may have no rows at all, and a mean of nothing is NaN.
    return count, ops.where(count > 0, mean, 0.0), ops.where(count > 0, variance * count, 0.0)


def _rows_that_count(x: Tensor, part: BatchShare) -> Tensor | None:
    """Which rows are not there as padding only, in a shape that goes with that of `x`; None if none are."""
    if not part.ends_early:
        return None
    if not isinstance(part.local_batch_size, int):
        rows = -(-part.global_batch_size // part.replicas.num_replicas)
        if x.shape[0] != rows:
            raise ValueError(
                "A synchronized `BatchNormalization` must be given the rows of the batch where that does not divide by "
                f"the number of replicas. Received: {x.shape[0]} rows on a replica that has {rows} of "
                f"{part.global_batch_size}. Use batches that divide, or leave out `replica_clipnorm` and "
                "`replica_transform`."
            )
    return ops.reshape(ops.arange(x.shape[0]) < part.local_batch_size, [-1] + [1] * (len(x.shape) - 1))


def _sum_over_replicas(tensor: Tensor, part: BatchShare) -> Tensor:
    if _sums is not None:
        return _sums.summed(tensor, part.local_batch_size > 0)
    return part.replicas.all_reduce([tensor], "sum")[0]


_WARNED = "_keras_shardopt_warned"


def _warn_if_apart(layer: Any) -> None:
    """Says, once for a layer, that it normalises with the rows of one replica only."""
    try:
        # One program for all replicas sees all rows.
        is_apart = not runtime.communicator("").is_spmd
    except ValueError:  # in a `shard_map` or `pmap` of somebody else's
        is_apart = True
    if is_apart and _WARNED not in vars(layer):
        object.__setattr__(layer, _WARNED, True)
        warn(
            "Only in the steps of a prepared model does a synchronized `BatchNormalization` exchange statistics. "
            f"Received: {check.with_article(layer)} named {layer.name!r}, in training mode elsewhere, where each "
            "replica normalises with its own rows. Use `fit` or `train_on_batch` of a prepared model, whose "
            "`train_step` may be a custom one.",
        )
