"""The TensorFlow step of `VirtualReplicas`: a batch has a fixed number of parts, which replicas compute in turn.

TensorFlow's graph optimizer (Grappler) rewrites an operation depending on the operations around it, so rounding would
depend on the number of replicas. Therefore each part is a separate function that is not inlined, and Grappler's
arithmetic rewriting is off while the step is traced and run. Changes of metrics and moving statistics are summed in the
same binary tree as gradients.

Private names of Keras touched here (a test checks that each exists):
    `Trainer._compute_loss`, `Trainer._loss_tracker` - the loss and its metric in Keras' steps.
    `Model._symbolic_build` - builds a model, its metrics and its optimizer from the shapes of a batch.
Private names of TensorFlow: `tensorflow.python.eager.context.context` with `_optimizer_experimental_options` and
    `function_call_options` - the options that functions are optimized with.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.eager import context as tf_context

from keras_shardopt.backends.active import runtime
from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.backends.gradient_scope import claim_reduction
from keras_shardopt.backends.models import has_built_in_step
from keras_shardopt.backends.patches import install
from keras_shardopt.backends.scopes import ScopeInScope
from keras_shardopt.backends.tensorflow.losses import undivided
from keras_shardopt.backends.tensorflow.processes import num_workers
from keras_shardopt.backends.tensorflow.random_numbers import as_part
from keras_shardopt.backends.user_warnings import warn
from keras_shardopt.extensions.equal_bits.num_parts import num_parts_of
from keras_shardopt.extensions.equal_bits.stage import (
    CountingReplica,
    Subtrees,
    SumOfParts,
    Tree,
    VirtualReplica,
    first_found,
    parts_of_each,
)
from keras_shardopt.extensions.equal_bits.tensorflow.batches import (
    Rows,
    divide_batch,
    divide_dataset,
    is_divided,
    rows_of,
    start_of_part,
)
from keras_shardopt.fit.calls import cross_shards_in_step
from keras_shardopt.fit.tensorflow.batches import rows_from
from keras_shardopt.fit.tensorflow.step import TrainStep
from keras_shardopt.numerics import Tensor, Variable
from keras_shardopt.update.losses import mean_losses, share_losses
from keras_shardopt.update.parts import NotCountedError, PartOfBatch
from keras_shardopt.update.step import Step
from keras_shardopt.update.trainer_context import BatchShare, batch_shared, row_share
from keras_shardopt.wrapping.rollback import assign_saved, changed_by_forward_passes


class PartsStep(TrainStep):
    """A step of training or evaluation in which each replica computes its parts of the batch one after another."""

    divides_batches = True

    @property
    def num_parts(self) -> int:
        """The number of parts of a batch.

        Raises:
            ValueError: if `VirtualReplicas` does not support the model or the strategy.
        """
        model = self.model
        num_parts = num_parts_of(model)
        strategy = model.distribute_strategy
        is_several = strategy.num_replicas_in_sync > 1
        if num_workers(strategy) > 1 or (is_several and not isinstance(strategy, tf.distribute.MirroredStrategy)):
            raise ValueError(
                "On TensorFlow, `VirtualReplicas` needs a `MirroredStrategy`, with the devices of one machine. "
                f"Received: {type(strategy).__name__}, VirtualReplicas({num_parts}). Remove `VirtualReplicas`."
            )
        if not has_built_in_step(model):
            raise ValueError(
                "On TensorFlow, `VirtualReplicas` does not support a custom `train_step`. "
                f"Received: {type(model).__name__}.train_step, VirtualReplicas({num_parts}). Use the built-in "
                "`train_step`, perhaps with a custom `compute_loss`, or remove `VirtualReplicas`."
            )
        if model.run_eagerly:
            raise ValueError(
                "`VirtualReplicas` needs steps that TensorFlow compiles to graphs, because eager operations round "
                f"differently. Received: run_eagerly=True, VirtualReplicas({num_parts}). Remove one of the two."
            )
        parts_of_each(num_parts, strategy.num_replicas_in_sync)
        install("randomness")
        return num_parts

    def begin_call(self) -> None:
        """Raise ValueError if the model or the strategy does not support `VirtualReplicas`."""
        self.num_parts_of(self.model.distribute_strategy.num_replicas_in_sync)

    def num_parts_of(self, num_replicas: int) -> int:
        """Return the number of parts of a batch. It does not depend on `num_replicas`."""
        return self.num_parts

    def distribute(self, strategy: tf.distribute.Strategy, dataset: tf.data.Dataset) -> Any:
        """Divide a dataset among replicas. Each gets the rows of its parts of every batch."""
        return divide_dataset(strategy, dataset, self.num_parts)

    def check_dataset(self, dataset: Any) -> None:
        """Raise ValueError, because a strategy has already divided the batches of this dataset."""
        raise ValueError(
            "`VirtualReplicas` divides whole batches into parts. Received: a dataset that a strategy has already "
            f"divided, VirtualReplicas({self.num_parts}). Pass the original dataset to `fit`."
        )

    def function(self, make: Callable[[], Callable[[Any], Any]]) -> Callable[[Any], Any]:
        """Let `make` build Keras' function without XLA. Return a function that divides batches and calls it."""
        num_parts = self.num_parts
        with _without_xla(self.model):
            function = make()
        return functools.partial(_on_parts, self.model.distribute_strategy, num_parts, function)

    def train(self, real: Callable[[Any], Any], data: Any) -> Any:
        """Run a training step on each of this replica's parts of the batch. Return the logs of the whole batch."""
        return in_parts(self.model, rows_of(data), self.num_parts, trains=True)

    def test(self, real: Callable[[Any], Any], data: Any) -> Any:
        """Run a test step on each of this replica's parts of a batch. Run a custom `test_step` on all rows at once."""
        if self.model.__class__.test_step is keras.Model.test_step:
            return in_parts(self.model, rows_of(data), self.num_parts, trains=False)
        return super().test(real, rows_of(data).of_replica(self.num_parts))


def _on_parts(strategy: tf.distribute.Strategy, num_parts: int, function: Callable[[Any], Any], iterator: Any) -> Any:
    """Call `function(iterator)` with batches divided into parts, and without Grappler's arithmetic rewriting."""
    if not isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
        iterator = (batch if is_divided(batch) else divide_batch(strategy, batch, num_parts) for batch in iterator)
    with without_rewriting():
        return function(iterator)


def in_parts(model: Any, data: Rows, num_parts: int, trains: bool) -> Any:
    """Run a step on each of this replica's parts of a batch. Return the logs of the whole batch."""
    share_losses(model)
    replicas = runtime.communicator("")
    tree, work = Tree(replicas, num_parts), _Work(model, data, num_parts, trains)
    places = work.places(replicas)
    try:
        sums, found = _sum_of_parts(work.function_of_part(()), places)
    except NotCountedError:
        counts, _ = _sum_of_parts(work.function_that_counts(), places)
        sums, found = _sum_of_parts(work.function_of_part(tree.all_reduce(counts, "sum")), places)
    grads, changes = sums[: work.num_gradients], sums[work.num_gradients :]
    logs = work.settle(tree, changes, found[-1]["same"])
    if trains and not work.variables:
        warn("The model does not have any trainable weights.")  # the step of Keras warns too
    elif trains:
        positions = [part["found_inf"] for part in found if part["found_inf"] is not None]
        found_inf = functools.reduce(first_found, positions) if positions else None
        scale = model.optimizer.scale_loss(1.0)
        step = Step(grads, work.variables, loss_scale=scale, found_inf=found_inf)
        reduced = work.stage.reduced(step, replicas)
        with claim_reduction(work.cross_shards), work.cross_shards[0].pipeline.resuming(reduced):
            model.optimizer.apply_gradients(zip(reduced.grads, work.variables))
    return logs


def _sum_of_parts(function: Callable[..., Any], places: Sequence[Any]) -> tuple[list[Any], list[dict[str, Any]]]:
    """Call `function(*place)` for each part. Return the sums of the "sums" in the returned dicts, and the dicts."""
    subtrees, found = Subtrees(), []
    for place in places:
        found.append(function(*place))
        subtrees.add(found[-1]["sums"])
    return subtrees.take(), found


class _Work:
    """Computes a replica's parts of a batch, and combines the values that the parts compute for variables.

    A metric variable with `aggregation="sum"` starts from zero in each part; the sum over parts is added to its value.
    A moving statistic changes by its mean change in all parts with rows. Other variables keep the last part's value.
    """

    def __init__(self, model: Any, data: Rows, num_parts: int, trains: bool) -> None:
        self._model, self._data, self._num_parts, self._trains = model, data, num_parts, trains
        self.cross_shards = cross_shards_in_step(model)
        stages = self.cross_shards[0].pipeline.stages
        self.stage: Any = next(stage for stage in stages if isinstance(stage, SumOfParts))
        self.variables: list[Variable] = list(model.trainable_variables)
        self.num_gradients = len(self.variables) if trains else 0
        self._metrics = list(model.metrics_variables)
        self._sums = [v for v in self._metrics if v.aggregation == "sum"]
        state = changed_by_forward_passes([model]) if trains else []
        others = {id(v): v for v in [*model.non_trainable_variables, *state, *self._metrics]}
        for variable in self._sums:
            others.pop(id(variable), None)
        self._moving = [v for v in others.values() if keras.backend.is_float_dtype(v.dtype)]
        self._same = [v for v in others.values() if not keras.backend.is_float_dtype(v.dtype)]
        self._returned: list[str] = []

    def places(self, replicas: Communicator) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return (index, first row in `data.batch`, number of rows) for each of this replica's parts of the batch."""
        each = parts_of_each(self._num_parts, replicas.num_replicas)
        parts = [tf.convert_to_tensor(replicas.replica_id * each + i) for i in range(each + 1)]
        starts = [start_of_part(self._data.all_rows, self._num_parts, part) for part in parts]
        return [(part, start - starts[0], stop - start) for part, start, stop in zip(parts, starts, starts[1:])]

    def function_of_part(self, counted: Sequence[Tensor]) -> Callable[..., Any]:
        """Return a function from a part of a batch to gradients and variable changes. Losses divide by `counted`."""

        def of_part(index: Tensor, start: Tensor, rows: Tensor) -> dict[str, Any]:
            part = VirtualReplica(index, self._num_parts, is_first=True, is_last=True, counted=counted)
            with self._working_on(part, start, rows) as (scope, before, batch):
                grads, found_inf, loss, y_pred = self._gradients(part, before, batch)
                self._model._loss_tracker.update_state(undivided(loss), sample_weight=rows)  # as in the step of Keras
                x, y, sample_weight = batch
                logs = self._model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
                self._returned = list(logs)
            self._keep_assigned(scope)
            changes = self._changes(scope, before)
            *sums, found_inf = _unless_empty(rows, [*grads, *changes, found_inf])
            # In metrics of mean losses, all parts of the batch count equally, so also add those of a part without rows.
            always = {id(tracker.count) for tracker in mean_losses(self._model)}
            for i, variable in enumerate([*self._sums, *self._moving]):
                if id(variable) in always:
                    sums[len(grads) + i] = changes[i]
            same = [tf.identity(scope.get_current_value(v)) for v in self._same]
            return {"sums": sums, "same": same, "found_inf": found_inf}

        return _function(of_part)

    def function_that_counts(self) -> Callable[..., Any]:
        """Return a function that computes the divisors of losses, such as a sum of a mask, for one part of a batch."""

        def of_part(index: Tensor, start: Tensor, rows: Tensor) -> dict[str, Any]:
            part = CountingReplica(index, self._num_parts, is_first=True, is_last=True)
            with self._working_on(part, start, rows) as (_, _, batch):
                self._loss(batch)
            return {"sums": _unless_empty(rows, part.counts)}

        return _function(of_part)

    @contextlib.contextmanager
    def _working_on(self, part: PartOfBatch, start: Tensor, rows: Tensor) -> Iterator[tuple[ScopeInScope, Any, Any]]:
        """In the block, run one part of a batch: set variables, random numbers, and the divisors of losses.

        Yields:
            The scope that records assignments; the values at the start, by `id` of the variable; the rows of the part.
            A part without rows gets one row, because a model needs one to run.
        """
        here = tf.maximum(rows, 1)
        start = tf.where(rows > 0, start, 0)
        batch = keras.utils.unpack_x_y_sample_weight(rows_from(self._data.batch, start, start + here))
        before = {id(v): _value(v) for v in [*self.variables, *self._moving, *self._same]}
        before.update({id(v): tf.zeros(v.shape, v.dtype) for v in self._sums})
        mapping = [(v, before[id(v)]) for v in [*self.variables, *self._moving, *self._same, *self._sums]]
        share = BatchShare(rows, self._data.all_rows, part, rows_here=here)
        with batch_shared(share), as_part(part.replica_id), ScopeInScope(mapping) as scope:
            yield scope, before, batch

    def _loss(self, batch: Any) -> tuple[Any, Tensor]:
        x, y, sample_weight = batch
        y_pred = self._model(x, training=self._trains)
        loss = self._model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=self._trains)
        return y_pred, loss

    def _gradients(self, part: PartOfBatch, before: Any, batch: Any) -> tuple[list[Any], Any, Tensor, Any]:
        """Return gradients of one part of the batch, `found_inf` (whether one is not finite), loss and predictions."""
        if not self._trains:
            y_pred, loss = self._loss(batch)
            return [], None, loss, y_pred
        weights = [before[id(v)] for v in self.variables]
        with tf.GradientTape() as tape:
            tape.watch(weights)
            y_pred, loss = self._loss(batch)
            scaled = self._model.optimizer.scale_loss(loss)
        scale = self._model.optimizer.scale_loss(1.0)
        step = Step(tape.gradient(scaled, weights), self.variables, row_share=row_share(), loss_scale=scale)
        # `row_share=1` keeps the gradients of parts without rows. `_unless_empty` later replaces them with zeros.
        grads, found_inf = self.stage.weighted(self.stage.after_local(step, part).replace(row_share=1.0))
        return grads, found_inf, loss, y_pred

    def _changes(self, scope: ScopeInScope, before: Any) -> list[Tensor]:
        def change(variable: Variable) -> Tensor:
            return tf.cast(scope.get_current_value(variable), variable.dtype) - before[id(variable)]

        return [change(variable) for variable in [*self._sums, *self._moving]]

    def _keep_assigned(self, scope: ScopeInScope) -> None:
        """Of the variables to combine over parts, keep those assigned. Raise ValueError if another was assigned."""
        known = {id(v) for v in [*self._sums, *self._moving, *self._same]}
        others = [v.path for v in scope.assigned if id(v) not in known]
        assigned = {id(v) for v in scope.assigned}
        self._moving, self._same = ([v for v in each if id(v) in assigned] for each in (self._moving, self._same))
        if others:
            raise ValueError(
                "With `VirtualReplicas`, a step may change only metrics and non-trainable variables of layers. "
                f"Received: a change of {', '.join(others)}. Make each of these variables a weight of a layer, with "
                "`trainable=False`. For random numbers without a seed, give the layer a `keras.random.SeedGenerator`. "
                "Or remove `VirtualReplicas`."
            )

    def settle(self, tree: Tree, changes: Sequence[Tensor], same: Sequence[Tensor]) -> Any:
        """Set metrics and layers' variables to their values after the batch, from its parts. Return the logs.

        Args:
            tree: sums tensors over replicas.
            changes: the changes of variables, summed over this replica's parts of the batch.
            same: the values of variables that are not floats, such as seeds, after the last of these parts.
        """
        size = len(self._sums)
        sums = tree.all_reduce([*map(_value, self._sums), *changes], "sum")
        before, added, moved = sums[:size], sums[size : 2 * size], sums[2 * size :]
        counted = [old + new for old, new in zip(before, added)]
        # Outside of steps, a metric is the sum of its copies on all replicas, so only the first copy gets the total.
        is_first = tf.equal(tree.replica_id, 0)
        for variable, total in zip(self._sums, counted):
            variable.assign(tf.where(is_first, total, tf.zeros_like(total)))
        num_counting = tf.minimum(self._data.all_rows, self._num_parts)
        after = [_value(v) + total / tf.cast(num_counting, v.dtype) for v, total in zip(self._moving, moved)]
        for variable, value in [*zip(self._moving, after), *zip(self._same, same)]:
            assign_saved(variable, value)
        values = {id(v): value for v, value in [*zip(self._sums, counted), *zip(self._moving, after)]}
        with keras.StatelessScope([(v, values[id(v)]) for v in self._metrics if id(v) in values]):
            logs = self._model.get_metrics_result()
        if not logs.keys() >= set(self._returned):
            raise ValueError(
                "With `VirtualReplicas`, `compute_metrics` must return only results of metrics, because other values "
                f"cannot be combined. Received: {sorted(set(self._returned) - logs.keys())}. Make each of these a "
                "`keras.metrics.Metric` of the model, or remove `VirtualReplicas`."
            )
        return {name: logs[name] for name in self._returned}


def _function(of_part: Callable[..., Any]) -> Callable[..., Any]:
    """Trace `of_part(index, start, rows)` as a separate graph, so surrounding operations cannot change its rounding."""
    function = tf.function(of_part, autograph=False, experimental_attributes={"_noinline": True})
    concrete: Callable[..., Any] = function.get_concrete_function(*[tf.TensorSpec((), tf.int32)] * 3)
    return concrete


def _unless_empty(rows: Tensor, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return tensors computed from one part of the batch, or zeros in their place if the part has no rows."""
    given = [tensor for tensor in tensors if tensor is not None]
    if not given:
        return list(tensors)
    left = iter(tf.cond(rows > 0, lambda: given, lambda: [tf.zeros_like(tensor) for tensor in given]))
    return [None if tensor is None else next(left) for tensor in tensors]


def _value(variable: Variable) -> Tensor:
    return tf.convert_to_tensor(variable.value)


@contextlib.contextmanager
def _without_xla(model: Any) -> Iterator[None]:
    """Build steps of the model without XLA, because XLA rounds the same operation differently in each program."""
    before = model.jit_compile
    if before:
        warn(
            "With `VirtualReplicas` TensorFlow's steps are not compiled with XLA, because XLA rounds differently "
            f"in each program. Received: jit_compile=True, for the model `{model.name}`. Use "
            "`model.compile(..., jit_compile=False)`.",
        )
        model.jit_compile = False
    try:
        yield
    finally:
        model.jit_compile = before


class _CallOptions:
    """A cache of TensorFlow's options for function calls: the usual options, and those without graph rewriting."""

    default: Any = None
    modified: Any = None


_options = _CallOptions()


@contextlib.contextmanager
def without_rewriting() -> Iterator[None]:
    """Turn off Grappler's arithmetic rewriting for the functions called in this block."""
    context = tf_context.context()
    options, calls = context._optimizer_experimental_options, context.function_call_options
    if calls is not _options.default:
        _options.default, _options.modified = calls, None
    context._optimizer_experimental_options = {**options, "arithmetic_optimization": False}
    context.function_call_options = _options.modified  # if None, TensorFlow's getter computes the options
    try:
        _options.modified = context.function_call_options
        yield
    finally:
        context._optimizer_experimental_options = options
        context.function_call_options = calls
