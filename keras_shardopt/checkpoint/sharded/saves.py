"""Saves of sharded checkpoints: one folder per save, and the threads that write it.

A directory holds folders `<number>-step-<step>-<token>`. The number is one more than the largest in the directory, so
it orders saves without clocks, even if training starts anew at step 0. The token is random, so two jobs, or a job and
its restart, never write to the same folder. Processes do not communicate while threads write: process 0 waits until the
folder has the report of each process, then writes the manifest.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import shutil
import threading
import time
from typing import Any

import keras

from keras_shardopt.backends import stored_parts
from keras_shardopt.backends.active import processes
from keras_shardopt.backends.models import optimizers_of
from keras_shardopt.backends.phases import timed
from keras_shardopt.backends.user_warnings import warn
from keras_shardopt.checkpoint.sharded.pieces import (
    MANIFEST,
    Checkpoint,
    report_path,
    write_manifest,
    write_process,
)
from keras_shardopt.checkpoint.sharded.state import about_model, about_process, sources_of
from keras_shardopt.checkpoint.together import communicating, from_rank_0, raising_together
from keras_shardopt.checkpoint.training_state import before_reading, is_inside_window

WAIT_SECONDS = 600.0
"""The time that process 0 waits for the reports of the other processes."""

ABANDONED_SECONDS = 3600.0
"""An unfinished save of another job is deleted when it is older than this."""

_POLL_SECONDS = 0.02

_FOLDER = re.compile(r"(\d+)-step-(\d+)-[0-9a-f]{8}")


class Save:
    """A save in progress, created by all processes together. The constructor copies this process's part of the state.

    Args:
        model: the model.
        directory: str. Created if missing. All processes must have access to it.
        about: values to store in the manifest. They must be JSON-serializable.
        keeps_buffers: bool. True keeps the host memory for the next save, until `stored_parts.free_buffers`.

    Raises:
        OSError: on every process, if the directory cannot be written to or a process has no access to it.
    """

    def __init__(self, model: Any, directory: str, about: dict[str, Any], keeps_buffers: bool = False) -> None:
        self._model = model
        self._keeps_buffers = keeps_buffers
        self._problem: Exception | None = None
        self._is_stopped = threading.Event()
        with communicating(model):
            self._begin(os.path.abspath(directory), about)
        self._about_process = about_process()
        self._thread = threading.Thread(target=self._write, name="keras_shardopt-checkpoint", daemon=True)
        self._thread.start()

    @timed("saving")
    def _begin(self, directory: str, about: dict[str, Any]) -> None:
        self._process = processes.process()
        step = step_of_model(self._model)
        if is_inside_window(self._model):
            warn(
                "A checkpoint does not store gradients that are accumulated for the next update, so training restored "
                f"from this checkpoint will differ. Received: a checkpoint after {step} updates and some "
                "micro-batches. Save right after an update: updates come every `gradient_accumulation_steps` batches."
            )
        self.folder: str = os.path.join(directory, from_rank_0(lambda: _new_folder(directory, step)))
        try:
            with raising_together():
                if not _is_visible(self.folder):
                    raise OSError(
                        f"All processes must have access to the same directory. Received: {directory!r}, but process "
                        f"{self._process[1]} cannot find {os.path.basename(self.folder)!r} of process 0 there."
                    )
            with raising_together():
                before_reading(self._model)
                self._sources = sources_of(self._model, self._process)
        except Exception:
            if self._process[1] == 0:
                delete(self.folder)
            raise
        self._about = {
            "step": step,
            "num_processes": self._process[0],
            "keras": keras.version(),
            **about,
            **about_model(self._model),
            "config": _config(self._model) if self._process[1] == 0 else None,
        }

    @timed("saving")
    def check(self, wait: bool) -> bool:
        """Return whether all processes have finished the save. All processes must call this.

        Args:
            wait: whether to wait until the save is complete.

        Raises:
            OSError: on every process, if one process could not write. Then the folder of this save is deleted.
        """
        with communicating(self._model):
            return self._check(wait)

    def _check(self, wait: bool) -> bool:
        while True:
            is_done = not self._thread.is_alive()
            gathered = processes.gather_objects((is_done, None if self._problem is None else str(self._problem)))
            failed = [(index, words) for index, (_, words) in enumerate(gathered) if words is not None]
            if failed:
                self._fail(*failed[0])
            if all(done for done, _ in gathered):
                return True
            if not wait:
                return False
            self._thread.join(_POLL_SECONDS)

    def _fail(self, index: int, words: str) -> None:
        self._is_stopped.set()
        self._thread.join()
        processes.gather_objects(None)  # wait until no process writes to the folder
        if self._process[1] == 0:
            delete(self.folder)
        if self._problem is not None and index == self._process[1]:
            raise self._problem
        raise OSError(f"Process {index} could not save its part of the checkpoint: {words}")

    def _write(self) -> None:
        num_processes, index = self._process
        try:
            write_process(self.folder, index, self._sources, self._about_process)
            if self._keeps_buffers:
                stored_parts.reuse(part for source in self._sources.values() for part in source.own.parts)
            self._sources = {}  # frees the copies of the state, unless `reuse` keeps them
            if index == 0:
                self._await_reports(num_processes)
                write_manifest(self.folder, num_processes, self._about)
        except Exception as error:
            self._problem = error

    def _await_reports(self, num_processes: int) -> None:
        missing = set(range(num_processes))
        end = time.monotonic() + WAIT_SECONDS
        while missing := {index for index in missing if not os.path.exists(report_path(self.folder, index))}:
            if self._is_stopped.wait(_POLL_SECONDS):
                raise OSError("The save was stopped, because another process could not save its part.")
            if time.monotonic() > end:
                raise OSError(
                    f"Process 0 waited {WAIT_SECONDS:.0f} s for the files of processes {sorted(missing)} in "
                    f"{self.folder!r}. Check that all processes write to the same file system."
                )


# -- folders ---------------------------------------------------------------------------------------------------------


def complete_saves(directory: str) -> list[str]:
    """Return the folders of complete checkpoints in a directory, in the order in which they were begun."""
    return [folder for folder in _saves(directory) if is_complete(folder)]


def incomplete_saves(directory: str) -> list[str]:
    """Return the folders of saves that are in progress, or were never finished."""
    return [folder for folder in _saves(directory) if not is_complete(folder)]


def newest(path: str) -> Checkpoint:
    """Return the checkpoint in the folder `path`, or the newest complete one if `path` holds such folders.

    Raises:
        FileNotFoundError: if there is no complete checkpoint.
        OSError: if the checkpoint is damaged.
    """
    folders = [path] if is_complete(path) else complete_saves(path)
    if not folders:
        raise FileNotFoundError(f"`path` must have a complete sharded checkpoint. Received: path={path!r}")
    return Checkpoint(folders[-1])


def delete(folder: str) -> None:
    """Delete a checkpoint, its manifest first: if this fails midway, the rest does not count as a checkpoint."""
    with contextlib.suppress(OSError):
        os.remove(os.path.join(folder, MANIFEST))
    shutil.rmtree(folder, ignore_errors=True)


def delete_abandoned(directory: str) -> None:
    """Delete old unfinished saves of killed jobs. The clock of the file system measures their age."""
    with contextlib.suppress(OSError):
        probe = os.path.join(directory, f".now-{secrets.token_hex(4)}")
        with open(probe, "w"):
            now = os.stat(probe).st_mtime
        os.remove(probe)
        for folder in incomplete_saves(directory):
            if now - _time_of(folder) > ABANDONED_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _saves(directory: str) -> list[str]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        names = [name for name in os.listdir(directory) if _FOLDER.fullmatch(name)]
        return [os.path.join(directory, name) for name in sorted(names, key=lambda name: (_numbers_in(name), name))]
    return []


def _new_folder(directory: str, step: int) -> str:
    os.makedirs(directory, exist_ok=True)
    number = max((_numbers_in(folder)[0] for folder in _saves(directory)), default=0) + 1
    name = f"{number:06d}-step-{step}-{secrets.token_hex(4)}"
    os.mkdir(os.path.join(directory, name))
    return name


def _is_visible(folder: str) -> bool:
    """Whether this process can find a folder of process 0. Waits a while, because network file systems are slow."""
    for _ in range(50):
        if os.path.isdir(folder):
            return True
        time.sleep(0.1)
    return False


def is_complete(folder: str) -> bool:
    """Whether a folder is a complete checkpoint, with a manifest."""
    return os.path.exists(os.path.join(folder, MANIFEST))


def step_of(folder: str) -> int:
    """Return the step in the name of a save's folder."""
    return _numbers_in(folder)[1]


def _numbers_in(folder: str) -> tuple[int, int]:
    """Return the number and the step in the name of a save's folder."""
    number, step = _FOLDER.fullmatch(os.path.basename(folder)).groups()  # type: ignore[union-attr]
    return int(number), int(step)


def _time_of(folder: str) -> float:
    with contextlib.suppress(FileNotFoundError):  # meanwhile, a job can rename or delete a file
        return max([os.stat(folder).st_mtime, *(entry.stat().st_mtime for entry in os.scandir(folder))])
    return math.inf


def step_of_model(model: Any) -> int:
    """Return the largest number of updates of a model's optimizers."""
    counts = [int(keras.ops.convert_to_numpy(o.iterations)) for o in optimizers_of(model) if o.built]
    return max(counts, default=0)


def _config(model: Any) -> Any:
    """Return the serialized model, which `consolidate` needs for a '.keras' file; None if Keras cannot serialize it."""
    try:
        config = keras.saving.serialize_keras_object(model)
        json.dumps(config)
        return config
    except Exception:
        return None
