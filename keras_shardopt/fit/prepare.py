"""`prepare(model)`: exact steps for uneven batches."""

from __future__ import annotations

from typing import Any, TypeVar

import keras

from keras_shardopt import arguments as check
from keras_shardopt.backends import for_backend
from keras_shardopt.backends.active import processes
from keras_shardopt.backends.models import mix_in, optimizers_of
from keras_shardopt.backends.patches import install
from keras_shardopt.fit import TRAINERS
from keras_shardopt.fit.calls import reducers_in, refuse_groups
from keras_shardopt.fit.prepared import PreparedModel
from keras_shardopt.fit.sharing import set_sharing
from keras_shardopt.optimizers.cross_shard import cross_shards
from keras_shardopt.optimizers.made import note_made

Model = TypeVar("Model")


def prepare(model: Model, auto_shard: bool | None = None, gather: bool | None = None) -> Model:
    """Makes `fit` on several replicas exact: updates, losses and metrics are those of one process with the whole batch.

    `compile` and `load_model` inside `data_parallel()` call it. Call it yourself for a model that is compiled
    elsewhere. See the guides on [uneven batches](../uneven_batches.md) and
    [data on several processes](../processes.md#data).

    On several processes, give `fit`, `evaluate` and `predict` the same data on each of them; `batch_size` is the
    global batch size. Every process goes through all batches, shuffled alike, and works on its rows of each. What
    `shard_data` or a `DistributedSampler` has divided is that process's own part, in batches of its own.

    Batches may be uneven in `fit`, `evaluate`, `train_on_batch` and `test_on_batch`: a batch does not divide by the
    number of replicas, a process has fewer rows or none left, or sample weights, class weights and masks are spread
    unevenly. Losses divide by what all replicas have together (rows, sum of weights, mask).

    What changes for this model:

    - TensorFlow: steps exchange numbers of rows and of weights: one small all-reduce for the batch, one for each loss.
      With `steps_per_execution` steps are made one by one. Logs of a batch are those of all replicas where a callback
      or a bar looks at them (not with several workers, where they are the mean of the replicas' own).
    - JAX: a batch that does not divide is padded with rows that no layer gets; processes exchange how many they have;
      only process 0 prints. `CrossShard(replica_clipnorm=...)` and `replica_transform` work: forward and backward pass
      then run in a `shard_map` over the replicas.
    - PyTorch: ranks exchange their numbers of rows, before each batch or, of arrays, for several batches at a time, and
      a rank without a batch left takes part with none. At the end of an epoch metrics and moving statistics are those
      of all ranks, and so are the logs of a batch where a callback looks at them. Only rank 0 prints. With
      `steps_per_execution` steps are made one by one. The DDP of Keras 3.16 stays off.
    - Several processes: at the start of `fit` all take process 0's weights, state and seeds where these differ, and a
      warning says which. Callbacks make the same decision on every process, and process 0 writes their files.
      `predict` returns all rows on every process. The order of rows is that which one process draws. `train_on_batch`
      and `test_on_batch` take each process's own rows, and `predict_on_batch` is up to each process.

    `type(model)` becomes a subclass with the methods that differ. `model.__class__` and files name the class as before.

    From then on all processes must make these calls together, with equal `epochs` and validation; where they do not,
    all of them raise. With one replica nothing changes, and doing it twice changes nothing.

    Exact are the losses given to `compile`, all `keras.losses.Loss` objects called in a custom `train_step`, and
    penalties on weights and on activities (where Keras divides these by the number of rows, which 3.12 does not). A
    loss function that returns a scalar, or an `add_loss`, counts by the number of its replica's rows; other arithmetic
    on the batch (`ops.mean(...)`) stays a mean of means. Where JAX runs a `shard_map` of a model
    with a synchronized `BatchNormalization`, penalties on activities, scalar losses, `add_loss` and layers that are not
    synchronized need batches that divide, or raise. A `BatchNormalization` normalises with
    its own replica's rows, except on JAX without per-replica gradients, where those are all rows; one that is
    `synchronized` does so with all rows everywhere (`keras_shardopt.synchronize_batch_normalization`). Metrics are
    combined as their variables' `aggregation` says: "sum" for those of Keras.

    A model with a `train_step` of its own may hold several optimizers as attributes, as the GAN of Keras' guide does:
    each of them is a `CrossShard` then, and the one of `compile` may stay unused. TensorFlow and JAX reduce the
    gradients of an optimizer that is none by themselves; on ranks of PyTorch it is an error.

    Args:
        model: a `keras.Model`, compiled with an optimizer that is or contains a `CrossShard`, or with a `train_step` of
            its own and such optimizers as attributes.
        auto_shard: bool or None. On several processes, whether all are given the same data. False: each is given its
            own part, `batch_size` is that of its own batches, and each predicts alone. None (default) leaves what
            `data_parallel` or an earlier call has set, at first True.
        gather: bool or None. On several processes, whether `predict` returns the rows of all. False: on PyTorch each
            process predicts alone, whatever it is given. None (default) leaves what is set, at first True.

    Returns:
        The same model.

    Raises:
        TypeError: if `model` is not a `keras.Model`, or `auto_shard` or `gather` not a bool.
        ValueError: if it is not compiled, or without a `CrossShard`, or with one whose groups train apart. On several
            ranks of PyTorch also if the model holds an optimizer without one. On TensorFlow also if it was made or
            loaded outside of the scope that was entered last. Later, on every process, if the data of processes differ
            where they should be the same.

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
    reducers = reducers_in(model)
    if not reducers:
        raise ValueError(
            "`model` must be compiled with a `CrossShard`, which averages the gradients of the replicas. "
            f"Received: optimizer={getattr(model, 'optimizer', None)!r}. "
            "Use `model.compile(optimizer=keras_shardopt.CrossShard(...), ...)` before `prepare(model)`."
        )
    refuse_groups(reducers)
    for optimizer in optimizers_of(model):
        is_plain = optimizer is not model.optimizer and not cross_shards(optimizer)
        if is_plain and processes.needs_initial_broadcast and processes.process()[0] > 1:
            raise ValueError(
                "Where each process trains a copy of the model, every optimizer that the model holds must average the "
                f"gradients of the ranks. Received: {check.with_article(optimizer)} next to {reducers[0]!r}. "
                f"Use `keras_shardopt.CrossShard({type(optimizer).__name__}(...))` for it, too."
            )
    prepare_for(model, auto_shard, gather)
    return model


def prepare_for(model: Any, auto_shard: bool | None = None, gather: bool | None = None) -> None:
    """Prepares a model that a `CrossShard` updates. Doing it twice changes nothing."""
    _refuse_later_methods(model)
    set_sharing(model, auto_shard, gather)
    for optimizer in optimizers_of(model):
        if cross_shards(optimizer):
            note_made(optimizer)
    trainer = for_backend(TRAINERS)
    install("prepare")
    if trainer is None:
        mix_in(model, PreparedModel)
    else:
        trainer.prepare(model)


def _refuse_later_methods(model: Any) -> None:
    """Raise ValueError if a method was set on a prepared model, which hides the prepared one."""
    classes = [kind for kind in type(model).__mro__ if issubclass(kind, PreparedModel) and kind is not type(model)]
    later = [name for kind in classes for name in vars(kind) if name in vars(model) and callable(vars(kind)[name])]
    if later:
        raise ValueError(
            f"`{later[0]}` must be set before the model is prepared: it hides the method that trains on all replicas. "
            f"Received: {later[0]}={vars(model)[later[0]]!r}. Set it before `compile`, or define it in a subclass."
        )
