"""The PyTorch step of `VirtualReplicas`: a batch has a fixed number of parts, and each rank computes some in turn.

Each part runs a Keras step on the variables' values before the batch. Their changes are summed in the same binary tree
as gradients. A metric adds the sum over all parts. A moving statistic adds its mean change in the parts with rows.
Seed generators advance once per batch. If losses divide by a count over all parts (of a mask, for example), a counting
pass first runs each part forward. If each rank has only one part, ranks exchange their counts in the loss instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import torch

from keras_shardopt.backends.active import runtime
from keras_shardopt.backends.models import has_built_in_step
from keras_shardopt.backends.torch.random_numbers import as_parts, global_seed_state
from keras_shardopt.backends.torch.threads import one_thread
from keras_shardopt.backends.user_warnings import warn
from keras_shardopt.data.whole_batches import part_of_batch, rows_of_parts
from keras_shardopt.extensions.equal_bits.num_parts import num_parts_of
from keras_shardopt.extensions.equal_bits.stage import (
    CountingReplica,
    Subtrees,
    Tree,
    VirtualReplica,
    current_part,
    parts_of_each,
    parts_of_replica,
)
from keras_shardopt.extensions.equal_bits.torch_batches import KeptState
from keras_shardopt.fit.calls import num_rows
from keras_shardopt.fit.torch.session import Session
from keras_shardopt.fit.torch.step import TrainStep
from keras_shardopt.update.losses import mean_losses, share_losses
from keras_shardopt.update.parts import NotCountedError, PartOfBatch
from keras_shardopt.update.trainer_context import BatchShare, batch_shared
from keras_shardopt.wrapping.rollback import before_more, watching_layers


# Not compiled: a compiler can run a part of the batch with code for another shape, which rounds differently.
# It can also treat a value that differs between parts as a constant.
@torch.compiler.disable
def in_parts(
    session: Session, kept: KeptState, real: Callable[[Any], Any], data: Any, num_parts: int, trains: bool
) -> Any:
    """Run Keras's step (`real`) on each of this rank's parts of a batch. Return the logs of the whole batch."""
    model, ranks, replicas = session.model, session.ranks, runtime.communicator("")
    cross_shard, given = session.cross_shard, int(num_rows(data))
    mine, session.mine = (given if ranks is None else session.mine or 0), None
    all_rows = given if ranks is None else session.all_rows()
    own, tree = parts_of_replica(num_parts, replicas), Tree(replicas, num_parts)
    rows = rows_of_parts(mine, len(own))
    _warn_of_compiling(model, kept)
    updates = runtime.version(cross_shard.iterations)
    layers = kept.state(session.call is not None) if trains else []
    state, logs = _State(model, trains, layers, kept.changed_weights), _Logs()
    kept.on_loss = state.note_changed if trains and kept.changed_weights is None else None
    with as_parts() as begin, one_thread(), watching_layers(state.note_assigned):
        accumulation = cross_shard.accumulation
        batch = [int(cross_shard.iterations), 0 if accumulation is None else accumulation.window.num_taken]

        def step(i: int, here: PartOfBatch) -> Any:
            begin(own[i], batch)
            state.begin()
            # If a part of the batch has no rows, run the model on one row that does not count: a model needs input.
            part_data = _copied(part_of_batch(data, rows if mine else [1, given - 1], i if mine else 0))
            share = BatchShare(rows[i], all_rows, here, ends_early=not rows[i], rows_here=rows[i] or 1)
            with batch_shared(share), before_more(not here.is_last):
                return _count(real, part_data) if isinstance(here, CountingReplica) else real(part_data)

        can_repeat = not trains or has_built_in_step(model)
        for i, found in enumerate(_each_part(step, own, tree, kept, can_repeat)):
            logs.add(found, rows[i])
            state.end(rows[i] > 0)
    if trains:
        kept.changed_weights, kept.on_loss = state.changed_weights, None
    session.last_rows = mine
    session.confirm()
    session.shares_logs = False  # `logs` are already those of all ranks
    everyones = [given] if ranks is None else session.rows()
    counted = [count for rank in everyones for count in rows_of_parts(rank, len(own))]
    is_skipped = trains and _is_skipped(cross_shard, updates)
    state.settle(tree, sum(count > 0 for count in counted), is_skipped)
    return logs.settle(model, tree, sum(counted))


def _each_part(
    step: Callable[[int, PartOfBatch], Any], own: Sequence[int], tree: Tree, kept: KeptState, can_repeat: bool
) -> Iterator[Any]:
    """Yield the logs of `step` on each of this rank's parts of a batch.

    If losses are divided by sums over the whole batch, such as those of sample weights, first compute these sums. This
    repeats the first part, so raise NotCountedError if `can_repeat` is False.
    """

    def count() -> list[Any]:
        counts = Subtrees()
        for i, part in enumerate(own):
            here = CountingReplica(part, tree.num_parts, is_first=not i, is_last=part == own[-1])
            step(i, here)
            counts.add(here.counts)
        return tree.all_reduce(counts.take(), "sum")

    totals = count() if kept.counts_first else []
    kept.counts_first = bool(totals)
    others = tree if len(own) == 1 and can_repeat else None
    for i, part in enumerate(own):
        position: dict[str, Any] = {"is_first": not i, "is_last": part == own[-1], "others": others}
        try:
            found = step(i, VirtualReplica(part, tree.num_parts, **position, counted=totals))
        except NotCountedError:
            if i or totals or not can_repeat:
                raise
            totals, kept.counts_first = count(), True
            found = step(i, VirtualReplica(part, tree.num_parts, **position, counted=totals))
        yield found


def _warn_of_compiling(model: Any, kept: KeptState) -> None:
    if model.jit_compile and not kept.has_warned:
        kept.has_warned = True
        warn(
            "With `VirtualReplicas` PyTorch's steps are not compiled, because compiled operations round differently. "
            f"Received: jit_compile=True, for the model `{model.name}`. Use `model.compile(..., jit_compile=False)`.",
        )


class _Counted(Exception):
    pass


def _count(real: Callable[[Any], Any], data: Any) -> None:
    """Run a step without gradients up to its loss, because the loss records its divisor, such as a sum of weights."""
    with contextlib.suppress(_Counted), torch.no_grad():
        real(data)


class PartsStep(TrainStep):
    """A step of training or evaluation in which each rank computes its parts of the batch one after another."""

    logs_are_global = True
    runs_alone = True

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._number: int | None = None
        self._kept = KeptState(session.model)

    @property
    def num_parts(self) -> int:
        """The number of parts of each batch. It is checked once per call of `fit`, `evaluate` or `train_on_batch`."""
        if self._number is None:
            self._number = runtime.no_compile(num_parts_of, self._session.model)
        return self._number

    def begin_call(self) -> None:
        """Clear cached facts (parts per batch, variables of layers): the model can change between calls of `fit`."""
        super().begin_call()
        self._number = None
        self._kept.begin_call()

    def begin_fit(self) -> None:
        """Clear the list of weights that layers change in their call, because the model can change between fits."""
        self._kept.changed_weights = None

    def num_parts_of(self, num_ranks: int) -> int:
        """Return the number of parts of a batch. It does not depend on `num_ranks`."""
        return self.num_parts

    def rows_of(self, num: int, num_ranks: int) -> list[int]:
        """Return the row count of each rank, for a batch of `num` rows. Each rank gets whole parts of the batch."""
        each, rows = parts_of_each(self.num_parts, num_ranks), rows_of_parts(num, self.num_parts)
        return [sum(rows[start : start + each]) for start in range(0, self.num_parts, each)]

    @torch.compiler.disable(recursive=False)  # do not compile this method, only the functions that it calls
    def run(self, real: Callable[[Any], Any], data: Any, trains: bool) -> Any:
        """Run Keras's step (`real`) on each of this rank's parts of the batch; if this rank runs alone, on all rows."""
        session = self._session
        if session.ranks is not None and session.mine is None:
            return super().run(real, data, trains)
        share_losses(session.model)
        return in_parts(session, self._kept, real, data, self.num_parts, trains)

    def after_loss(self) -> None:
        """After a loss, call `KeptState.on_loss` once, if set. Stop a step that only computes divisors of losses."""
        if self._kept.on_loss is not None:
            self._kept.on_loss()
            self._kept.on_loss = None
        if isinstance(current_part(), CountingReplica):
            raise _Counted


def _is_skipped(cross_shard: Any, updates: int | None) -> bool:
    """Whether the update was skipped: `iterations` still has the version `updates` from before the batch."""
    is_complete = cross_shard.accumulation is None or bool(cross_shard.accumulation.window.is_complete)
    return is_complete and runtime.version(cross_shard.iterations) == updates


def _copied(data: Any) -> Any:
    """Copy the rows of a part of the batch, because kernels can sum in another order if memory is not aligned."""
    return keras.tree.map_structure(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, data)


class _State:
    """The variables that steps on parts of a batch change: metrics, moving statistics, seeds, and some weights.

    Args:
        model: the model.
        trains: whether the steps train the model, or only evaluate it.
        state: the variables, apart from weights, that layers change in training.
        weights: the weights, also frozen ones, that layers change in their call. None: unknown, so all are saved.
    """

    def __init__(self, model: Any, trains: bool, state: Sequence[Any], weights: Sequence[Any] | None) -> None:
        metrics = model.metrics_variables
        counted = {id(v) for v in metrics if v.aggregation == "sum"}
        self._sums = [v for v in metrics if id(v) in counted]
        if weights is None:
            known = {id(v) for v in state}
            weights = [v for v in model.weights if id(v) not in known]
        self._model, self._trains = model, trains
        self.changed_weights = list(weights) if trains else []
        self._weights = [v.value.clone() for v in self.changed_weights]
        # Keep variables, not their tensors, because a PyTorch module can replace the tensor of a buffer.
        others = [*state, *[v for v in metrics if id(v) not in counted], global_seed_state()]
        self._moving = [v for v in others if v.value.is_floating_point()]
        self._same = [v for v in others if not v.value.is_floating_point()]
        # Sum metrics of mean losses over all parts of the batch, even those without rows: all parts count equally.
        shared = {id(v) for tracker in mean_losses(model) for v in tracker.variables}
        self._always = [id(v) in shared for v in self._sums]
        self._start = [v.value.clone() for v in [*self._sums, *self._moving, *self._same]]
        self._changes = Subtrees()
        self._known = {id(v) for v in [*state, *metrics, *self.changed_weights]}

    @torch.no_grad()
    def begin(self) -> None:
        """Reset variables to their values before the batch, and sums of metrics to 0. Called before each part of it."""
        size = len(self._sums)
        for variable, start in zip(self.changed_weights, self._weights):
            variable.value.copy_(start)
        for variable in self._sums:
            variable.value.zero_()
        for variable, start in zip([*self._moving, *self._same], self._start[size:]):
            variable.value.copy_(start)

    @torch.no_grad()
    def note_changed(self) -> None:
        """Stop saving and restoring weights that the forward pass has not changed."""
        pairs = list(zip(self.changed_weights, self._weights))
        self._known -= {id(variable) for variable, _ in pairs}
        pairs = [(variable, start) for variable, start in pairs if not torch.equal(variable.value, start)]
        self._known |= {id(variable) for variable, _ in pairs}
        self.changed_weights, self._weights = [v for v, _ in pairs], [start for _, start in pairs]

    @torch.no_grad()
    def note_assigned(self, variable: Any) -> None:
        """Save the value of a weight before a layer first assigns it in this `fit`."""
        if id(variable) in self._known:
            return
        self._known.add(id(variable))
        if self._trains and any(variable is weight for weight in self._model.weights):
            self.changed_weights.append(variable)
            self._weights.append(variable.value.clone())

    @torch.no_grad()
    def end(self, counts: bool) -> None:
        """Add metrics and changes of one part of a batch to sums. Without rows (not `counts`), add only mean losses."""
        counted = [v.value for v in self._sums]
        sums = [t.clone() if counts or always else torch.zeros_like(t) for t, always in zip(counted, self._always)]
        pairs = [(v.value, start) for v, start in zip(self._moving, self._start[len(sums) :])]
        # An unchanged infinite value (of a mask, for example) changes by 0: infinity minus infinity would be NaN.
        changes = [torch.where(t == start, 0, t - start) if counts else torch.zeros_like(t) for t, start in pairs]
        self._changes.add([*sums, *changes])

    @torch.no_grad()
    def settle(self, tree: Tree, num_counting: int, is_skipped: bool) -> None:
        """Set metrics and moving statistics to their values after the batch: combine its parts from all ranks.

        Args:
            tree: sums tensors over ranks.
            num_counting: the number of parts of the batch that have rows, on all ranks.
            is_skipped: whether the update was skipped and moving statistics were restored.
        """
        changes: Any = self._changes.take()
        totals = tree.all_reduce(changes, "sum")
        size = len(self._sums)
        for variable, start, total in zip(self._sums, self._start, totals[:size]):
            variable.value.copy_(start + total)
        for variable, start, total in zip(self._moving, self._start[size:], totals[size:] if not is_skipped else ()):
            variable.value.copy_(start + total / num_counting)


class _Logs:
    """Collects the logs of the parts of a batch."""

    def __init__(self) -> None:
        self._last: Any = None
        self._names: list[str] = []
        self._values = Subtrees()

    @torch.no_grad()
    def add(self, logs: Any, num_rows: int) -> None:
        """Add the logs of the next part of the batch, weighted by its rows."""
        self._last = logs
        scalars = {name: value for name, value in logs.items() if _is_number(value)} if isinstance(logs, dict) else {}
        self._names = list(scalars)
        values = [torch.as_tensor(value, dtype=torch.float32).detach() for value in scalars.values()]
        self._values.add([value * num_rows if num_rows else torch.zeros_like(value) for value in values])

    def settle(self, model: Any, tree: Tree, num_rows: int) -> Any:
        """Return the logs of the batch: the results of metrics over all ranks, and other scalars as means over rows."""
        metrics = model.get_metrics_result()
        if not isinstance(self._last, dict):
            return self._last
        if metrics.keys() >= self._last.keys():
            return {name: metrics[name] for name in self._last}
        values: Any = self._values.take()
        totals = tree.all_reduce(values, "sum")
        means = {name: total / num_rows for name, total in zip(self._names, totals)}
        return {name: metrics.get(name, means.get(name, value)) for name, value in self._last.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.dim() == 0)
