"""The TensorFlow step of `VirtualReplicas`: a batch has a fixed number of parts, which replicas compute in turn.

TensorFlow's graph optimizer (Grappler) rewrites an operation depending on the operations around it, so rounding would
depend on the number of replicas. Therefore each part is a separate function that is not inlined, and Grappler's
arithmetic rewriting is off while the step is traced and run.

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
from keras_shardopt.extensions.equal_bits.parts import (
    CountingReplica,
    PartVariables,
    VirtualReplica,
    parts_of_each,
    with_divisors,
)
from keras_shardopt.extensions.equal_bits.stage import SumOfParts, first_found
from keras_shardopt.extensions.equal_bits.tensorflow.batches import (
    Rows,
    divide_batch,
    divide_dataset,
    is_divided,
    rows_of,
    start_of_part,
)
from keras_shardopt.extensions.equal_bits.tree import Tree, summed
from keras_shardopt.fit.calls import cross_shards_in_step
from keras_shardopt.fit.tensorflow.batches import rows_from
from keras_shardopt.fit.tensorflow.step import TrainStep
from keras_shardopt.numerics import Tensor, Variable
from keras_shardopt.update.losses import mean_losses, share_losses
from keras_shardopt.update.parts import PartOfBatch
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

    def sums(of_part: Callable[..., Any]) -> tuple[list[Any], list[dict[str, Any]]]:
        function = _function(of_part)
        found = [function(*place) for place in places]
        return summed(part["sums"] for part in found), found

    (totals, found), _ = with_divisors(
        lambda divisors: sums(functools.partial(work.results, divisors)), lambda: tree.total(sums(work.counts)[0])
    )
    grads, changes = totals[: work.num_gradients], totals[work.num_gradients :]
    logs = work.settle(tree, changes, found[-1]["last"])
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


class _Work:
    """Computes a replica's parts of a batch, and sets variables to their values after the batch."""

    def __init__(self, model: Any, data: Rows, num_parts: int, trains: bool) -> None:
        self._model, self._data, self._num_parts, self._trains = model, data, num_parts, trains
        self.cross_shards = cross_shards_in_step(model)
        (self.stage,) = SumOfParts.found_in(self.cross_shards)
        self.variables: list[Variable] = list(model.trainable_variables)
        self.num_gradients = len(self.variables) if trains else 0
        metrics = {id(v) for v in model.metrics_variables}
        state = [*model.non_trainable_variables, *(changed_by_forward_passes([model]) if trains else [])]
        state = list({id(v): v for v in state if id(v) not in metrics}.values())
        # A part without rows adds its count to the mean losses, but not their total: the loss of a padding row.
        of_losses = [tracker.count for tracker in mean_losses(model)]
        self._state = PartVariables(state, model.metrics_variables, of_losses)
        self._returned: list[str] = []

    def places(self, replicas: Communicator) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return (index, first row in `data.batch`, number of rows) for each of this replica's parts of the batch."""
        each = parts_of_each(self._num_parts, replicas.num_replicas)
        parts = [tf.convert_to_tensor(replicas.replica_id * each + i) for i in range(each + 1)]
        starts = [start_of_part(self._data.all_rows, self._num_parts, part) for part in parts]
        return [(part, start - starts[0], stop - start) for part, start, stop in zip(parts, starts, starts[1:])]

    def results(self, divisors: Sequence[Tensor], index: Tensor, start: Tensor, rows: Tensor) -> dict[str, Any]:
        """Return gradients and variable changes of one part of a batch. Losses divide by `divisors`."""
        part = VirtualReplica(index, self._num_parts, divisors)
        with self._working_on(part, start, rows) as (scope, weights, starts, batch):
            grads, found_inf, loss, y_pred = self._gradients(part, weights, batch)
            self._model._loss_tracker.update_state(undivided(loss), sample_weight=rows)  # as in the step of Keras
            x, y, sample_weight = batch
            logs = self._model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
            self._returned = list(logs)
        changes, last = self._state.ends(starts, self._assigned(scope), rows)
        *grads, found_inf = _unless_empty(rows, [*grads, found_inf])
        return {"sums": [*grads, *changes], "last": last, "found_inf": found_inf}

    def counts(self, index: Tensor, start: Tensor, rows: Tensor) -> dict[str, Any]:
        """Return the divisors of the losses of one part of a batch, such as the sum of a mask."""
        part = CountingReplica(index, self._num_parts)
        with self._working_on(part, start, rows) as (*_, batch):
            self._loss(batch)
        return {"sums": _unless_empty(rows, part.counts)}

    @contextlib.contextmanager
    def _working_on(self, part: PartOfBatch, start: Tensor, rows: Tensor) -> Iterator[tuple[Any, ...]]:
        """In the block, run one part of a batch: set variables, random numbers, and the divisors of losses.

        Yields:
            The scope that records assignments; the values at the start of weights, and of other variables; the rows of
            the part. A part without rows gets one row, because a model needs one to run.
        """
        here = tf.maximum(rows, 1)
        start = tf.where(rows > 0, start, 0)
        batch = keras.utils.unpack_x_y_sample_weight(rows_from(self._data.batch, start, start + here))
        weights = [_value(v) for v in self.variables]
        starts = self._state.starts([_value(v) for v in self._state.variables])
        mapping = [*zip(self.variables, weights), *zip(self._state.variables, starts)]
        share = BatchShare(rows, self._data.all_rows, part, rows_here=here)
        with batch_shared(share), as_part(part.replica_id), ScopeInScope(mapping) as scope:
            yield scope, weights, starts, batch

    def _loss(self, batch: Any) -> tuple[Any, Tensor]:
        x, y, sample_weight = batch
        y_pred = self._model(x, training=self._trains)
        loss = self._model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=self._trains)
        return y_pred, loss

    def _gradients(self, part: PartOfBatch, weights: Any, batch: Any) -> tuple[list[Any], Any, Tensor, Any]:
        """Return gradients of one part of the batch, `found_inf` (whether one is not finite), loss and predictions."""
        if not self._trains:
            y_pred, loss = self._loss(batch)
            return [], None, loss, y_pred
        with tf.GradientTape() as tape:
            tape.watch(weights)
            y_pred, loss = self._loss(batch)
            scaled = self._model.optimizer.scale_loss(loss)
        scale = self._model.optimizer.scale_loss(1.0)
        step = Step(tape.gradient(scaled, weights), self.variables, row_share=row_share(), loss_scale=scale)
        # `_unless_empty` replaces the gradients of parts without rows with zeros, which is faster.
        grads, found_inf = self.stage.of_part(step, part, keeps_empty=True)
        return grads, found_inf, loss, y_pred

    def _assigned(self, scope: ScopeInScope) -> list[Tensor | None]:
        """Return the values after a part; None for unassigned variables. Raise ValueError if others were assigned."""
        assigned = {id(v) for v in scope.assigned}
        known = {id(v) for v in self._state.variables}
        others = [v.path for v in scope.assigned if id(v) not in known]
        if others:
            raise ValueError(
                "With `VirtualReplicas`, a step may change only metrics and non-trainable variables of layers. "
                f"Received: a change of {', '.join(others)}. Make each of these variables a weight of a layer, with "
                "`trainable=False`. For random numbers without a seed, give the layer a `keras.random.SeedGenerator`. "
                "Or remove `VirtualReplicas`."
            )
        return [
            tf.cast(scope.get_current_value(v), v.dtype) if id(v) in assigned else None for v in self._state.variables
        ]

    def settle(self, tree: Tree, changes: Sequence[Tensor | None], last: Sequence[Tensor | None]) -> Any:
        """Set metrics and layers' variables to their values after the batch. Return the logs.

        `changes` are summed over this replica's parts of the batch. `last` has the other values after the last part.
        """
        variables, is_sum = self._state.variables, self._state.is_sum
        before = [_value(v) for v in variables]
        # Outside of steps, a metric is the sum of its copies on all replicas, so only the first copy gets the total.
        is_first = tf.equal(tree.replica_id, 0)
        copies = [value if adds else None for value, adds in zip(before, is_sum)]
        both = tree.total([*copies, *changes])
        whole, totals = both[: len(variables)], both[len(variables) :]
        before = [old if total is None else total for old, total in zip(before, whole)]
        after = self._state.settled(before, totals, last, tf.minimum(self._data.all_rows, self._num_parts))
        for variable, value, adds in zip(variables, after, is_sum):
            if value is not None and adds:
                variable.assign(tf.where(is_first, value, tf.zeros_like(value)))
            elif value is not None:
                assign_saved(variable, value)
        with keras.StatelessScope([(v, old if new is None else new) for v, old, new in zip(variables, before, after)]):
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

    def zeros() -> list[Tensor | None]:
        return [None if tensor is None else tf.zeros_like(tensor) for tensor in tensors]

    return list(tf.cond(rows > 0, lambda: list(tensors), zeros))


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


@contextlib.contextmanager
def without_rewriting() -> Iterator[None]:
    """Turn off Grappler's arithmetic rewriting for the functions called in this block."""
    context = tf_context.context()
    options, calls = context._optimizer_experimental_options, context.function_call_options
    if calls is not _CallOptions.default:
        _CallOptions.default, _CallOptions.modified = calls, None
    context._optimizer_experimental_options = {**options, "arithmetic_optimization": False}
    context.function_call_options = _CallOptions.modified  # if None, TensorFlow's getter computes the options
    try:
        _CallOptions.modified = context.function_call_options
        yield
    finally:
        context._optimizer_experimental_options = options
        context.function_call_options = calls
