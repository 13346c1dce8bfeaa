"""What `prepare(model)` changes in Keras' JAX trainer.

Under a `keras.distribution` one program runs on the whole batch, so gradients, metrics and batch statistics are those
of the whole batch anyway. Two things are missing: a batch that the devices cannot divide equally, and each replica's
own gradients for an optimizer that needs them. The first is put on every device whole. For the second, forward
and backward pass run in a `shard_map`, up to the reduced gradients; the update and the metrics stay outside.

Several processes go through the same batches, drawn alike, and each puts its part of every batch on its devices; or
each feeds rows of its own, where its data is a part already. They exchange their numbers of rows before every
batch: processes with different numbers of rows, or of batches, would otherwise wait for each other for ever.

Private names of Keras touched here (a test holds each of them):
    `keras.src.backend.jax.trainer._distribute_data` - puts a batch on the devices.
    `keras.src.backend.jax.trainer.JAXEpochIterator` - what `fit` and `evaluate` iterate over.
    `JAXEpochIterator._get_iterator`, `__next__`, `EpochIterator.__iter__`, `reset`, `_num_batches` - its batches, the
        beginning and the end of an epoch, and how many batches there are.
    `EpochIterator.data_adapter`, `steps_per_epoch`, and `has_partial_batch`, `partial_batch_size`, `batch_size` and
        `num_batches` of `keras.src.trainers.data_adapters.array_data_adapter.ArrayDataAdapter` - sizes of its batches.
    `keras.src.trainers.data_adapters.data_adapter_utils.PartialBatchList` (Keras 3.16 and later) - batches that one
        execution takes one after the other.
    `Model._maybe_symbolic_build`, `_get_unbuilt_components` (on JAX from Keras 3.16 on) - builds the model from the
        first batch of this process; whether anything is to be built.
    `Model.compute_loss_and_updates`, `_update_metrics_variables` - the two halves of the trainer's step.
"""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from keras.src.backend.jax import trainer as jax_trainer
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

from keras_shardopt.backends.communicator import GlobalView
from keras_shardopt.backends.gradient_scope import claim_reduction
from keras_shardopt.backends.jax.communicator import MappedAxis, batch_size_of
from keras_shardopt.backends.jax.placement import assigning_alone, let_assign_alone, placement
from keras_shardopt.backends.jax.processes import MADE_HERE, gather_objects, predicting_together, tell
from keras_shardopt.backends.jax.runtime import OWN_GRADIENTS
from keras_shardopt.backends.keras_callers import caller_instance
from keras_shardopt.backends.models import has_built_in_step, is_prepared, layers_of, optimizers_of, override_method
from keras_shardopt.backends.scopes import assigning_nothing
from keras_shardopt.data.own_parts import is_own_part, is_surely_divided
from keras_shardopt.data.shared_draws import SharedDraws, draw_before_going_on, note_end_of_call
from keras_shardopt.data.whole_batches import checksum, fingerprint, first_rows
from keras_shardopt.fit.overrides import (
    call_silently,
    num_rows,
    reducers_in,
    refuse_groups,
    warn_of_unequal_start,
)
from keras_shardopt.fit.sharing import (
    check_alike,
    check_batches,
    check_kinds,
    sharing_of,
    splits_own_part,
    warn_of_same_parts,
)
from keras_shardopt.numerics import Tensor
from keras_shardopt.update.losses import share_losses
from keras_shardopt.update.step import Step
from keras_shardopt.update.trainer_context import BatchShare, batch_shared, row_share
from keras_shardopt.wrapping.chain import shared_variables


def prepare(model: Any, reducers_of: Callable[[Any], list[Any]]) -> None:
    """Lets batches be uneven, and gives the model a step that shows its optimizer each replica's gradients."""
    watch_batches()
    _take_uneven()
    object.__setattr__(model, "_keras_shardopt_reducers_of", reducers_of)
    reducers = reducers_in(model, reducers_of)
    # Around it nothing may look at gradients in each micro-batch, which would then be one replica's each.
    if reducers[0].accumulation is not None and reducers[0] is model.optimizer and has_built_in_step(model):
        reducers[0].accumulation.stack()
    override_method(model, "train_step", _train_step)
    for name in ("fit", "evaluate", "predict"):
        override_method(model, name, _silent_unless_chief)
    override_method(model, "fit", _fit)
    override_method(model, "reset_metrics", _reset_metrics)
    override_method(model, "predict", _predict)
    override_method(model, "predict_step", _predict_step)
    override_method(model, "load_weights", _load_weights)
    _let_assign_alone(model)
    if hasattr(model, "_maybe_symbolic_build"):
        override_method(model, "_maybe_symbolic_build", _maybe_symbolic_build)


def watch_batches() -> None:
    """Lets batches come through here on their way to the devices. Doing it twice changes nothing."""
    if jax_trainer._distribute_data is _distribute_in_keras:
        jax_trainer._distribute_data = _distribute_data
        jax_trainer.JAXEpochIterator = _EpochIterator


def _silent_unless_chief(model: Any, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    _take_uneven()  # the distribution may have been set after `prepare`
    try:
        return real(*args, **kwargs) if jax.process_index() == 0 else call_silently(real, *args, **kwargs)
    finally:
        note_end_of_call()


def _fit(model: Any, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    is_together = jax.process_count() > 1 and keras.distribution.distribution() is not None
    if is_together:
        tell("begins `fit` of a prepared model")
    object.__setattr__(model, _SPLITS_OWN_PART, splits_own_part(args, kwargs))
    try:
        with assigning_alone() if is_together else contextlib.nullcontext():
            history = real(*args, **kwargs)
    finally:
        object.__delattr__(model, _SPLITS_OWN_PART)
    if is_together:
        _let_assign_alone(model)
        tell("leaves `fit` of a prepared model")
    return history


def _start_equal(model: Any) -> None:
    """Lets all processes begin an epoch with the same values, which are process 0's where they differ."""
    variables, state = list(model.variables), _state_of(model)
    # One that has not built its model yet differs in more than values, which the optimizer reports.
    numbers = tell("compares the values of a prepared model", len(variables) + len(state))
    if len(set(numbers)) > 1 or not variables:
        return
    prints = placement.fingerprints([*variables, *state])
    differs = (prints != prints[0]).any(axis=0)
    if differs.any():
        if jax.process_index() == 0:
            warn_of_unequal_start([v.path for v, each in zip([*variables, *state], differs) if each])
        placement.broadcast_state(variables, state)


def _state_of(model: Any) -> list[Any]:
    optimizers = [optimizer for optimizer in optimizers_of(model) if optimizer.built]
    return [variable for optimizer in optimizers for variable in shared_variables(optimizer)]


def _load_weights(model: Any, real: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """On one process or on all: Keras makes an optimizer to see what it has, of which JAX would ask all."""
    _let_assign_alone(model)
    placement.outside_strategy(lambda: real(*args, **kwargs))


def _let_assign_alone(model: Any) -> None:
    if jax.process_count() > 1:
        let_assign_alone([*model.variables, *_state_of(model)])


def _reset_metrics(model: Any, real: Callable[[], None]) -> None:
    """What begins an epoch: where one process only comes here, JAX would fail with words that say nothing."""
    if _SPLITS_OWN_PART in vars(model) and _is_together():
        tell("starts an epoch of a prepared model")
    real()


def _predict(model: Any, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """On several processes each has all rows in the end, if all have the same data; else Keras' own is refused."""
    x = kwargs.get("x", args[0] if args else None)
    sharing = sharing_of(model)
    if not (sharing.gather and sharing.auto_shard) or is_own_part(x):
        return real(*args, **kwargs)
    with predicting_together():
        return real(*args, **kwargs)


def _predict_step(model: Any, real: Callable[..., Any], state: Any, data: Any) -> Any:
    del model
    outputs, others = real(state, data)
    if _is_together():
        everywhere = NamedSharding(keras.distribution.distribution().device_mesh.backend_mesh, PartitionSpec())
        outputs = jax.lax.with_sharding_constraint(outputs, everywhere)
    return outputs, others


# -- batches that the devices cannot divide ------------------------------------------------------------------------

_TAKES_UNEVEN = "_keras_shardopt_takes_uneven"
_SPLITS_OWN_PART = "_keras_shardopt_splits_own_part"
_NEXT_BATCH = "takes the next batch of a prepared model"

_distribute_in_keras = jax_trainer._distribute_data
_KerasEpochIterator = jax_trainer.JAXEpochIterator


def _take_uneven() -> None:
    """From now on batches need not divide under the active distribution."""
    distribution = keras.distribution.distribution()
    if distribution is not None:
        vars(distribution)[_TAKES_UNEVEN] = True


def _check_divides(num_rows: int) -> None:
    """Raises ValueError where `data_parallel` has divided the rows of batches, and these rows do not divide."""
    distribution = keras.distribution.distribution()
    if distribution is None or MADE_HERE not in vars(distribution) or _takes_uneven(distribution):
        return
    num_replicas = batch_size_of(distribution) // jax.process_count()
    if num_rows % num_replicas:
        raise ValueError(
            "The number of rows of every batch must divide by the number of replicas. "
            f"Received: a batch of {num_rows} rows, for {num_replicas} replicas. Call `keras_shardopt.prepare(model)` "
            "after `compile`, and any number of rows will do; or leave the last rows out."
        )


def _takes_uneven(distribution: Any) -> bool:
    return distribution is not None and _TAKES_UNEVEN in vars(distribution) and batch_size_of(distribution) > 1


def _is_together() -> bool:
    """Whether several processes go through the batches of a prepared model together."""
    return jax.process_count() > 1 and _takes_uneven(keras.distribution.distribution())


def _distribute_data(data: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for Keras' function of that name. `data` is None where this process has no batch left."""
    distribution = keras.distribution.distribution()
    if not _takes_uneven(distribution):
        # Of several batches that Keras 3.16 has stacked the first dimension counts the batches.
        if not (kwargs.get("is_super_batch") or any(args[1:])):
            _check_divides(num_rows(data))
        return _distribute_in_keras(data, *args, **kwargs)
    rows = 0 if data is None else num_rows(data)
    everywhere = [rows]
    if jax.process_count() > 1:
        everywhere = tell(_NEXT_BATCH, rows)
    if not any(everywhere):
        return None
    if len(set(everywhere)) > 1 or sum(everywhere) % batch_size_of(distribution):
        return _on_all_devices(data if len(everywhere) == 1 else _joined(data, rows), distribution)
    # Without the entries that are None (no sample weights), on which Keras fails here.
    structure = jax.tree.structure(data)
    leaves = [_distribute_in_keras(leaf) for leaf in jax.tree.leaves(data)]
    return jax.tree.unflatten(structure, leaves)


def _on_all_devices(data: Any, distribution: Any) -> Any:
    """Every device gets all rows, and repeats the work of the others: right, and rare."""
    return _laid_out(data, distribution, PartitionSpec())


def _laid_out(data: Any, distribution: Any, layout: PartitionSpec) -> Any:
    """Each device gets its rows of what every process has."""
    sharding = NamedSharding(distribution.device_mesh.backend_mesh, layout)

    def put(leaf: Any) -> Tensor:
        leaf = np.asarray(leaf)
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

    return jax.tree.map(put, data)


def _on_their_devices(data: Any, distribution: Any) -> Any:
    """Of a batch that all processes have, each device gets its rows; or all where they do not divide."""
    if num_rows(data) % batch_size_of(distribution):
        return _on_all_devices(data, distribution)
    return _laid_out(data, distribution, PartitionSpec(distribution.batch_dim_name))


def _joined(data: Any, num_rows: int) -> Any:
    """The rows of all processes, in the order of their ids. One may have no batch, and not know what one looks like."""
    parts = gather_objects(jax.tree.map(np.asarray, data) if num_rows else None)
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *[part for part in parts if part is not None])


class _EpochIterator(_KerasEpochIterator):  # type: ignore[misc, valid-type]
    """Ends on all processes together: one without a batch left goes on with the rows of the others."""

    def __init__(self, x: Any, y: Any = None, sample_weight: Any = None, *args: Any, **kwargs: Any) -> None:
        self._model = model = caller_instance()  # Keras does not say for which one this is
        data = (x, y, sample_weight)
        self._is_together = _is_together()
        self._trains = "class_weight" in kwargs  # or None, which Keras gives where it trains and nowhere else
        self._is_whole = self._is_together and _takes_whole(model, *data)
        self._is_compared = False
        self._draws = SharedDraws() if self._is_whole else None
        if self._is_together:
            is_meant = self._is_whole or not self._trains or model is None or sharing_of(model).auto_shard
            self._check_kind(data, is_meant or is_surely_divided(*data))
        with self._drawing() if hasattr(x, "__next__") else contextlib.nullcontext():
            super().__init__(*data, *args, **kwargs)  # Keras looks at the first batches of a generator
        if self._is_whole:
            draw_before_going_on(self.data_adapter)
        self._has_arrays = isinstance(self.data_adapter, ArrayDataAdapter)  # which draw when a batch is taken
        if self._has_arrays and not kwargs.get("shuffle"):
            self._draws = None
        self._check_sizes()
        self._agree_on_length()

    def _check_kind(self, data: Any, is_meant: bool) -> None:
        """Finds processes of which some have all data and others parts; and parts that are equal, unless meant."""
        told = gather_objects((self._is_whole, 0 if is_meant else checksum(first_rows(data[:2]))), "starts on data")
        check_kinds([is_whole for is_whole, _ in told])
        if told[0][1] and len(set(told)) == 1 and jax.process_index() == 0:
            warn_of_same_parts()

    def _drawing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._draws is None else self._draws.drawing()

    def __iter__(self) -> Any:
        if self._is_together and self._trains and is_prepared(self._model):
            _start_equal(self._model)  # callbacks have changed rates or weights, perhaps in some processes only
        if self._draws is not None:
            self._draws.forget()
        return super().__iter__()

    def __next__(self) -> Any:
        with contextlib.nullcontext() if self._has_arrays else self._drawing():
            return super().__next__()

    def _check_sizes(self) -> None:
        """Finds batches that will not divide, where their sizes are known, before Keras takes the weights away."""
        adapter = self.data_adapter
        if not isinstance(adapter, ArrayDataAdapter):
            return  # others may leave out the last rows
        if adapter.has_partial_batch and not self.steps_per_epoch:
            _check_divides(adapter.partial_batch_size)
        if adapter.num_batches > adapter.has_partial_batch:
            _check_divides(adapter.batch_size)

    def reset(self) -> None:
        with contextlib.nullcontext() if self._has_arrays else self._drawing():
            super().reset()
        self._agree_on_length()

    def _agree_on_length(self) -> None:
        if self._is_together and not self._is_whole:
            lengths = gather_objects(self.data_adapter.num_batches, "starts an epoch of a prepared model")
            self._num_batches = None if None in lengths else max(lengths)

    def _get_iterator(self) -> Iterator[Any]:
        if not _takes_uneven(keras.distribution.distribution()):
            return super()._get_iterator()
        batches = self.parts() if self._is_whole else self.batches()
        if self._is_whole and not self._is_compared:  # now, as in a moment Keras takes the weights out of the model
            first = next(batches, None)
            batches = itertools.chain([] if first is None else [first], batches)
        # From 3.16 on Keras takes what comes for as many batches as `steps_per_execution` says, unless it is in a list.
        if self.steps_per_execution == 1 or not hasattr(data_adapter_utils, "PartialBatchList"):
            return batches
        lists = iter(lambda: list(itertools.islice(batches, self.steps_per_execution)), [])
        return map(data_adapter_utils.PartialBatchList, lists)

    def batches(self) -> Iterator[Any]:
        """Those of all processes together."""
        batches = iter(self.data_adapter.get_jax_iterator())
        while (batch := _distribute_data(next(batches, None))) is not None:
            yield batch

    def parts(self) -> Iterator[Any]:
        """The batches that all processes have."""
        distribution = keras.distribution.distribution()
        batches = iter(self.data_adapter.get_jax_iterator())
        for step in itertools.count():
            with self._drawing():
                batch = next(batches, None)
            if not self._is_compared:
                self._is_compared = True
                mine = self.data_adapter.num_batches, 0 if batch is None else checksum(batch)
                facts = gather_objects(mine, "compares its first batch")
                lengths, first_batches = zip(*facts)
                check_alike(lengths, first_batches)
            mine = (0, 0) if batch is None else (num_rows(batch), fingerprint(batch))
            told = tell(_NEXT_BATCH, zlib.crc32(repr(mine).encode()) >> 1)
            if len(set(told)) > 1:
                check_batches(gather_objects(mine, "compares a batch"), step)
            if not mine[0]:
                return
            yield _on_their_devices(batch, distribution)


def _takes_whole(model: Any, *data: Any) -> bool:
    """Whether all processes are given the same data, of which each works on a part of every batch."""
    if model is None or not is_prepared(model) or not sharing_of(model).auto_shard:
        return False
    return not vars(model).get(_SPLITS_OWN_PART, False) and not is_own_part(*data)


def _maybe_symbolic_build(model: Any, real: Callable[..., None], iterator: Any = None, data_batch: Any = None) -> None:
    """Builds from a batch of all processes, as this one may have none."""
    if isinstance(iterator, _EpochIterator) and _takes_uneven(keras.distribution.distribution()):
        if not any(model._get_unbuilt_components()):
            return
        data_batch = next(iterator.parts() if iterator._is_whole else iterator.batches(), None)
    real(iterator=iterator, data_batch=data_batch)


# -- gradients of each replica -------------------------------------------------------------------------------------


def _train_step(model: Any, real: Callable[..., Any], state: Any, data: Any) -> Any:
    """The trainer's step, unless the optimizer needs each replica's own gradients."""
    reducers = reducers_in(model, model._keras_shardopt_reducers_of)
    distribution = keras.distribution.distribution()
    refuse_groups(reducers)  # perhaps of another `compile`
    stacks = any(reducer.accumulation is not None and reducer.accumulation.is_stacked for reducer in reducers)
    needs_local = any(reducer.state_finder.needs_local_gradients for reducer in reducers)
    if batch_size_of(distribution) == 1 or not (stacks or needs_local):
        return real(state, data)
    if not has_built_in_step(model):
        raise ValueError(
            "A custom `train_step` cannot be taken apart to show the optimizer each replica's gradients. "
            f"Received: {type(model).__name__}.train_step with {reducers[0]!r}. Use the built-in `train_step`, or call "
            "`optimizer.stateless_apply` inside a `jax.shard_map`."
        )
    if reducers[0].accumulation is not None and not stacks:
        raise ValueError(
            "`gradient_accumulation_steps` together with `replica_clipnorm` or `replica_transform` needs a "
            "`CrossShard` that is outermost and there when `prepare` is called. "
            f"Received: optimizer={model.optimizer!r}. "
            "Leave out what is around it, or call `prepare(model)` after `compile`."
        )
    weights, others, optimizer_state, metrics = state
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    share_losses(model)
    data = (x, y, sample_weight)
    grads, loss, y_pred, new_others = _per_replica(model, reducers[0], distribution, state, data, stacks)
    if stacks:
        all_rows = num_rows(data)
        size = batch_size_of(distribution)
        rows = _rows_of(jax.numpy.arange(size), all_rows, size)
        with batch_shared(BatchShare(rows, all_rows, GlobalView(size, "under a `keras.distribution`"))):
            new_weights, optimizer_state = model.optimizer.stateless_apply(optimizer_state, grads, weights)
    else:
        grads, found_inf, notes = grads
        reduced = Step(grads, model.trainable_variables, found_inf=found_inf, notes=notes)
        with claim_reduction(reducers), reducers[0].pipeline.resuming(reduced):
            new_weights, optimizer_state = model.optimizer.stateless_apply(optimizer_state, grads, weights)
    # Here all rows are one batch again, so every metric is exact, whether or not it is a sum over rows.
    _, (_, _, metrics) = model.stateless_compute_loss(
        weights, others, metrics, x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True
    )
    logs, metrics = model._update_metrics_variables(metrics, loss, x, y, y_pred, sample_weight)
    return logs, (new_weights, new_others, optimizer_state, metrics)


def _rows_of(replica: Any, all_rows: int, num_replicas: int) -> Any:
    """How many rows of a batch a replica has, or each of several, where all but the last ones have as many."""
    rows = -(-all_rows // num_replicas)
    return rows if rows * num_replicas == all_rows else jax.numpy.clip(all_rows - replica * rows, 0, rows)


def _per_replica(model: Any, reducer: Any, distribution: Any, state: Any, data: Any, stacks: bool) -> tuple[Any, ...]:
    """Forward and backward pass of each replica on its rows.

    Returns:
        The reduced gradients (if `stacks`, those of all replicas along a first dimension), the loss of the whole batch,
        the predictions of all rows, and the variables that are not trained: moving statistics are the mean of the
        replicas', as each normalises with its own rows.
    """
    axis = distribution.batch_dim_name
    num_replicas = batch_size_of(distribution)
    all_rows = num_rows(data)
    rows = -(-all_rows // num_replicas)
    num_missing = rows * num_replicas - all_rows
    if num_missing:
        _refuse_penalties_on_activities(model, all_rows, num_replicas)
    variables = model.trainable_variables
    is_seed = [v.name == "seed_generator_state" for v in model.non_trainable_variables]

    # What differs between replicas stays where it is: `scale_loss`, for which the state is here, does not look at it.
    apart = {id(v) for v in reducer.accumulation.kept} if stacks else set()
    # What is divided by a layout would come together here, on every device.
    is_apart = [id(v) in apart or (reducer.shard_state and len(v.shape) > 0) for v in model.optimizer.variables]
    weights, others, optimizer_state, metrics = state
    optimizer_state = [None if skip else value for value, skip in zip(optimizer_state, is_apart)]

    def local(weights: Any, others: Any, optimizer_state: Any, metrics: Any, data: Any) -> Any:
        optimizer_state = [
            jax.numpy.zeros(v.shape, v.dtype) if value is None else value
            for value, v in zip(optimizer_state, model.optimizer.variables)
        ]
        index = jax.lax.axis_index(axis)
        mine = _rows_of(index, all_rows, num_replicas)
        # Another seed on each replica, or their dropout masks would be the same.
        other = jax.numpy.array([1, 0], "uint32") * index.astype("uint32") * np.uint32(0x9E3779B1)
        inputs = [v + other if seed else v for v, seed in zip(others, is_seed)]
        part = BatchShare(mine, all_rows, MappedAxis(axis), ends_early=bool(num_missing))
        step = jax.value_and_grad(model.compute_loss_and_updates, has_aux=True)
        with batch_shared(part):
            (_, (loss, y_pred, changed, _)), grads = step(
                weights, inputs, metrics, *data, training=True, optimizer_variables=optimizer_state
            )
            with keras.StatelessScope(state_mapping=list(zip(model.optimizer.variables, optimizer_state))):
                mine_of_step = Step(grads, variables, row_share=row_share())
                if stacks:
                    grads = [grad[None] for grad in reducer.accumulation.own(mine_of_step).grads]
                else:
                    # Not the reducer's own scale: what scales the loss may also be around it.
                    mine_of_step = mine_of_step.replace(loss_scale=model.optimizer.scale_loss(1.0))
                    with assigning_nothing(OWN_GRADIENTS):
                        reduced = reducer.pipeline.reduce(mine_of_step)
                    grads = (reduced.grads, reduced.found_inf, dict(reduced.notes))

        def joined(before: Tensor, after: Tensor, seed: bool) -> Tensor:
            if seed:
                return after - other
            if not jax.numpy.issubdtype(after.dtype, jax.numpy.floating):
                return after
            # The mean of changes, so that what no replica changes keeps every bit; none where there were no rows.
            change = jax.numpy.where(mine > 0, after - before, 0) * (mine / all_rows)
            return before + jax.lax.psum(change, axis).astype(before.dtype)

        changed = [joined(*each) for each in zip(others, changed, is_seed)]
        return grads, jax.lax.pmean(loss, axis), y_pred, changed

    whole, divided = PartitionSpec(), PartitionSpec(axis)
    run = jax.shard_map(
        local,
        mesh=distribution.device_mesh.backend_mesh,
        in_specs=(whole, whole, whole, whole, divided),
        out_specs=(divided if stacks else whole, whole, divided, whole),
        check_vma=False,
    )
    grads, loss, y_pred, changed = run(weights, others, optimizer_state, metrics, _padded(data, num_missing))
    return grads, loss, jax.tree.map(lambda leaf: leaf[:all_rows], y_pred), changed


def _refuse_penalties_on_activities(model: Any, num_rows: int, num_replicas: int) -> None:
    for layer in layers_of(model):
        if getattr(layer, "activity_regularizer", None) is not None:
            raise ValueError(
                "`activity_regularizer` counts all rows that a layer sees, also those that fill up a batch which does "
                "not divide by the number of replicas, where the optimizer needs each replica's gradients. Received: "
                f"layer {layer.name!r}, with {num_rows} rows on {num_replicas} replicas. Use batches that divide, "
                "or leave out `replica_clipnorm` and `replica_transform`."
            )


def _padded(data: Any, num_missing: int) -> Any:
    """The batch with its first row repeated at the end. A row of zeros may be outside of what the model can take."""
    if not num_missing:
        return data
    return jax.tree.map(
        lambda leaf: jax.numpy.concatenate([leaf, jax.numpy.repeat(leaf[:1], num_missing, axis=0)]), data
    )
