"""`BatchNormalization(synchronized=True)`: statistics of all rows of the global batch, on every backend.

Keras has this option on TensorFlow only. After `prepare(model)`, each replica computes mean and variance of its own
rows in a training step. Replicas then combine these statistics by the formula of Chan, Golub and LeVeque (1979):

    n = sum n_r,   mean = sum n_r mean_r / n,   variance = sum (M_r + n_r (mean_r - mean)^2) / n

n_r is the number of values per channel on replica r, and M_r the sum of their squared differences from mean_r. Unlike
E[x^2] - E[x]^2, the formula keeps its precision if the mean is large. Each layer then costs one small exchange in the
forward pass, and one in the backward pass for the gradients.

Private names of Keras touched here (a test checks that each exists):
    `BatchNormalization.__init__` - raises for `synchronized=True` on backends other than TensorFlow.
    `BatchNormalization._moments`, `_reduction_axes` - mean and variance of a batch, and their axes.
    `keras.src.backend.common.symbolic_scope.in_symbolic_scope` - whether Keras only computes shapes.
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

# PyTorch only: a module with a differentiable sum over ranks.
_sums = for_backend({"torch": "keras_shardopt.backends.torch.summed"})
# True on TensorFlow: Keras itself can synchronize `BatchNormalization` there.
_in_keras_too = for_backend({"tensorflow": "keras_shardopt.backends.tensorflow"}) is not None
# PyTorch only: finds the `torch.nn` modules that a Keras model can contain.
_modules = for_backend({"torch": "keras_shardopt.backends.torch.module_buffers"})


def synchronize_batch_normalization(model: Layer) -> Layer:
    """Makes every `BatchNormalization` of a model normalize with all rows of the global batch.

    It sets `synchronized=True`, like `keras.layers.BatchNormalization(synchronized=True)`. (On JAX and PyTorch, Keras
    accepts that argument inside `data_parallel()`, or once a `CrossShard` exists.) In training steps of a prepared
    model (`fit`, `train_on_batch`), the layer uses the mean and variance over the rows of all replicas, and
    differentiates through them. So the update is that of one process with the whole batch. Replicas may have different
    numbers of rows or none, and a `mask` is respected. With one replica, nothing changes.

    Without synchronization, each replica normalizes with its own rows on TensorFlow and PyTorch. On JAX, it normalizes
    with the whole batch, unless `CrossShard` needs per-replica gradients.

    Outside of the steps of a prepared model, such as in `model(x, training=True)` or a custom training loop, the layer
    normalizes with its replica's rows, and several PyTorch ranks warn. To synchronize, move the loop into `train_step`
    of a prepared model. On TensorFlow, Keras synchronizes in every `strategy.run`. Inference exchanges nothing.

    A `torch.nn.BatchNorm1d` (`2d`, `3d`) inside a PyTorch module stays unsynchronized, and a warning names it.

    Args:
        model: a `keras.Model` or a layer. The layers inside it change in place, at any depth.

    Returns:
        The same model. Its files contain `synchronized: True`; on JAX and PyTorch, load them inside `data_parallel()`.

    Raises:
        TypeError: if `model` is neither a model nor a layer.

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
            "Use `keras.layers.BatchNormalization` instead."
        )
    for layer in layers_of(model):
        if isinstance(layer, _Layer):
            layer.synchronized = True
        if isinstance(layer, keras.Model):  # drop compiled functions, because they use the old setting
            layer.train_function = layer.test_function = layer.predict_function = None
    return model


def synchronized_statistics(model: Any) -> set[int]:
    """Return the `id` of each moving mean and variance in the model's synchronized `BatchNormalization` layers."""
    layers = [each for each in layers_of(model) if isinstance(each, _Layer) and each.synchronized]
    return {id(variable) for layer in layers for variable in layer.non_trainable_variables}


def taking_synchronized(in_keras: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor for `BatchNormalization` that accepts `synchronized=True` on every backend."""

    @functools.wraps(in_keras)
    def init(layer: Any, *args: Any, synchronized: bool = False, **kwargs: Any) -> None:
        in_keras(layer, *args, **kwargs)
        if synchronized:
            layer.synchronized = synchronized

    # Keras reads the arguments of a layer's config from this signature, but does not always follow `functools.wraps`.
    vars(init)["__signature__"] = inspect.signature(in_keras)
    return init


_moments_in_keras = _Layer._moments


@functools.wraps(_moments_in_keras)
def _moments(layer: Any, inputs: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Replaces the method of Keras that computes mean and variance of a batch."""
    if not layer.synchronized:
        return _moments_in_keras(layer, inputs, mask)
    part = None if in_symbolic_scope() else current_share()
    if part is not None:
        return runtime.no_compile(_moments_of_all, inputs, mask, tuple(layer._reduction_axes), part)
    if _in_keras_too and processes.num_replicas() > 1:
        return _moments_in_keras(layer, inputs, mask)
    runtime.no_compile(_warn_of_local_statistics, layer)
    # Call Keras's method only with a mask. Without one, the method can raise an error for a synchronized layer.
    return ops.moments(inputs, layer._reduction_axes) if mask is None else _moments_in_keras(layer, inputs, mask)


def _moments_of_all(x: Tensor, mask: Tensor | None, axes: tuple[int, ...], part: BatchShare) -> tuple[Tensor, Tensor]:
    """Return mean and variance of each channel over the rows of all replicas."""
    valid = _valid_rows(x, part)
    if mask is not None:
        mask = ops.cast(ops.expand_dims(mask, -1), "bool")
        valid = mask if valid is None else ops.logical_and(mask, valid)
    mine = ops.stack([ops.reshape(value, (-1,)) for value in _local_moments(x, valid, axes)])
    replicas = ops.reshape(ops.arange(part.replicas.num_replicas), (-1, 1, 1))
    # Gather by a sum: each replica fills its row of an array of zeros. Unlike a gather, this is fast on every backend.
    placed = ops.where(ops.equal(replicas, part.replicas.replica_id), mine[None], ops.zeros_like(mine))
    everyones = _sum_over_replicas(placed, part)
    counts, means, squares = ops.stop_gradient(everyones[:, 0]), everyones[:, 1], everyones[:, 2]
    total = ops.maximum(ops.sum(counts, axis=0), 1.0)
    mean = ops.sum(counts * means, axis=0) / total
    return mean, ops.sum(squares + counts * ops.square(means - mean), axis=0) / total


def _local_moments(x: Tensor, valid: Tensor | None, axes: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return, per channel, the number of values, their mean, and the sum of squared differences from the mean."""
    if valid is not None:
        valid = ops.broadcast_to(valid, ops.shape(x))
        count = ops.sum(ops.cast(valid, dtype_of(x)), axes, keepdims=True)
        mean = ops.sum(ops.where(valid, x, 0.0), axes, keepdims=True) / ops.maximum(count, 1.0)
        return count, mean, ops.sum(ops.square(ops.where(valid, x - mean, 0.0)), axes, keepdims=True)
    sizes = [ops.shape(x)[axis] for axis in axes]
    mean, variance = ops.mean(x, axes), ops.var(x, axes)
    count = ops.ones_like(mean) * math.prod(ops.cast(size, dtype_of(x)) for size in sizes)
    # On TensorFlow, a replica can have no rows. Its mean is then NaN, so replace it by 0.
    return count, ops.where(count > 0, mean, 0.0), ops.where(count > 0, variance * count, 0.0)


def _valid_rows(x: Tensor, part: BatchShare) -> Tensor | None:
    """Return a boolean mask of the rows of `x` that are not padding, or None if no row is padding."""
    if not part.ends_early:
        return None
    if not isinstance(part.local_batch_size, int):
        rows = -(-part.global_batch_size // part.replicas.num_replicas)
        if x.shape[0] != rows:
            raise ValueError(
                "If the batch size is not a multiple of the number of replicas, the input of a synchronized "
                f"`BatchNormalization` must have one entry per row. Received: {x.shape[0]} entries on a replica that "
                f"has {rows} rows of {part.global_batch_size}. Use a batch size that is a multiple, or leave out "
                "`replica_clipnorm` and `replica_transform`."
            )
    return ops.reshape(ops.arange(x.shape[0]) < part.local_batch_size, [-1] + [1] * (len(x.shape) - 1))


def _sum_over_replicas(tensor: Tensor, part: BatchShare) -> Tensor:
    if _sums is not None:
        return _sums.summed(tensor, part.local_batch_size > 0)
    return part.replicas.all_reduce([tensor], "sum")[0]


_WARNED = "_keras_shardopt_warned"


def _warn_of_local_statistics(layer: Any) -> None:
    """Warn, once per layer, that the layer normalizes with the rows of one replica only."""
    try:
        is_local = not runtime.communicator("").is_spmd  # one SPMD program has the rows of all replicas
    except ValueError:  # the layer runs in the user's `shard_map` or `pmap`
        is_local = True
    if is_local and _WARNED not in vars(layer):
        object.__setattr__(layer, _WARNED, True)
        warn(
            "A synchronized `BatchNormalization` exchanges statistics only in `fit` and `train_on_batch` of a model "
            f"passed to `keras_shardopt.prepare`. Received: the layer {layer.name!r} in training mode elsewhere, so "
            "each replica normalizes with its own rows. Call these methods, even with a custom `train_step`.",
        )
