"""`prepare(model)`: makes `fit` exact on several replicas, also for uneven batches."""

from __future__ import annotations

from typing import Any, TypeVar

import keras

from keras_shardopt import arguments as check
from keras_shardopt.backends import for_backend
from keras_shardopt.backends.active import processes
from keras_shardopt.backends.models import mix_in, optimizers_of
from keras_shardopt.backends.patches import install
from keras_shardopt.fit import TRAINERS
from keras_shardopt.fit.calls import cross_shards_in_step, refuse_groups
from keras_shardopt.fit.prepared import PreparedModel
from keras_shardopt.fit.sharing import set_sharing
from keras_shardopt.optimizers.cross_shard import cross_shards_in
from keras_shardopt.optimizers.made import register_created

Model = TypeVar("Model")


def prepare(model: Model, auto_shard: bool | None = None, gather: bool | None = None) -> Model:
    """Makes `fit` on several replicas exact: updates, losses and metrics are those of one process with the whole batch.

    `compile` and `load_model` inside `data_parallel()` call `prepare`. Call it for a model that is compiled elsewhere.
    See [uneven batches](../uneven_batches.md) and [data on several processes](../processes.md#data).

    Pass the same data to `fit`, `evaluate` and `predict` on every process; `batch_size` is the global batch size. All
    processes iterate over all batches in the same order, and each uses its rows of every batch. Data from `shard_data`
    or with a `DistributedSampler` is already split, so each process uses all rows of the batches that it loads.

    Batches may be uneven in `fit`, `evaluate`, `train_on_batch` and `test_on_batch`: replicas may have different
    numbers of rows or none, and sample weights, class weights and masks may be spread unevenly. Losses divide by the
    total over all replicas (rows, sum of weights, or mask).

    Changes for a prepared model:

    - TensorFlow: replicas exchange numbers of rows and sums of weights: one small all-reduce per batch, and one per
      loss. With `steps_per_execution`, steps still run one by one. Logs of a batch are aggregated over replicas if a
      callback or progress bar reads them (with several workers, in every batch).
    - JAX: if the number of replicas does not divide a batch, it is padded with rows that no layer receives. Processes
      exchange their numbers of rows. Only process 0 prints. With `CrossShard(replica_clipnorm=...)` or
      `replica_transform`, the forward and backward pass run in a `shard_map` over the replicas.
    - PyTorch: ranks exchange numbers of rows before each batch (for arrays, before several batches). A rank without a
      batch takes part with zero rows. Metrics and moving statistics are combined over ranks at the end of an epoch.
      Logs of a batch are combined if a callback reads them. Only rank 0 prints. With `steps_per_execution`, steps still
      run one by one. PyTorch's DDP, which Keras 3.16 uses, stays off.
    - Several processes: if weights, state or seeds differ at the start of `fit`, all processes take those of process 0,
      and a warning names them. Callbacks make the same decision on every process, and process 0 writes their files.
      `predict` returns all rows on every process. `train_on_batch` and `test_on_batch` take each process's own rows;
      `predict_on_batch` runs on each process separately.

    `type(model)` becomes a subclass, but `model.__class__` and files still name the original class.

    All processes must call these methods together, with equal `epochs` and validation; otherwise all raise an error.
    With one replica, or when called again, `prepare` changes nothing.

    Exact losses are those of `compile`, `keras.losses.Loss` objects in a custom `train_step`, and penalties on weights
    and activities (not in Keras 3.12, which does not divide activity penalties by rows). Other values are averaged over
    replicas: a scalar loss or `add_loss` weighted by rows, `ops.mean(...)` unweighted. Metrics combine by the
    `aggregation` of their variables ("sum" in Keras). Statistics: see [batch normalization](../batch_normalization.md).

    A model with a custom `train_step` may hold several optimizers as attributes, as the GAN of Keras's guide does. Wrap
    each in a `CrossShard`; the optimizer of `compile` may stay unused. Gradients of an unwrapped optimizer are reduced
    by TensorFlow and JAX, and are an error on PyTorch ranks.

    Args:
        model: a `keras.Model` that is compiled with a `CrossShard` (or a wrapper around one), or has a custom
            `train_step` and such optimizers as attributes.
        auto_shard: bool or None. Whether all processes receive the same data. False: each process passes its own part,
            `batch_size` counts its own rows, and each predicts alone. None (default) keeps the setting of
            `data_parallel` or of an earlier call, initially True.
        gather: bool or None. Whether `predict` returns the rows of all processes. False: each PyTorch process predicts
            alone. None (default) keeps the setting, initially True.

    Returns:
        The same model.

    Raises:
        TypeError: if `model` is not a `keras.Model`, or `auto_shard` or `gather` is not a bool.
        ValueError: if the model is not compiled, has no `CrossShard`, or has a `CrossShard` with several groups. On
            several PyTorch ranks, also if the model holds an optimizer without a `CrossShard`. On TensorFlow, also if
            the model was built outside of the last scope. Later, on every process, if data that must be equal differs.

    Example:
        >>> import keras, numpy as np, keras_shardopt as ks
        >>> with ks.data_parallel() as replicas:
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile(optimizer=ks.CrossShard(keras.optimizers.Adam()), loss="mse")
        >>> model = ks.prepare(model)
        >>> history = model.fit(np.ones((7, 4)), np.ones((7, 1)), batch_size=4, verbose=0)
        >>> replicas.close()
    """
    for name, value in (("auto_shard", auto_shard), ("gather", gather)):
        if value is not None:
            check.flag(name, value)
    if not isinstance(model, keras.Model):
        raise TypeError(f"`model` must be a `keras.Model`. Received: model={model!r} (of type {type(model).__name__})")
    cross_shards = cross_shards_in_step(model)
    if not cross_shards:
        raise ValueError(
            "`model` must be compiled with a `CrossShard`, which averages the gradients of the replicas. "
            f"Received: optimizer={getattr(model, 'optimizer', None)!r}. "
            "Use `model.compile(optimizer=keras_shardopt.CrossShard(...), ...)` before `prepare(model)`."
        )
    refuse_groups(cross_shards)
    for optimizer in optimizers_of(model):
        is_plain = optimizer is not model.optimizer and not cross_shards_in(optimizer)
        if is_plain and processes.needs_initial_broadcast and processes.process()[0] > 1:
            raise ValueError(
                "If each process trains a copy of the model, every optimizer of the model must average the gradients "
                f"of the ranks. Received: {check.with_article(optimizer)} in addition to {cross_shards[0]!r}. Use "
                f"`keras_shardopt.CrossShard({type(optimizer).__name__}(...))`."
            )
    prepare_for(model, auto_shard, gather)
    return model


def prepare_for(model: Any, auto_shard: bool | None = None, gather: bool | None = None) -> None:
    """Do the work of `prepare` without checks of arguments. A second call only changes `auto_shard` and `gather`."""
    _refuse_later_methods(model)
    set_sharing(model, auto_shard, gather)
    for optimizer in optimizers_of(model):
        if cross_shards_in(optimizer):
            register_created(optimizer)
    trainer = for_backend(TRAINERS)
    install("prepare")
    if trainer is None:
        mix_in(model, PreparedModel)
    else:
        trainer.prepare(model)


def _refuse_later_methods(model: Any) -> None:
    """Raise ValueError if the user has set a method on the model that would hide a method added by `prepare`."""
    classes = [kind for kind in type(model).__mro__ if issubclass(kind, PreparedModel) and kind is not type(model)]
    later = [name for kind in classes for name in vars(kind) if name in vars(model) and callable(vars(kind)[name])]
    if later:
        raise ValueError(
            f"`{later[0]}` must not be set after `compile` or `keras_shardopt.prepare`, because it would replace the "
            f"method that trains on all replicas. Received: {later[0]}={vars(model)[later[0]]!r}. Set it before "
            "`compile`, or in a subclass."
        )
