"""What the ranks have agreed on, for one prepared model, and what they exchange.

Every exchange starts with the same message, so ranks that do different things (one stops, others continue) are found,
and all of them raise. A message with every batch would cost more than all else here. So where a rank knows that the
next batches have as many rows as this one, it promises them along with it, and as many as all have promised go without
a message; the next one stands for all of them.

Private names of Keras touched here (a test holds each of them):
    `Optimizer._trainable_variables` - what the optimizer was built on.
    `keras.src.utils.python_utils.pythonify_logs` - makes Python numbers of logs.
"""

from __future__ import annotations

import contextlib
import contextvars
import enum
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import torch
from keras.src.utils.python_utils import pythonify_logs

from keras_shardopt.backends.active import runtime
from keras_shardopt.backends.models import has_built_in_step, note_own_statistics, optimizers_of
from keras_shardopt.backends.torch.communicator import TorchProcessGroup, _bytes
from keras_shardopt.backends.torch.placement import fingerprints, joint_fingerprint
from keras_shardopt.backends.torch.process_group import can_promise, gather_objects, owe_steps, tell, tell_soon
from keras_shardopt.backends.torch.random_numbers import draw_apart
from keras_shardopt.data.own_parts import is_own_part
from keras_shardopt.data.whole_batches import checksum, fingerprint, part_of_batch
from keras_shardopt.fit.batch_normalization import synchronized_statistics
from keras_shardopt.fit.callbacks import BatchLogs
from keras_shardopt.fit.overrides import (
    num_rows,
    reducers_in,
    refuse_groups,
    warn_of_unequal_start,
)
from keras_shardopt.fit.sharing import check_alike, check_batches, check_kinds, sharing_of, warn_of_same_parts
from keras_shardopt.fit.torch.step import TrainStep, step_of
from keras_shardopt.numerics import Tensor

SESSION = "_keras_shardopt_session"


class Phase(enum.Enum):
    """What a rank is about to do when it communicates."""

    BUILD = "builds a prepared model"
    TRAIN_BATCH = "trains a prepared model"
    TEST_BATCH = "evaluates a prepared model (call `evaluate` on all ranks: each gets the result of all)"
    PREDICT_BATCH = "predicts with a prepared model (`prepare(model, gather=False)` lets each rank do it by itself)"
    PREDICTED = "gathers predictions"
    END_OF_EPOCH = "ends an epoch of a prepared model"
    END_OF_FIT = "leaves `fit` of a prepared model"


class Session:
    """What the ranks have agreed on, for one model."""

    def __init__(self, model: Any, reducers_of: Callable[[Any], list[Any]]) -> None:
        self._reducers_of = reducers_of
        self._last_batch: dict[Phase, Any] = {}
        self.model = model
        self._unused: list[tuple[Any, int]] = []
        """The optimizers that must not update anything, with the number of their updates."""
        self._begins_epoch = False
        self._step_of_call: TrainStep | None = None
        self._optimizer_of_step: Any = None
        note_own_statistics(model, False)
        self.has_started = False
        """Whether the ranks have begun the running epoch with equal values."""
        self.mine: int | None = None
        """How many rows this rank has in the batch that comes next; None if the ranks do not share it."""
        self._rows: list[int] = []
        """How many rows each rank has in it, as far as that is known."""
        self.shares_logs = False
        """Whether somebody looks at the logs of that batch."""
        self.last_rows = 0
        """How many rows this rank had in the last batch."""
        self.logs = BatchLogs(model)
        self.call: Phase | None = None
        """What the innermost call that runs does: `fit`, `evaluate` or `predict`."""
        self.splits_own_part = False
        """Whether the running `fit` splits validation data off this rank's own part."""
        self._has_warned = False
        self._told: Callable[[], list[list[int]]] | None = None
        """What waits for the numbers of rows that the others have in that batch."""
        self._is_part = False
        """Whether it is this rank's part of a batch that all have, so that its rows are known before."""
        self._step = 0
        """Which batch it is then."""
        self._waits: bool | None = None
        """Whether a step may begin before; None until somebody asks."""
        self._phase = Phase.TRAIN_BATCH
        self._unsaid = _Unsaid()

    @property
    def step(self) -> TrainStep:
        """How a step is made with the optimizer of the model. It stays as it is in a call, as long as that does."""
        if self.call is None or self._optimizer_of_step is not self.model.optimizer:
            self._step_of_call = step_of(self, self._step_of_call)
            self._optimizer_of_step = None if self.call is None else self.model.optimizer
        assert self._step_of_call is not None
        return self._step_of_call

    @property
    def reducers(self) -> list[Any]:
        """Each `CrossShard` of the model."""
        return reducers_in(self.model, self._reducers_of)

    @property
    def reducer(self) -> Any:
        """The `CrossShard` of the model, or the first of them."""
        return self.reducers[0]

    @property
    def ranks(self) -> TorchProcessGroup | None:
        """The ranks, if there are several."""
        replicas = runtime.communicator("")
        return None if replicas.num_replicas == 1 else replicas  # type: ignore[return-value]

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
    def look(self, together: Session | None) -> None:
        """Somebody looks at weights, on all ranks `together`, or on this one alone (None)."""
        if self.ranks is not None and together is not None:
            self.step.before_look()

    @torch.compiler.disable
    def go_on(self) -> None:
        """A training step comes."""
        if self.ranks is not None:
            self.step.before_step(self._begins_epoch)
            self._begins_epoch = False

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
        if differing and self.step.stopped_alike():  # by an error in a `fit` before, perhaps
            self.look(self)
            self.step.settle()
            differing = self._differing([*trained, *shared], others)
        elif not differing:
            self.step.weights_set()
        if differing:
            warn_of_unequal_start(differing)
            self.ranks.broadcast_from_rank_0(trained, shared)
        else:
            draw_apart(self.ranks.world, [])  # also where the program has seeded PyTorch since it was last said
        plain = [o for o in optimizers if not self._reducers_of(o)]
        self._unused = [(o, int(o.iterations)) for o in plain]
        for reducer in reducers:
            # Not once more after the first forward pass, whose moving statistics would become rank 0's.
            reducer.peers.started = self.ranks
        self.has_started = self._begins_epoch = True

    def _differing(self, variables: Sequence[Any], others: Sequence[Tensor]) -> list[str]:
        """What is not equal on all ranks. One small message where all is."""
        values = [*[v.value for v in variables], *others]
        shapes = zlib.crc32(repr([(tuple(value.shape), value.dtype) for value in values]).encode())
        told = tell("begins `fit` of a prepared model", shapes, joint_fingerprint(values))
        if all(each == told[0] for each in told):
            return []
        mine = (len(variables), shapes, fingerprints(values))
        everyones = gather_objects(mine, "compares the values of a prepared model")
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

    def exchange(self, phase: Phase, *message: int) -> list[list[int]]:
        """Tells the other ranks a message, and returns what each of them tells.

        Raises:
            ValueError: on every rank, if they are in different phases.
        """
        assert self.ranks is not None
        return tell(phase.value, *map(int, message))

    def takes_whole(self, *data: Any) -> bool:
        """Whether all ranks are given the same data, of which each works on a part of every batch."""
        return sharing_of(self.model).auto_shard and not self.splits_own_part and not is_own_part(*data)

    @torch.compiler.disable
    def compare(self, is_whole: bool, data: Any = None, num_batches: int | None = None, is_marked: bool = True) -> None:
        """Finds ranks whose data differ although they should be alike, or are alike although they should differ.

        Args:
            is_whole: whether this rank has the data that all have, or its own part.
            data: what it begins with; None if that is not known yet, and it is compared later.
            num_batches: how many batches it has; None if that is not known.
            is_marked: whether it is surely meant that each has its own part.
        """
        assert self.call is not None
        length = 0 if num_batches is None else num_batches + 1
        told = tell(f"begins: {self.call.value}", is_whole + 2 * length, 0 if data is None else checksum(data))
        check_kinds([bool(number % 2) for number, _ in told])
        lengths, first_batches = [number // 2 for number, _ in told], [found for _, found in told]
        if is_whole:
            check_alike(lengths, first_batches)
        elif not is_marked and self.call is Phase.TRAIN_BATCH and len(set(first_batches)) == 1 and first_batches[0]:
            if not self._has_warned:
                warn_of_same_parts()
            self._has_warned = True

    def next_part(self, data: Any, phase: Phase, step: int, num_alike: int) -> Any:
        """This rank's part of the batch `data` that all ranks have (None: no batch left, and None is returned).

        Args:
            data: the batch.
            phase: what is done with it.
            step: which batch it is.
            num_alike: how many of those that follow have as many rows, as far as that is known.
        """
        assert self.ranks is not None
        num = 0 if data is None else int(num_rows(data))
        self._step = step
        self._unsaid.add(num, fingerprint(data) if num else 0)
        self._tell_rows(phase, num, True, num_alike)
        if not num:
            owe_steps(-1)
            return None
        self._rows = self._rows_of_ranks(num, self.ranks)
        self.step.fit_states(self._rows, self.ranks.replica_id)
        self.mine = self._rows[self.ranks.replica_id]
        return part_of_batch(data, self._rows, self.ranks.replica_id)

    def _rows_of_ranks(self, num: int, ranks: TorchProcessGroup) -> list[int]:
        """How many rows of a batch each rank has."""
        return self.step.rows_of(num, ranks.num_replicas)

    def next_batch(self, data: Any, phase: Phase, num_alike: int = 0) -> Any:
        """What this rank runs next where it has `data` (None: no batch left). None if no rank has rows."""
        mine = 0 if data is None else int(num_rows(data))
        if mine:
            self._last_batch[phase] = data
        self._unsaid.add(mine, 0)
        self._tell_rows(phase, mine, False, num_alike)
        if not mine and not any(self._rows):
            owe_steps(-1)
            return None
        self.mine = mine
        return self._last_batch[phase]

    def _tell_rows(self, phase: Phase, num: int, is_part: bool, num_alike: int) -> None:
        """Tells the others how many rows this rank has, and waits for theirs unless a step may begin before."""
        self._phase, self._is_part = phase, is_part
        if self._unsaid.is_promised():
            return
        looks = ahead = 0
        if phase is not Phase.PREDICT_BATCH:
            trains = phase is Phase.TRAIN_BATCH
            looks = int(self.logs.are_wanted(trains))
            ahead = self._unsaid.can_promise(num_alike, self.logs.seconds_unseen(trains)) if num else 0
        flags = looks + 2 * (phase in self._last_batch) + 4 * ahead + 4 * _MOST_PROMISED * self._unsaid.mark
        self._told = tell_soon(phase.value, num, flags)
        owe_steps(1)
        if not num or not self._can_wait(phase):
            self.confirm()

    def _can_wait(self, phase: Phase) -> bool:
        """Whether the step of this phase exchanges nothing before it has come to the loss."""
        if self._waits is None:
            # One that somebody else wrote may not come there, and what is compiled is better left as it is.
            is_plain = not self.model.jit_compile and not synchronized_statistics(self.model)
            tests_as_keras = type(self.model).test_step is keras.Model.test_step
            self._waits = is_plain and tests_as_keras and has_built_in_step(self.model)
        return self._waits and phase is not Phase.PREDICT_BATCH

    @torch.compiler.disable
    def confirm(self) -> None:
        """Waits until all ranks have said how many rows they have.

        Raises:
            ValueError: on every rank, if some have other rows of a batch that all have, or are in other phases.
        """
        told, self._told = self._told, None
        if told is None:
            return
        numbers = told()
        first = self._step + 1 - self._unsaid.num_batches
        self._unsaid.are_said(min(flags // 4 % _MOST_PROMISED for _, flags in numbers))
        self.shares_logs = any(flags % 2 for _, flags in numbers)
        if self._is_part:
            marks = [(num, flags // (4 * _MOST_PROMISED)) for num, flags in numbers]
            check_batches(marks, self._step, first)
            return
        self._rows = rows = [num for num, _ in numbers]
        if any(rows) and not all(flags // 2 % 2 for _, flags in numbers):
            # A rank that never had a row needs some batch to go through the model with.
            given = self._given(self._last_batch.get(self._phase), rows)
            self._last_batch.setdefault(self._phase, given)

    @torch.compiler.disable
    def rows(self) -> list[int]:
        """How many rows each rank has in the batch that comes next, or is under way."""
        if not self._is_part:
            self.confirm()
        return self._rows

    def all_rows(self) -> int | Callable[[], int]:
        """How many rows all ranks have together in that batch, or what waits for it."""
        if self._told is None or self._is_part:
            return sum(self._rows)
        return lambda: sum(self.rows())

    def begin_call(self) -> None:
        """Lets go of what may be other in another call."""
        self._optimizer_of_step = None
        if self._step_of_call is not None:
            self._step_of_call.begin_call()

    @contextlib.contextmanager
    def inner_call(self) -> Iterator[None]:
        """A call inside another one, perhaps between a batch and its step. Its batches are others."""
        self.confirm()
        self.begin_call()
        before = self.mine, self._rows, self._is_part, self._phase, self.shares_logs, self._step
        unsaid, self._unsaid = self._unsaid, _Unsaid()
        self.mine = self._waits = None
        try:
            yield
        finally:
            self._told = None
            self.begin_call()
            self.mine, self._rows, self._is_part, self._phase, self.shares_logs, self._step = before
            self._unsaid = unsaid

    @torch.compiler.disable
    def logs_of_all(self, logs: Any) -> Any:
        """The logs of a batch, whose step ends here, as those of all ranks, if somebody looks at them."""
        owe_steps(-1)
        trains = self._phase is Phase.TRAIN_BATCH
        if not self.shares_logs:
            return self.logs.last(trains, logs)
        self.shares_logs = False
        metrics = metrics_of_all(self.model, self.ranks, lambda: pythonify_logs(self.model.get_metrics_result()))
        if not isinstance(logs, dict) or metrics.keys() != logs.keys():
            return self.mean_logs(logs)
        self.logs.show(trains, metrics)
        return metrics

    @torch.compiler.disable
    @torch.no_grad()
    def rows_of_all(self, outputs: Any, rows: Sequence[int]) -> Any:
        """What the ranks have predicted for their parts of a batch, in the order of its rows."""
        assert self.ranks is not None
        owe_steps(-1)  # from here on ranks send nothing without a message
        mine = rows[self.ranks.replica_id]
        given = max(mine, 1)  # one to go through the model with
        tensors = [keras.ops.convert_to_tensor(leaf).detach() for leaf in keras.tree.flatten(outputs)]
        # One output may have several rows for each row of the batch.
        factors = [
            tensor.shape[0] // given if tensor.dim() and not tensor.shape[0] % given else 0 for tensor in tensors
        ]
        kinds = [(tuple(t.shape[1:]), t.dtype, factor) for t, factor in zip(tensors, factors)]
        told = self.exchange(Phase.PREDICTED, int(all(factors)), zlib.crc32(repr(kinds).encode()))
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
            part = _bytes(tensor[: mine * factor])
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

    def end_epoch(self) -> None:
        """Ends an epoch on all ranks together, each of which says what it has promised and done.

        Raises:
            ValueError: on every rank, if they have done different things.
        """
        told = self.exchange(Phase.END_OF_EPOCH, self._unsaid.num_batches, self._unsaid.mark)
        nums = [num for num, _ in told]
        if len(set(nums)) > 1:
            raise ValueError(
                "All ranks must go through equally many batches of an epoch. "
                f"Received: {nums} since they last compared them, by rank. Let what stops training or a test depend on "
                "the logs, which are equal on all ranks."
            )
        check_batches([(num, mark) for num, mark in told], self._step, self._step + 1 - self._unsaid.num_batches)
        self._unsaid.are_said(0)

    def begin_epoch(self) -> None:
        """Lets go of what is promised."""
        self._unsaid.are_said(_NOTHING_YET)

    def any_batch(self, data: Any) -> Any:
        """`data`, or where this rank has none (None) that of another rank."""
        has_data = [has for has, _ in self.exchange(Phase.BUILD, data is not None)]
        if not any(has_data):
            raise ValueError("`x` must have a batch on some rank. Received: none on any.")
        return data if all(has_data) else self._given(data, has_data)

    def forget_batches(self) -> None:
        """Lets go of batches, which need not look like those of another call."""
        self._last_batch.clear()
        self.mine = self._told = self._waits = None

    def _given(self, data: Any, owners: Sequence[int]) -> Any:
        """What the first rank that has something gives to all."""
        assert self.ranks is not None
        return self.ranks.broadcast_object(data, next(rank for rank, has in enumerate(owners) if has))


_MOST_PROMISED = 32
"""One more than the most batches that are promised."""

_NOTHING_YET = -1
"""What was promised last where an epoch begins, of which the first batch stands alone."""


class _Unsaid:
    """The batches since the last message, which the next one stands for; and those that the last one has promised."""

    def __init__(self) -> None:
        self.num_batches = 0
        self.mark = 0
        """A checksum of their numbers of rows and of their values."""
        self._num_promised = 0
        self._num_last = _NOTHING_YET
        self._since = time.monotonic()

    def add(self, num_rows: int, print_: int) -> None:
        """One more batch. What each rank has of its own (`print_` is 0) may differ."""
        self.num_batches += 1
        if print_:
            self.mark = zlib.crc32(repr((num_rows, print_)).encode(), self.mark)

    def is_promised(self) -> bool:
        """Whether this batch has been promised by all ranks."""
        if not self._num_promised:
            return False
        self._num_promised -= 1
        return True

    def can_promise(self, num_alike: int, seconds: float) -> int:
        """How many batches this rank promises: four times as many each time, for some seconds."""
        if num_alike <= 0 or not can_promise():
            return 0
        now = time.monotonic()
        of_one, self._since = (now - self._since) / self.num_batches, now
        wanted = min(num_alike, 4 * self._num_last + 3, int(seconds / max(of_one, 1e-6)), _MOST_PROMISED - 1)
        return max(wanted, 0)

    def are_said(self, num_promised: int) -> None:
        """All that was is said; these are promised."""
        self.num_batches = self.mark = 0
        before, self._num_promised, self._num_last = self._num_promised, max(num_promised, 0), num_promised
        owe_steps(self._num_promised - before)


running: contextvars.ContextVar[Session | None] = contextvars.ContextVar("running", default=None)


def session_of(model: Any) -> Session:
    """That of a prepared model."""
    session: Session = vars(model)[SESSION]
    return session


@contextlib.contextmanager
def run_of(session: Session | None) -> Iterator[None]:
    """Within it batches are those that all ranks agree on (None: each rank's own)."""
    token = running.set(session)
    try:
        yield
    finally:
        running.reset(token)


@torch.no_grad()
def metrics_of_all(model: Any, ranks: TorchProcessGroup, result: Callable[[], Any]) -> Any:
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
