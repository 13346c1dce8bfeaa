"""The PyTorch step of `VirtualReplicas`: a batch has a fixed number of parts, and each rank computes some in turn.

Each part runs a Keras step on the variables' values before the batch. If losses divide by a count over all parts (of a
mask, for example), a counting pass first runs each part forward. If each rank has only one part, ranks exchange their
counts in the loss instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
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
from keras_shardopt.extensions.equal_bits.parts import (
    CountingReplica,
    PartVariables,
    VirtualReplica,
    current_part,
    parts_of_each,
    parts_of_replica,
    with_divisors,
)
from keras_shardopt.extensions.equal_bits.torch_batches import KeptState
from keras_shardopt.extensions.equal_bits.tree import Subtrees, Tree, summed
from keras_shardopt.fit.calls import num_rows
from keras_shardopt.fit.torch.session import Session
from keras_shardopt.fit.torch.step import TrainStep
from keras_shardopt.numerics import Variable
from keras_shardopt.update.losses import mean_losses, share_losses
from keras_shardopt.update.parts import PartOfBatch
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
    batches, cross_shard, given = session.batches, session.cross_shards[0], int(num_rows(data))
    mine, batches.mine = (given if ranks is None else batches.mine or 0), None
    all_rows = given if ranks is None else batches.all_rows()
    own, tree = parts_of_replica(num_parts, replicas), Tree(replicas, num_parts)
    rows = rows_of_parts(mine, len(own))
    _warn_of_compiling(model, kept)
    accumulation, updates = cross_shard.accumulation, runtime.version(cross_shard.iterations)
    window = None if accumulation is None else accumulation.window
    layers = kept.state(session.call is not None) if trains else []
    state, weights = _State(model, layers), _ChangedWeights(model, layers, kept.changed_weights if trains else [])
    kept.on_loss = weights.keep_changed if trains and kept.changed_weights is None else None
    can_repeat = not trains or has_built_in_step(model)
    others = tree if len(own) == 1 and can_repeat else None
    watching = watching_layers(weights.note_assigned) if trains else contextlib.nullcontext()
    with as_parts() as begin, one_thread(), watching:
        batch = [int(cross_shard.iterations), 0 if window is None else window.num_taken]

        def step(i: int, here: PartOfBatch) -> Any:
            begin(own[i], batch)
            weights.restore()
            state.begin()
            # If a part of the batch has no rows, run the model on one row that does not count: a model needs input.
            part_data = _copied(part_of_batch(data, rows if mine else [1, given - 1], i if mine else 0))
            share = BatchShare(rows[i], all_rows, here, ends_early=not rows[i], rows_here=rows[i] or 1)
            with batch_shared(share), before_more(i + 1 < len(own)):
                return _count(real, part_data) if isinstance(here, CountingReplica) else real(part_data)

        def count() -> list[Any]:
            parts = [CountingReplica(part, num_parts) for part in own]
            for i, part in enumerate(parts):
                step(i, part)
            return tree.total(summed(part.counts for part in parts))

        def run(divisors: Sequence[Any]) -> tuple[list[Any], _Logs]:
            changes, logs = Subtrees(), _Logs()
            for i, part in enumerate(own):
                logs.add(step(i, VirtualReplica(part, num_parts, divisors, others)), rows[i])
                changes.add(state.changes(rows[i]))
            return changes.take(), logs

        (changes, logs), kept.counts_first = with_divisors(run, count if can_repeat else None, kept.counts_first)
    if trains:
        kept.changed_weights, kept.on_loss = weights.variables, None
    session.last_rows = mine
    batches.confirm()
    batches.shares_logs = False  # `logs` are already those of all ranks
    everyones = [given] if ranks is None else batches.rows()
    counts = [count for rank in everyones for count in rows_of_parts(rank, len(own))]
    # The update was skipped if `iterations` still has its version from before the batch.
    is_skipped = trains and runtime.version(cross_shard.iterations) == updates
    is_skipped = is_skipped and (window is None or bool(window.is_complete))
    state.settle(tree.total(changes), sum(count > 0 for count in counts), is_skipped)
    settled = logs.settle(model, tree, sum(counts))
    if ranks is not None:
        batches.end_step()
    return settled


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

    divides_batches = True

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
        if session.ranks is not None and session.batches.mine is None:
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


def _copied(data: Any) -> Any:
    """Copy the rows of a part of the batch, because kernels can sum in another order if memory is not aligned."""
    return keras.tree.map_structure(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, data)


class _State:
    """The variables that steps on parts of a batch change: metrics, moving statistics and seeds."""

    def __init__(self, model: Any, layers: Sequence[Any]) -> None:
        of_losses = [v for tracker in mean_losses(model) for v in tracker.variables]
        self._roles = PartVariables([*layers, global_seed_state()], model.metrics_variables, of_losses)
        # Keep variables, not their tensors, because a PyTorch module can replace the tensor of a buffer.
        self._variables = self._roles.variables
        self._before = [v.value.clone() for v in self._variables]
        self._starts = self._roles.starts(self._before)

    @torch.no_grad()
    def begin(self) -> None:
        """Set variables to their values at the start of a part of the batch."""
        for variable, start in zip(self._variables, self._starts):
            variable.value.copy_(start)

    @torch.no_grad()
    def changes(self, num_rows: int) -> list[Any]:
        """Return the changes of variables in the part that has just ended, to sum over parts."""
        return self._roles.ends(self._starts, [v.value for v in self._variables], num_rows)[0]

    @torch.no_grad()
    def settle(self, totals: Sequence[Any], num_counting: int, is_skipped: bool) -> None:
        """Set metrics and moving statistics to their values after the batch. Others keep those of the last part.

        If the update was skipped (`is_skipped`), moving statistics were restored, and stay.
        """
        values = self._roles.settled(self._before, totals, [None for _ in totals], num_counting)
        for variable, value, is_sum in zip(self._variables, values, self._roles.is_sum):
            if value is not None and (is_sum or not is_skipped):
                variable.value.copy_(value)


class _ChangedWeights:
    """The weights, also frozen ones, that layers change in their call. Each part starts from their old values.

    Args:
        model: the model.
        state: the variables, apart from weights, that layers change.
        weights: the weights. None: unknown, so save all until `keep_changed`.
    """

    def __init__(self, model: Any, state: Sequence[Variable], weights: Sequence[Variable] | None) -> None:
        self._model = model
        self._others = {id(v) for v in state}
        if weights is None:
            weights = [v for v in model.weights if id(v) not in self._others]
        self._saved = {id(v): (v, v.value.clone()) for v in weights}

    @property
    def variables(self) -> list[Variable]:
        """The weights that have changed or, before `keep_changed`, can change."""
        return [variable for variable, _ in self._saved.values()]

    @torch.no_grad()
    def restore(self) -> None:
        """Set the weights to their values before the batch."""
        for variable, value in self._saved.values():
            variable.value.copy_(value)

    @torch.no_grad()
    def keep_changed(self) -> None:
        """Stop saving and restoring weights that the forward pass has not changed."""
        pairs = self._saved.items()
        self._saved = {key: (variable, old) for key, (variable, old) in pairs if not torch.equal(variable.value, old)}

    @torch.no_grad()
    def note_assigned(self, variable: Variable) -> None:
        """Save the value of a weight before a layer first assigns it in this `fit`."""
        if id(variable) in self._saved or id(variable) in self._others:
            return
        if any(variable is weight for weight in self._model.weights):
            self._saved[id(variable)] = (variable, variable.value.clone())
        else:
            self._others.add(id(variable))


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
        totals = tree.total(self._values.take())
        means = {name: total / num_rows for name, total in zip(self._names, totals)}
        return {name: metrics.get(name, means.get(name, value)) for name, value in self._last.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.dim() == 0)
