"""What `prepare(model)` changes in Keras' torch trainer, which knows nothing of ranks.

All ranks go through the same batches, drawn alike, and each works on its part of every batch; or each has batches of
its own, where its data is a part already. Before every batch ranks exchange their numbers of rows, so
that uneven parts get their weights; a rank that runs out of batches of its own takes part with empty ones. At the end
of an epoch they exchange metrics. Every exchange starts with the same message, so ranks that do different things (one
stops, others continue) are found, and all of them raise.

Private names of Keras touched here (a test holds each of them):
    `keras.src.backend.torch.trainer.TorchEpochIterator` - what `fit` and `evaluate` iterate over; made in a
        frame where `self` is the model.
    `EpochIterator.__iter__`, `__next__`, `reset` - start an epoch; give the first and last step, and their batches;
        start anew.
    `EpochIterator.data_adapter`, `_num_batches`, `_steps_seen`, and the `ArrayDataAdapter` of
        `keras.src.trainers.data_adapters.array_data_adapter` - where batches come from, how many they are, how many
        have come; draws nothing but the order of rows, when an epoch begins and when it ends.
    `Trainer._symbolic_build` - builds the model, if it is not yet, from the first batch.
    `Trainer._get_metrics_result_or_logs` - the logs of an epoch.
    `Trainer._flatten_metrics_in_order` - the form in which `train_on_batch` returns logs.
    `Optimizer._trainable_variables` - what the optimizer was built on.
    `Model._initialize_ddp` (Keras 3.16 and later) - hands the model's gradients to PyTorch's DDP.
    `get_metrics_result` of the class in `keras.src.backend.torch.trainer` (Keras 3.16 and later) - sums metrics over
        the ranks, at every step.
    `keras.src.utils.python_utils.pythonify_logs` - makes Python numbers of logs.
"""

from __future__ import annotations

import contextlib
import contextvars
import enum
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import torch
from keras.src.backend.torch import trainer as torch_trainer
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.utils.python_utils import pythonify_logs

from keras_shardopt.backends.active import runtime
from keras_shardopt.backends.communicator import SingleReplica
from keras_shardopt.backends.keras_callers import caller_instance
from keras_shardopt.backends.models import optimizers_of, override_method
from keras_shardopt.backends.torch.communicator import TorchProcessGroup
from keras_shardopt.backends.torch.placement import fingerprints
from keras_shardopt.backends.torch.process_group import gather_objects, tell
from keras_shardopt.backends.torch.random_numbers import draw_apart
from keras_shardopt.data.own_parts import is_own_part
from keras_shardopt.data.shared_draws import SharedDraws, draw_before_going_on
from keras_shardopt.data.whole_batches import checksum, first_rows, part_of_batch, rows_of_parts
from keras_shardopt.fit.batch_normalization import synchronized_statistics
from keras_shardopt.fit.callbacks import callbacks_of_call, looks_at_batches, running_callbacks
from keras_shardopt.fit.overrides import (
    arguments_of,
    call_silently,
    num_rows,
    reducers_in,
    refuse_groups,
    warn_of_unequal_start,
)
from keras_shardopt.fit.sharing import (
    check_alike,
    check_kinds,
    check_rows,
    sharing_of,
    splits_own_part,
    warn_of_same_parts,
)
from keras_shardopt.numerics import Tensor
from keras_shardopt.update.losses import mean_losses, share_losses
from keras_shardopt.update.trainer_context import BatchShare, batch_shared, joining_uneven_inputs


def prepare(model: Any, reducers_of: Callable[[Any], list[Any]]) -> None:
    """Makes `fit`, `evaluate`, `predict` and the calls on one batch work on all ranks together."""
    if _SESSION not in vars(model):
        object.__setattr__(model, _SESSION, _Session(model, reducers_of))
    if torch_trainer.TorchEpochIterator is _KerasEpochIterator:
        torch_trainer.TorchEpochIterator = _EpochIterator
    override_method(model, "fit", _fit)
    override_method(model, "evaluate", _evaluate)
    override_method(model, "predict", _predict)
    override_method(model, "train_on_batch", _train_on_batch)
    override_method(model, "test_on_batch", _test_on_batch)
    override_method(model, "train_step", _train_step)
    override_method(model, "test_step", _step)
    override_method(model, "predict_step", _predict_step)
    override_method(model, "_symbolic_build", _symbolic_build)
    override_method(model, "_get_metrics_result_or_logs", _metrics_result_or_logs)
    if hasattr(model, "_initialize_ddp"):
        override_method(model, "_initialize_ddp", _without_ddp)
    if "get_metrics_result" in vars(_KerasTrainer):
        _KerasTrainer.get_metrics_result = _metrics_result


_SESSION = "_keras_shardopt_session"


class _Phase(enum.Enum):
    """What a rank is about to do when it communicates."""

    BUILD = "builds a prepared model"
    TRAIN_BATCH = "trains a prepared model"
    TEST_BATCH = "evaluates a prepared model"
    PREDICT_BATCH = "predicts with a prepared model (`prepare(model, gather=False)` lets each rank do it by itself)"
    PREDICTED = "gathers predictions"
    END_OF_EPOCH = "ends an epoch of a prepared model"
    END_OF_FIT = "leaves `fit` of a prepared model"


class _Session:
    """What the ranks have agreed on, for one model."""

    def __init__(self, model: Any, reducers_of: Callable[[Any], list[Any]]) -> None:
        self._reducers_of = reducers_of
        self._last_batch: dict[_Phase, Any] = {}
        self.model = model
        self._unused: list[tuple[Any, int]] = []
        """The optimizers that must not update anything, with the number of their updates."""
        self.has_started = False
        """Whether the ranks have begun the running epoch with equal values."""
        self.rows: list[int] | None = None
        """How many rows each rank has in the batch that comes next; None if they have not exchanged that."""
        self.shares_logs = False
        """Whether somebody looks at the logs of that batch."""
        self.last_rows = 0
        """How many rows this rank had in the last batch."""
        self.trains = False
        """Whether a `fit` is running."""
        self.call: _Phase | None = None
        """What the innermost call that runs does: `fit`, `evaluate` or `predict`."""
        self.splits_own_part = False
        """Whether the running `fit` splits validation data off this rank's own part."""
        self._has_warned = False
        self._phase = _Phase.TRAIN_BATCH
        self._shown: dict[_Phase, dict[str, Any]] = {}
        """What the bar shows: the metrics of all ranks, after some batches."""
        self._shown_at = 0.0

    @property
    def ranks(self) -> TorchProcessGroup | None:
        """The ranks, if there are several."""
        replicas = runtime.communicator("")
        return None if isinstance(replicas, SingleReplica) else replicas  # type: ignore[return-value]

    def check_reduces(self) -> None:
        """Refuses an optimizer, perhaps of another `compile`, that would leave each rank with weights of its own."""
        reducers = reducers_in(self.model, self._reducers_of)
        refuse_groups(reducers)
        if not reducers:
            raise ValueError(
                "A prepared model must be trained with a `CrossShard`, which averages the gradients of the ranks. "
                f"Received: optimizer={self.model.optimizer!r}. "
                "Use `model.compile(optimizer=keras_shardopt.CrossShard(...), ...)`."
            )

    @torch.compiler.disable
    def start_equal(self) -> None:
        """Lets all ranks begin with the same values, which are rank 0's where they differ; if they train the same."""
        assert self.ranks is not None
        reducers = reducers_in(self.model, self._reducers_of)
        for reducer in reducers:
            reducer.peers.check(self.ranks)
            reducer.peers.check_parts()
        optimizers = optimizers_of(self.model)
        shared = [v for o in optimizers for v in getattr(o, "_shared_variables", o.variables)]
        # Also those that are frozen by now, perhaps on some ranks only: the first reduction finds that, and names them.
        built = [v for o in optimizers if o.built for v in o._trainable_variables]
        trained = list({id(v): v for v in [*built, *self.model.trainable_variables]}.values())
        others = self.ranks.model_and_seed_state([v.value for v in trained])
        differing = self._differing([*trained, *shared], others)
        if differing:
            if self.ranks.replica_id == 0:
                warn_of_unequal_start(differing)
            self.ranks.broadcast_from_rank_0(trained, shared)
        else:
            draw_apart(self.ranks.world, [])  # also where the program has seeded PyTorch since it was last said
        plain = [o for o in optimizers if not self._reducers_of(o)]
        self._unused = [(o, int(o.iterations)) for o in plain]
        for reducer in reducers:
            # Not once more after the first forward pass, whose moving statistics would become rank 0's.
            reducer.peers.started = self.ranks
        self.has_started = True

    def _differing(self, variables: Sequence[Any], others: Sequence[Tensor]) -> list[str]:
        """What is not equal on all ranks, found by one small message."""
        values = [*[v.value for v in variables], *others]
        shapes = zlib.crc32(repr([(tuple(value.shape), value.dtype) for value in values]).encode())
        everyones = gather_objects((len(variables), shapes, fingerprints(values)), "begins `fit` of a prepared model")
        if any(each[:2] != everyones[0][:2] for each in everyones):
            return ["other variables"]  # which ones, `broadcast_from_rank_0` says
        prints = np.stack([each[2] for each in everyones])
        differs = (prints != prints[0]).any(axis=0)
        is_other = differs[len(variables) :].any()
        names = [v.path for v, each in zip(variables, differs) if each]
        return [*names, *(["state that is not trained (statistics, seeds)"] if is_other else [])]

    def check_unused(self) -> None:
        """Refuses a training step that has updated with an optimizer that averages nothing. Once in each `fit`."""
        unused, self._unused = self._unused, []
        for optimizer, updates in unused:
            if int(optimizer.iterations) != updates:
                raise ValueError(
                    "Every optimizer that a prepared model is trained with must be a `CrossShard`, which averages the "
                    f"gradients of the ranks. Received: an update by {type(optimizer).__name__}. "
                    f"Use `keras_shardopt.CrossShard({type(optimizer).__name__}(...))`."
                )

    def exchange(self, phase: _Phase, *message: int) -> list[list[int]]:
        """Tells the other ranks a message, and returns what each of them tells.

        Raises:
            ValueError: on every rank, if they are in different phases.
        """
        assert self.ranks is not None
        return tell(phase.value, *map(int, message))

    def takes_whole(self, *data: Any) -> bool:
        """Whether all ranks are given the same data, of which each works on a part of every batch."""
        return sharing_of(self.model).auto_shard and not self.splits_own_part and not is_own_part(*data)

    def check_kind(self, is_whole: bool) -> None:
        """Finds ranks of which some have the whole data and others a part of their own."""
        assert self.call is not None
        check_kinds([bool(kind) for kind, _ in tell(f"starts on data: {self.call.value}", int(is_whole))])

    @torch.compiler.disable
    def compare_first(self, data: Any, num_batches: int | None, is_whole: bool, is_marked: bool) -> None:
        """Finds ranks whose data differ although they should be alike, or are alike although they should differ."""
        assert self.call is not None
        length = -1 if num_batches is None else num_batches
        told = tell(f"begins: {self.call.value}", length, 0 if data is None else checksum(data))
        lengths, first_batches = zip(*told)
        if is_whole:
            check_alike(lengths, first_batches)
        elif not is_marked and self.call is _Phase.TRAIN_BATCH and len(set(first_batches)) == 1 and first_batches[0]:
            if not self._has_warned and self.ranks is not None and self.ranks.replica_id == 0:
                warn_of_same_parts()
            self._has_warned = True

    def next_part(self, data: Any, phase: _Phase) -> Any:
        """This rank's part of the batch `data` that all ranks have (None: no batch left, and None is returned)."""
        assert self.ranks is not None
        self._phase = phase
        num = 0 if data is None else int(num_rows(data))
        told = self.exchange(phase, num, 2 * (phase is not _Phase.PREDICT_BATCH and self._looks_at_logs(phase)))
        check_rows([rows for rows, _ in told])
        if not num:
            return None
        self.shares_logs = any(flags for _, flags in told)
        self.rows = rows_of_parts(num, self.ranks.num_replicas)
        return part_of_batch(data, self.rows, self.ranks.replica_id)

    def next_batch(self, data: Any, phase: _Phase) -> Any:
        """What this rank runs next where it has `data` (None: no batch left). None if no rank has rows."""
        self._phase = phase
        mine = 0 if data is None else int(num_rows(data))
        if mine:
            self._last_batch[phase] = data
        told = self.exchange(phase, mine, (phase in self._last_batch) + 2 * self._looks_at_logs(phase))
        rows = [row for row, _ in told]
        if not any(rows):
            return None
        self.shares_logs = any(flags >= 2 for _, flags in told)
        if not all(flags % 2 for _, flags in told):
            # A rank that never had a row needs some batch to go through the model with.
            self._last_batch.setdefault(phase, self._given(data, rows))
        self.rows = rows
        return self._last_batch[phase]

    def _looks_at_logs(self, phase: _Phase) -> bool:
        """Whether a callback of this rank looks at the logs of the next batch."""
        hooks = _HOOKS[phase]
        callbacks = running_callbacks(self.model)
        if any(looks_at_batches(callback, *hooks) for callback in callbacks):
            return True
        bars = [each for each in callbacks if isinstance(each, keras.callbacks.ProgbarLogger) and each.verbose == 1]
        if not bars or (self.trains and phase is _Phase.TEST_BATCH):
            return False
        # What is no metric is that of one batch, and not to be had later.
        return phase not in self._shown or time.monotonic() - self._shown_at > _BAR_SECONDS

    @torch.compiler.disable
    def logs_of_all(self, logs: Any) -> Any:
        """The logs of a batch as those of all ranks, if somebody looks at them."""
        if not self.shares_logs:
            return self._shown.get(self._phase, logs)
        self.shares_logs = False
        metrics = _metrics_of_all(self.model, self.ranks, lambda: pythonify_logs(self.model.get_metrics_result()))
        if not isinstance(logs, dict) or metrics.keys() != logs.keys():
            return self.mean_logs(logs)
        self._shown[self._phase], self._shown_at = metrics, time.monotonic()
        return metrics

    @torch.compiler.disable
    @torch.no_grad()
    def rows_of_all(self, outputs: Any, rows: Sequence[int]) -> Any:
        """What the ranks have predicted for their parts of a batch, in the order of its rows."""
        assert self.ranks is not None
        mine = rows[self.ranks.replica_id]
        given = max(mine, 1)  # one to go through the model with
        tensors = [keras.ops.convert_to_tensor(leaf).detach() for leaf in keras.tree.flatten(outputs)]
        # One output may have several rows for each row of the batch.
        factors = [
            tensor.shape[0] // given if tensor.dim() and not tensor.shape[0] % given else 0 for tensor in tensors
        ]
        kinds = [(tuple(t.shape[1:]), t.dtype, factor) for t, factor in zip(tensors, factors)]
        told = self.exchange(_Phase.PREDICTED, int(all(factors)), zlib.crc32(repr(kinds).encode()))
        if any(each != [1, told[0][1]] for each in told):
            raise ValueError(
                "The outputs of `predict_step` must have as many rows as the batch, for ranks to gather them. "
                f"Received: for {given} rows outputs of the shapes {[tuple(t.shape) for t in tensors]}. "
                "Use `keras_shardopt.prepare(model, gather=False)`, and each rank predicts alone what it is given."
            )
        # Of each tensor the bytes of as many rows as the largest part has.
        sizes = [t[:1].numel() * t.element_size() * factor for t, factor in zip(tensors, factors)]
        parts = []
        for tensor, factor, size in zip(tensors, factors, sizes):
            part = tensor.contiguous()[: mine * factor].reshape(-1).view(torch.uint8)
            parts.append(torch.nn.functional.pad(part, (0, size * max(rows) - part.numel())))
        (everyones,) = self.ranks.all_gather([torch.cat(parts)])
        columns = everyones.view(len(rows), -1).split([size * max(rows) for size in sizes], dim=1)
        found = []
        for tensor, size, column in zip(tensors, sizes, columns):
            joined = torch.cat([part[: size * num] for part, num in zip(column, rows)])
            found.append(joined.view(tensor.dtype).view(-1, *tensor.shape[1:]))
        return keras.tree.pack_sequence_as(outputs, found)

    @torch.compiler.disable
    def mean_logs(self, logs: Any) -> Any:
        """Logs that are no metrics: the mean of what the ranks had in the last batch, by their rows."""
        assert self.ranks is not None
        if not isinstance(logs, dict):
            return logs
        numbers = {name: value for name, value in pythonify_logs(logs).items() if isinstance(value, float)}
        # What a rank without rows has is no number, perhaps.
        values = [value * self.last_rows if self.last_rows else 0.0 for value in numbers.values()]
        mine = [float(self.last_rows), *values]
        device = self.model.trainable_variables[0].value.device
        (sums,) = self.ranks.all_reduce([torch.tensor(mine, dtype=torch.float64, device=device)], "sum")
        rows, *totals = sums.tolist()
        return {**logs, **{name: total / rows for name, total in zip(numbers, totals)}} if rows else logs

    def forget_logs(self) -> None:
        """Lets go of what the bar shows: metrics begin anew."""
        self._shown.clear()

    def any_batch(self, data: Any) -> Any:
        """`data`, or where this rank has none (None) that of another rank."""
        has_data = [has for has, _ in self.exchange(_Phase.BUILD, data is not None)]
        if not any(has_data):
            raise ValueError("`x` must have a batch on some rank. Received: none on any.")
        return data if all(has_data) else self._given(data, has_data)

    def forget_batches(self) -> None:
        """Lets go of batches, which need not look like those of another call."""
        self._last_batch.clear()
        self.rows = None

    def _given(self, data: Any, owners: Sequence[int]) -> Any:
        """What the first rank that has something gives to all."""
        assert self.ranks is not None
        return self.ranks.broadcast_object(data, next(rank for rank, has in enumerate(owners) if has))


_HOOKS = {_Phase.TRAIN_BATCH: ("on_batch_end", "on_train_batch_end"), _Phase.TEST_BATCH: ("on_test_batch_end",)}
"""The methods of callbacks that get the logs of a batch."""

_BAR_SECONDS = 0.05
"""How often Keras' bar shows something new."""


_running: contextvars.ContextVar[_Session | None] = contextvars.ContextVar("running", default=None)


def _session_of(model: Any) -> _Session:
    session: _Session = vars(model)[_SESSION]
    return session


@contextlib.contextmanager
def _run_of(session: _Session | None) -> Iterator[None]:
    """Within it batches are those that all ranks agree on (None: each rank's own)."""
    token = _running.set(session)
    try:
        yield
    finally:
        _running.reset(token)


def _evaluate(model: Any, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    session = _session_of(model)
    return _run(session, session, _Phase.TEST_BATCH, real, *args, **kwargs)


def _predict(model: Any, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Each rank predicts its part of every batch; or by itself, what it wants and when it wants."""
    session, sharing = _session_of(model), sharing_of(model)
    together = session if sharing.gather and sharing.auto_shard else None
    return _run(session, together, _Phase.PREDICT_BATCH, real, *args, **kwargs)


def _run(
    session: _Session, together: _Session | None, call: _Phase, real: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """A call, perhaps inside another one: on all ranks `together`, or on this one alone (None)."""
    is_outermost = session.call is None
    before = session.call, session.rows, session.shares_logs
    session.call, session.rows = call, None
    try:
        with _run_of(together), callbacks_of_call(session.model), _one_by_one(session):
            return _print_on_chief(session, real, *args, **kwargs)
    finally:
        session.call, session.rows, session.shares_logs = before
        if is_outermost:
            session.forget_batches()


@contextlib.contextmanager
def _one_by_one(session: _Session) -> Iterator[None]:
    """A call whose steps are made one by one: ranks communicate before each. Keras 3.15 makes no others on torch."""
    model, steps = session.model, session.model.steps_per_execution
    if steps == 1 or session.ranks is None:
        yield
        return
    model.steps_per_execution = 1
    try:
        yield
    finally:
        model.steps_per_execution = steps


def _print_on_chief(session: _Session, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    prints = session.ranks is None or session.ranks.replica_id == 0
    return real(*args, **kwargs) if prints else call_silently(real, *args, **kwargs)


def _fit(model: Any, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    session = _session_of(model)
    session.has_started, session.trains = False, True
    session.splits_own_part = splits_own_part(args, kwargs)
    try:
        with joining_uneven_inputs():
            history = _run(session, session, _Phase.TRAIN_BATCH, real, *args, **kwargs)
    finally:
        session.trains = session.splits_own_part = False
    if session.ranks is not None:
        session.exchange(_Phase.END_OF_FIT)
    return history


class _Unbuilt(Exception):
    pass


class _Asked:
    """Stands for batches, to find out whether anyone wants to see one."""

    def __iter__(self) -> Any:
        raise _Unbuilt


def _symbolic_build(model: Any, real: Callable[..., None], iterator: Any = None, data_batch: Any = None) -> None:
    session = _session_of(model)
    if iterator is None or session.ranks is None:
        real(iterator=iterator, data_batch=data_batch)
        return
    try:
        real(iterator=_Asked())
    except _Unbuilt:
        batch = iterator.first_batch()
        real(data_batch=session.any_batch(batch))


_KerasEpochIterator = torch_trainer.TorchEpochIterator
# Its name is another one from 3.16 on.
_KerasTrainer: Any = next(kind for kind in keras.Model.__mro__ if kind.__module__ == torch_trainer.__name__)
_metrics_result_in_keras = _KerasTrainer.get_metrics_result


class _EpochIterator(_KerasEpochIterator):  # type: ignore[misc, valid-type]
    """Gives this rank its part of the batches that all ranks have, or those of its own together with theirs.

    One without a batch of its own left repeats its last one, whose rows are not counted.
    """

    def __init__(self, x: Any, y: Any = None, sample_weight: Any = None, *args: Any, **kwargs: Any) -> None:
        # Keras does not say for which model this is: in the middle of one's `fit` a callback may run another.
        self._model = caller_instance()
        session = self._session()
        self._is_whole = session is not None and session.takes_whole(x, y, sample_weight)
        self._is_marked = session is not None and (session.splits_own_part or is_own_part(x, y, sample_weight))
        self._is_compared = False
        self._first: Any = None if session is None or self._is_whole else first_rows((x, y))
        self._shuffle = kwargs.get("shuffle", False)
        self._draws = SharedDraws() if self._is_whole else None
        if session is not None and session.call is not _Phase.PREDICT_BATCH:
            session.check_kind(self._is_whole)
        with self._drawing(hasattr(x, "__next__")):  # Keras looks at the first batches of a generator
            super().__init__(x, y, sample_weight, *args, **kwargs)
        if self._is_whole:
            draw_before_going_on(self.data_adapter)

    def _session(self) -> _Session | None:
        """The session of the call that runs, if ranks make it together."""
        session = _running.get()
        return None if session is None or session.model is not self._model or session.ranks is None else session

    def _drawing(self, draws: bool) -> contextlib.AbstractContextManager[None]:
        return self._draws.drawing() if self._draws is not None and draws else contextlib.nullcontext()

    def reset(self) -> None:
        with self._drawing(not isinstance(self.data_adapter, ArrayDataAdapter)):
            super().reset()

    def __iter__(self) -> Any:
        self._has_ended = False
        self._has_begun = False
        self._step = -1
        session = self._session()
        if session is not None and session.call is _Phase.TRAIN_BATCH:
            session.has_started = False  # callbacks have changed rates or weights, perhaps of some ranks only
        if self._draws is not None:
            self._draws.forget()
        return super().__iter__()

    def _pull(self) -> Any:
        """The next batch of this rank's data."""
        is_first, self._has_begun = not self._has_begun, True
        if not isinstance(self.data_adapter, ArrayDataAdapter):
            draws = True
        else:
            is_last = self._steps_seen >= self.data_adapter.num_batches
            if is_last and self._draws is not None:
                self._draws.forget()  # a callback has predicted, perhaps, which draws
            draws = self._shuffle == "batch" or (bool(self._shuffle) and (is_first or is_last))
        with self._drawing(draws):
            return super().__next__()

    def first_batch(self) -> Any:
        """The first batch of an epoch, on which nobody trains; None if there is none."""
        try:
            return iter(self)._pull()[2][0]
        except StopIteration:
            return None

    def __next__(self) -> Any:
        session = self._session()
        if session is None or session.call is None:
            return self._pull()
        phase = session.call
        if phase is _Phase.PREDICT_BATCH and not self._is_whole:
            return self._pull()
        batches = [None]
        if not self._has_ended:
            try:
                self._step, _, batches = self._pull()
            except StopIteration:
                self._has_ended = True
        if self._has_ended:
            self._step += 1
        if not self._is_compared:
            self._is_compared = True
            first = batches[0] if self._first is None else self._first
            session.compare_first(first, self.data_adapter.num_batches, self._is_whole, self._is_marked)
        data = (session.next_part if self._is_whole else session.next_batch)(batches[0], phase)
        if data is None:
            raise StopIteration
        return self._step, self._step, [data]


def _train_on_batch(model: Any, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _on_batch(model, real, _Phase.TRAIN_BATCH, arguments_of(real, *args, **kwargs))


def _test_on_batch(model: Any, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _on_batch(model, real, _Phase.TEST_BATCH, arguments_of(real, *args, **kwargs))


def _on_batch(model: Any, real: Callable[..., Any], phase: _Phase, arguments: dict[str, Any]) -> Any:
    """Every rank gives its own rows, perhaps none, and gets the logs of all."""
    session = _session_of(model)
    return_dict = arguments.pop("return_dict", False)
    if session.ranks is None:
        return real(**arguments, return_dict=return_dict)
    batch = tuple(arguments.pop(name, None) for name in ("x", "y", "sample_weight"))
    batch = session.next_batch(batch, phase)
    if batch is None:
        raise ValueError("`x` must have rows on some rank. Received: none on any.")
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    with _one_by_one(session):
        logs = real(x=x, y=y, sample_weight=sample_weight, **arguments, return_dict=True)
    with _run_of(session):
        logs = pythonify_logs(model._get_metrics_result_or_logs(logs))
    return logs if return_dict else model._flatten_metrics_in_order(logs)


def _train_step(model: Any, real: Callable[[Any], Any], data: Any) -> Any:
    session = _session_of(model)
    if session.ranks is not None:
        session.check_reduces()
    if session.ranks is not None and session.rows is not None and not session.has_started:
        session.start_equal()
    logs = _step(model, real, data)
    session.check_unused()
    return logs


# Not compiled itself, as it talks to other ranks; what it calls is.
@torch.compiler.disable(recursive=False)
def _step(model: Any, real: Callable[[Any], Any], data: Any) -> Any:
    """A step on this rank's part of the batch that the ranks have agreed on."""
    session = _session_of(model)
    ranks, rows = session.ranks, session.rows
    if ranks is None or rows is None:
        return real(data)
    session.rows = None
    mine = rows[ranks.replica_id]
    share_losses(model)
    kept = [] if mine else [(tensor, tensor.clone()) for tensor in _counted(model)]
    with batch_shared(BatchShare(mine, sum(rows), ranks, ends_early=not mine)):
        logs = real(data)
    with torch.no_grad():
        for tensor, value in kept:
            tensor.copy_(value)
    session.last_rows = mine
    return session.logs_of_all(logs)


@torch.compiler.disable(recursive=False)
def _predict_step(model: Any, real: Callable[[Any], Any], data: Any) -> Any:
    """What the model predicts for the batch of which this rank has a part."""
    session = _session_of(model)
    rows = session.rows
    outputs = real(data)
    if session.ranks is None or rows is None or session.call is not _Phase.PREDICT_BATCH:
        return outputs
    session.rows = None
    return session.rows_of_all(outputs, rows)


def _counted(model: Any) -> list[Tensor]:
    """What a step without rows must leave as it is. Seeds stay in step, and mean losses know about shares."""
    shared = {id(v) for tracker in mean_losses(model) for v in tracker.variables}
    metrics = [v.value for v in model.metrics_variables if id(v) not in shared]
    return metrics + _statistics(model, apart_from=synchronized_statistics(model))


def _statistics(model: Any, apart_from: Collection[int] = ()) -> list[Tensor]:
    variables = [v for v in model.non_trainable_variables if id(v) not in apart_from]
    return [v.value for v in variables if keras.backend.is_float_dtype(v.dtype)]


def _metrics_result_or_logs(model: Any, real: Callable[[Any], Any], logs: Any) -> Any:
    """The metrics of all ranks together, each variable summed or averaged as the metric has declared it."""
    session = _session_of(model)
    ranks = session.ranks
    if ranks is None or _running.get() is not session:
        return real(logs)
    session.exchange(_Phase.END_OF_EPOCH)
    if session.call is _Phase.TRAIN_BATCH or (session.call is None and model.training):
        with torch.no_grad():
            _average_statistics(model, ranks)
    # As numbers: some metrics return a variable itself.
    result = _metrics_of_all(model, ranks, lambda: None if (found := real(logs)) is logs else pythonify_logs(found))
    session.forget_logs()
    return session.mean_logs(logs) if result is None else result


@torch.no_grad()
def _metrics_of_all(model: Any, ranks: TorchProcessGroup, result: Callable[[], Any]) -> Any:
    """What `result()` makes of the metrics of all ranks, which stay each rank's own."""
    mine = [v.value for v in model.metrics_variables]
    before = [tensor.clone() for tensor in mine]
    for how in ("sum", "mean"):
        chosen = [v.value for v in model.metrics_variables if v.aggregation == how]
        for tensor, value in zip(chosen, ranks.all_reduce(chosen, how)):
            tensor.copy_(value)
    found = result()
    for tensor, value in zip(mine, before):
        tensor.copy_(value)
    return found


def _metrics_result(model: Any) -> Any:
    """Stands in for Keras' method: metrics of a prepared model are this rank's until the end of an epoch."""
    if hasattr(model, _SESSION):
        return super(_KerasTrainer, model).get_metrics_result()
    return _metrics_result_in_keras(model)


def _average_statistics(model: Any, ranks: TorchProcessGroup) -> None:
    """Makes moving statistics, which each rank has of its own rows, the mean of all ranks'."""
    mine = _statistics(model)
    roots = ranks.broadcast(mine)
    # By the mean of differences: frozen weights, which are among them and equal, keep every bit.
    differences = ranks.all_reduce([tensor - root for tensor, root in zip(mine, roots)], "mean")
    for tensor, root, difference in zip(mine, roots, differences):
        tensor.copy_(root + difference)


def _without_ddp(model: Any, real: Callable[[], None]) -> None:
    """Leaves the parameters to the optimizer: DDP would reduce gradients before they are weighed."""
