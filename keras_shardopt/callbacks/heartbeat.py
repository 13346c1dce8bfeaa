"""A callback that writes the step of each process to a file, and the stacks of a process that hangs."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
import threading
import time
import traceback
from typing import Any

import keras

from keras_shardopt import arguments as check
from keras_shardopt.backends import jobs
from keras_shardopt.backends.active import processes

_SECONDS = 1.0
"""The shortest time in seconds between two openings of files, because opening is slow on network file systems."""

_NUM_BYTES = 120
"""The length of the line in a file, so that a shorter line replaces all of a longer one."""

_STANDARD_ERROR = 2


class Heartbeat(keras.callbacks.Callback):
    """Writes the step of each process (rank) to a file, and the stacks of a process that hangs.

    Each rank replaces the line in its file `rank-<number>.json` at every step, and every batch of validation:
    `{"rank": 1, "epoch": 2, "step": 104, "phase": "training", "time": "2026-03-01T12:30:59"}`. The step is the running
    one, counted from 1 in each epoch. The phases are "start", "training", "validation", "epoch end" and "ended".

    If no step begins for `timeout` seconds, the rank writes the Python stacks of all its threads. They show the line
    that hangs, and on the other ranks the call that waits for it. A call that holds Python's global interpreter lock
    prevents this. Training can continue afterwards. To end a hung job, use
    [the launcher's `--watch`](../processes.md#hung), which needs only `Heartbeat()` in the program. Without this
    launcher, `Heartbeat()` without arguments has no effect.

    Args:
        directory: path or None (default). A directory for the files of all ranks. It is created if missing.
        timeout: float > 0 or None (default). Seconds without a step until a rank writes its stacks, to
            `rank-<number>.stacks` in `directory`, or to its standard error if there is none. It must be longer than the
            slowest step, which compiles, and than the callbacks between two epochs.

    Raises:
        TypeError, ValueError: if an argument is not as above.
        OSError: when training begins, if the directory is not writable.

    Example:
        >>> import keras, numpy as np, pathlib, tempfile, keras_shardopt as ks
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(ks.CrossShard("sgd"), "mse")
        >>> directory = pathlib.Path(tempfile.mkdtemp())
        >>> heartbeat = ks.callbacks.Heartbeat(directory, timeout=600)
        >>> history = model.fit(np.ones((8, 4)), np.ones((8, 1)), callbacks=[heartbeat], verbose=0)
        >>> (directory / "rank-0.json").read_text()[:52]
        '{"rank": 0, "epoch": 1, "step": 1, "phase": "ended",'

    References:
        `faulthandler.dump_traceback_later` of Python has the same purpose. It can crash a process that is only slow,
        because it reads stacks that change meanwhile. A thread of this callback reads them with Python's lock instead.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None, timeout: float | None = None) -> None:
        super().__init__()
        self.directory = None if directory is None else check.local_path("directory", directory, "directory")
        self.timeout = None if timeout is None else check.number("timeout", timeout, above=0.0, fix="Pass seconds.")
        self._epoch = self._step = 0
        self._is_training = False
        self._due = self._last = 0.0
        self._watch: threading.Thread | None = None
        self._has_ended = threading.Event()
        self._names: list[str] = []
        self._files: list[int] = []
        self._stacks = _STANDARD_ERROR

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Writes the first line, and starts the timer that detects a hang."""
        self._end()  # end an earlier `fit` that raised an error
        self._rank = processes.process()[1]
        given = (self.directory, os.environ.get(jobs.HEARTBEATS))
        self._names = [os.path.join(os.path.abspath(each), f"rank-{self._rank}") for each in given if each]
        for name in self._names:
            os.makedirs(os.path.dirname(name), exist_ok=True)
        self._open()  # if the directory is not writable, fail now, not after many steps
        if self.directory is not None and self.timeout is not None:
            self._stacks = os.open(f"{self._names[0]}.stacks", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._epoch = self._step = 0
        self._is_training, self._due = True, 0.0
        self._beat("start")
        if self.timeout is not None:
            self._has_ended.clear()
            self._watch = threading.Thread(target=self._watch_steps, args=(self.timeout,), daemon=True)
            self._watch.start()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes the number of the epoch that begins."""
        self._epoch, self._step = epoch + 1, 0
        self._beat("training")

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes the number of the step that begins."""
        self._step = batch + 1
        self._beat("training")

    def on_test_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes that a validation is running, and starts the timer again."""
        self._beat("validation")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes that the steps of the epoch have ended."""
        self._beat("epoch end")

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Writes that training has ended, and stops the timer."""
        self._beat("ended")
        self._end()

    def _beat(self, phase: str) -> None:
        self._last = now = time.monotonic()
        if not self._is_training or not self._names:
            return  # outside of `fit`, or without a file to write
        if now >= self._due:
            self._due = now + _SECONDS
            with contextlib.suppress(OSError):
                self._open()
        line = {"rank": self._rank, "epoch": self._epoch, "step": self._step, "phase": phase}
        text = json.dumps({**line, "time": time.strftime("%Y-%m-%dT%H:%M:%S")}).ljust(_NUM_BYTES - 1) + "\n"
        with contextlib.suppress(OSError):  # a full disk must not end a training
            for file in self._files:
                os.pwrite(file, text.encode(), 0)

    def _watch_steps(self, timeout: float) -> None:
        written = None
        while not self._has_ended.wait(min(_SECONDS, timeout / 4)):
            last = self._last
            if time.monotonic() - last > timeout and last != written:
                written = last
                with contextlib.suppress(OSError):
                    os.write(self._stacks, _stacks_of_threads(timeout).encode())

    def _open(self) -> None:
        self._close()  # a network file system now sends the lines of the last second to other machines
        for name in self._names:
            self._files.append(os.open(f"{name}.json", os.O_WRONLY | os.O_CREAT, 0o666))

    def _close(self) -> None:
        while self._files:
            os.close(self._files.pop())

    def _end(self) -> None:
        if self._watch is not None:
            self._has_ended.set()
            self._watch.join()
            self._watch = None
        self._is_training = False
        self._close()
        if self._stacks != _STANDARD_ERROR:
            is_empty = os.fstat(self._stacks).st_size == 0
            os.close(self._stacks)
            self._stacks = _STANDARD_ERROR
            if is_empty:
                pathlib.Path(f"{self._names[0]}.stacks").unlink(missing_ok=True)


def _stacks_of_threads(seconds: float) -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [f"No step for {seconds:g} s, at {time.strftime('%Y-%m-%dT%H:%M:%S')}\n"]
    for ident, frame in sys._current_frames().items():
        parts += [f"\nThread {names.get(ident, ident)}:\n", *traceback.format_stack(frame)]
    return "".join([*parts, "\n"])
