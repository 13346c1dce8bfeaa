"""A callback that measures the phases of training steps, and names the slow process of a job."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from keras_shardopt import arguments as check
from keras_shardopt.backends import for_backend
from keras_shardopt.backends.active import processes, runtime
from keras_shardopt.backends.models import is_prepared
from keras_shardopt.backends.phases import Recorder, timed
from keras_shardopt.backends.user_warnings import warn
from keras_shardopt.callbacks import slow_ranks, trace_summary
from keras_shardopt.callbacks.forward_passes import ForwardPasses
from keras_shardopt.callbacks.slow_ranks import OWN, PHASES, PROBES, Slow
from keras_shardopt.callbacks.trace_summary import StepTrace, end_running_traces
from keras_shardopt.checkpoint.together import raising_together
from keras_shardopt.classic.summaries.event_file import checked_log_dir, event_writer

# The backend's functions that time a message to process 0, start the framework's profiler, and read its trace.
_measuring: Any = for_backend(
    {name: f"keras_shardopt.backends.{name}.measuring" for name in ("tensorflow", "jax", "torch")}
)

_NUM_UNMEASURED = 3
"""The number of steps at the start of a `fit` that are not measured, because they compile."""


class StepReport(keras.callbacks.Callback):
    """Measures the phases of training steps, and names the slow process (rank).

    All processes wait for the slowest one in each step, so their steps take equally long. This callback measures the
    time that each process spends in each phase:

    | phase | time |
    |---|---|
    | input | loading batches (on PyTorch without `prepare(model)`, this counts as callbacks) |
    | step | forward and backward pass; on JAX and TensorFlow the whole compiled step, with its exchange |
    | updating | on PyTorch, updates of weights |
    | callbacks | callbacks, and the loop of Keras |
    | saving | checkpoints and backups |
    | waiting | for slower processes |
    | sending | exchanges between processes, without that wait |

    After each epoch, process 0 prints two lines: the shares of these phases, and a comparison of processes. The time of
    validation does not count. A warning names a slow process and its slow phase, once per `fit`.

    Compiled steps and GPUs hide their phases. With them, each process also times forward passes of
    `model.predict_on_batch` in each window, if the model has one input of known shape and no stateful RNN. To find a
    slow network, each process times messages to process 0. This needs three or more processes, and does not find
    process 0. If `steps_per_execution` is above 1, an execution counts as one batch. See
    [which rank is slow](../slow_rank.md).

    Args:
        every: int >= 5 (default 100). Number of batches per window. Processes exchange their times once per window.
        to: path or None (default). A JSON-lines file for `plot_step_report`: process 0 appends a line per window.
        log_dir: path or None (default). A folder for TensorBoard scalars of process 0. Needs `tensorboardX`.
        threshold: float > 0 (default 0.1). A process is slow if its extra time in a phase exceeds this part of a step.
        windows: int >= 1 (default 3). The number of successive windows to compare.
        profile_step: int >= 1 or None (default). The batch of `fit`, counted from 1, that the framework's profiler
            records. Each process writes a trace to the folder `<to>.trace/rank-<number>`. After the epoch, process 0
            prints how much of that step is computing, exchange between processes, copies between host and device, and
            idle, and the operations that take longest. It also writes `<to>.trace/summary.json`.

    Raises:
        TypeError, ValueError: if an argument is not as above, or `profile_step` lacks `to`; when training begins, if
            several processes train a model that is not prepared.
        ImportError: when training begins, if `log_dir` is set and `tensorboardX` is not installed.

    Example:
        >>> import keras, numpy as np, keras_shardopt as ks
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(ks.CrossShard("sgd"), "mse")
        >>> report = ks.callbacks.StepReport(every=10)
        >>> x, y = np.ones((64, 4)), np.ones((64, 1))
        >>> history = model.fit(x, y, batch_size=2, callbacks=[report], verbose=0)  # doctest: +SKIP
        StepReport, epoch 1: 0.8 ms per step: input 9%, step 82%, callbacks 9%.
        StepReport, epoch 1: One process, so no other to compare with.

    References:
        TraceML compares ranks by their own time too.
    """

    def __init__(
        self,
        every: int = 100,
        to: str | os.PathLike[str] | None = None,
        log_dir: Any = None,
        threshold: float = 0.1,
        windows: int = 3,
        profile_step: int | None = None,
    ) -> None:
        checked_log_dir(log_dir)
        super().__init__()
        self.every = check.integer("every", every, at_least=5, fix="Pass a number of batches.")
        self.to = None if to is None else check.local_path("to", to)
        self.log_dir = log_dir
        self.threshold = check.number("threshold", threshold, above=0.0, fix="Pass a fraction of a step, such as 0.1.")
        self.windows = check.integer("windows", windows, fix="Each window has `every` batches.")
        if profile_step is not None:
            profile_step = check.integer("profile_step", profile_step, fix="Batches count from 1.")
            if to is None:
                raise ValueError(f"`profile_step` needs the path `to`. Received: profile_step={profile_step}, to=None")
        self.profile_step = profile_step
        # The steps to wait for, because steps that run in the background must end before the profiler starts or stops.
        self._awaited = () if profile_step is None else (profile_step - 1, profile_step)
        self.slow: Slow | None = None
        """The slow process of the last `fit` (`rank`, `phase`, `seconds`, and the seconds of `others`), or None."""
        self._recorder = Recorder("callbacks")
        self._is_paused = False
        self._write: Callable[[dict[str, Any] | None, int], None] | None = None
        self._trace: StepTrace | None = None

    def set_model(self, model: Any) -> None:
        """Stores the model in another attribute, because on JAX, reading `self.model` copies the training state."""
        super().set_model(model)
        self._trained = model

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Starts to measure the phases of steps."""
        end_running_traces()
        self._is_shared = processes.process()[0] > 1 and processes.num_replicas() > 1
        if self._is_shared and not is_prepared(self._trained):
            raise ValueError(
                "On several processes, `StepReport` needs a model passed to `keras_shardopt.prepare`, because all "
                f"processes must make the same number of steps. Received: {self._trained!r}. Call "
                "`keras_shardopt.prepare(model)` before `fit`."
            )
        self._rank = processes.process()[1] if self._is_shared else 0
        weights = self._trained.trainable_variables[:1]
        self._is_compiled = any(runtime.version(weight) is None for weight in weights)
        self._is_hidden = self._is_compiled or not all(runtime.is_cheap_to_read(each.value) for each in weights)
        self._forward_passes = ForwardPasses(self._trained) if self._is_hidden else None
        self._timed: Any = None
        self._num_steps = self._num_in_window = self._most = 0
        self._tables: list[tuple[np.ndarray, int]] = []
        self._of_epoch: list[tuple[np.ndarray, int]] = []
        self.slow = self._trace = None
        with raising_together():
            if self.to is not None and self._rank == 0:
                open(self.to, "a", encoding="utf-8").close()  # fail now, not after many steps
            if self.log_dir is not None and self._rank == 0:
                self._write = event_writer(self.log_dir)
        self._recorder = Recorder("callbacks")
        self._recorder.start()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Ends a window of measured steps after `every` batches."""
        if not self._recorder.is_active():
            raise ValueError(
                "`fit` accepts only one `StepReport`. Received: two in `callbacks`. Remove one `StepReport`."
            )
        if self._timed is None or self._trained.train_function is not self._timed:
            self._timed = self._timing(self._trained.train_function)
            self._trained.train_function = self._timed
        self._end_trace()
        if self._num_steps == _NUM_UNMEASURED:
            self._recorder.stop()
            self._recorder.start()
            self._num_in_window = 0
        elif self._num_in_window == self.every:
            self._close_window()
        self._num_steps += 1
        self._num_in_window += 1
        if self._num_steps == self.profile_step:
            self._trace = StepTrace(_measuring, os.path.join(f"{self.to}.trace", f"rank-{self._rank}"))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Prints two lines about the epoch, and a summary of the traced step."""
        self._end_trace()
        if self._num_steps > _NUM_UNMEASURED and self._num_in_window:
            self._close_window()
        if self._of_epoch and self._rank == 0:
            tables, nums = zip(*self._of_epoch)
            mean, is_compared = np.average(tables, axis=0, weights=nums), len(self._tables) == self.windows
            for line in slow_ranks.summary(mean, self.slow, self._is_hidden, is_compared):
                print(f"StepReport, epoch {epoch + 1}: {line}", flush=True)
        self._of_epoch = []
        if self._trace is not None:
            mine: Any = self._trace.summary
            self._trace = None
            ranks = processes.gather_objects(mine) if self._is_shared else [mine]
            if self._rank == 0:
                for line in trace_summary.lines(self.profile_step or 0, ranks):
                    print(f"StepReport, epoch {epoch + 1}: {line}", flush=True)
                path = os.path.join(f"{self.to}.trace", "summary.json")
                with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:  # it is printed anyway
                    json.dump({"step": self.profile_step, "ranks": ranks}, file)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Pauses the measurement during a validation."""
        self._is_paused = self._recorder.is_active()
        if self._is_paused:
            self._end_trace()
            self._recorder.pause()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Continues the measurement after a validation."""
        if self._is_paused:
            self._recorder.start()
        self._is_paused = False

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Stops measuring, and restores the model's training function."""
        self._end_trace()
        if self.profile_step is not None and self._num_steps < self.profile_step:
            warn(
                "`profile_step` is after the last step of `fit`. Received: "
                f"profile_step={self.profile_step}, with {self._num_steps} steps"
            )
        self._recorder.stop()
        if self._timed is not None and self._trained.train_function is self._timed:
            self._trained.train_function = self._timed.real
        if self._write is not None:
            self._write(None, 0)
        self._write = self._timed = None

    def _end_trace(self) -> None:
        if self._trace is not None and self._trace.summary is None:
            self._recorder.pause()  # a trace can take seconds to write and to read
            self._trace.end()
            self._recorder.start()

    def _timing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls the training function `real`, and measures its phases."""
        real = getattr(real, "real", real)  # unwrap `real` if an earlier `fit` ended before `on_train_end`
        waits = self._is_compiled and self._is_shared
        takes_batch = self._trained.steps_per_execution == 1  # otherwise a compiled loop takes several batches

        @timed("step")
        def measured(*args: Any) -> Any:
            *state, data = args
            if takes_batch and hasattr(data, "__next__"):  # `data` is an iterator on JAX and TensorFlow
                with timed("input"):
                    data = itertools.chain([next(data)], _timed_input(data))
            found = real(*state, data)
            # Waiting costs nothing if all processes wait before the next step.
            if waits or self._num_steps in self._awaited:
                keras.tree.map_structure(keras.ops.convert_to_numpy, found[0] if state else found)
            return found

        def train_function(*args: Any) -> Any:
            return measured(*args) if self._recorder.is_active() else real(*args)

        train_function.real = real  # type: ignore[attr-defined]
        return train_function

    def _close_window(self) -> None:
        """Exchange the times of the last steps. All processes call this together, and find the same slow process."""
        seconds, num = self._recorder.stop(), self._num_in_window
        mine = [*[seconds.get(phase, 0.0) / num for phase in (*OWN, "waiting")], 0.0, 0.0]
        if self._is_shared:
            if self._forward_passes is not None:
                mine[-2] = self._forward_passes.seconds(self.model)
            mine[-1] = min(_measuring.seconds_of_message() for _ in range(3))
        mine_and_host = mine, socket.gethostname()
        rows, hosts = zip(*(processes.gather_objects(mine_and_host) if self._is_shared else [mine_and_host]))
        table = slow_ranks.table_of(rows)
        self._of_epoch.append((table, num))
        self._most = max(self._most, num)
        if num >= self._most // 2:  # ignore the short last window of an epoch
            self._tables = [*self._tables, (table, num)][-self.windows :]
        if self.slow is None and len(self._tables) == self.windows:
            remote = [rank for rank, host in enumerate(hosts) if host != hosts[0]]
            self.slow = slow_ranks.slowest([each for each, _ in self._tables], self.threshold, self._is_hidden, remote)
            if self.slow is not None:
                warn(f"All ranks wait for the slowest rank in each step. Received: {self.slow}. {self.slow.fix}")
        if self._rank == 0:
            self._write_window(table, num)
        self._num_in_window = 0
        self._recorder.start()

    def _write_window(self, table: np.ndarray, num: int) -> None:
        if self.to is not None:
            ranks = [dict(zip((*PHASES, *PROBES), row)) for row in (1e3 * table).round(4).tolist()]
            slow = None if self.slow is None else {**self.slow._asdict(), "words": str(self.slow)}
            line = {"step": self._num_steps, "num_steps": num, "ranks": ranks, "slow": slow}
            with open(self.to, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        if self._write is not None:
            tags = {f"StepReport/{name}_ms": 1e3 * value for name, value in zip(PHASES, table.mean(axis=0))}
            own = {f"StepReport/own_ms/rank_{i}": 1e3 * s for i, s in enumerate(slow_ranks.own_seconds(table))}
            self._write({**tags, **own}, self._num_steps)


def _timed_input(batches: Iterator[Any]) -> Iterator[Any]:
    while True:
        with timed("input"):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch
