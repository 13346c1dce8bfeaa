"""The processes of JAX jobs, and their distributions.

Private names of Keras touched here (a test checks that each exists):
    `keras.src.backend.jax.trainer` - the module with the `predict` that reads `DataParallel.auto_shard_dataset`.

Of JAX: `jax._src.distributed.global_state` - `client`, the store of a job of several processes, and `process_id`.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import datetime
import functools
import os
import re
import sys
import time
import types
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import keras
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils

from keras_shardopt.backends import jobs
from keras_shardopt.backends.jax.communicator import num_batch_shards, spans_processes
from keras_shardopt.backends.keras_callers import is_running
from keras_shardopt.backends.phases import timed
from keras_shardopt.backends.processes import (
    Processes,
    World,
    check_same_calls,
    gather_pickled,
    plural,
    seeding_without_tensorflow,
    wait_in,
)


class JaxProcesses(Processes):
    """Sets up the processes of a JAX job. Replicas are devices of one program, in one process or several."""

    def __init__(self) -> None:
        # The distribution that `data_parallel()` has set. None outside `data_parallel()`, and with only one replica.
        self._opened: keras.distribution.DataParallel | None = None

    needs_initial_broadcast = True

    def creates_variables_collectively(self) -> bool:
        return spans_processes(num_batch_shards(keras.distribution.distribution()))

    def num_replicas(self) -> int:
        return num_batch_shards(keras.distribution.distribution())

    def barrier(self, purpose: str, seconds: float, advice: str) -> None:
        if jax.process_count() > 1:
            wait_in(_Store(), self.process(), "process", purpose, seconds, advice)

    def versions(self) -> dict[str, str]:
        return {"JAX": jax.__version__}

    def process(self) -> tuple[int, int]:
        return jax.process_count(), jax.process_index()

    @contextlib.contextmanager
    def open(self, num_replicas: int | None, timeout: datetime.timedelta | None = None) -> Iterator[World]:
        if num_replicas != 1 and not jax.distributed.is_initialized():
            jobs.join("KERAS_DISTRIBUTION_PROCESS_ID", _variables_of)
        if _is_named_process() and not jax.distributed.is_initialized():
            _initialize(num_replicas, timeout)
            timeout = None
        before = keras.distribution.distribution()
        _check_can_open(before, timeout)
        devices = _first_devices(num_replicas)
        num_processes, process_id = self.process()
        if num_processes > 1:
            _leave_at_once_on_errors()
        distribution = None
        if len(devices) > 1:
            # Each process feeds its own rows on every backend, so Keras must not divide them again.
            kind = keras.distribution.DataParallel if num_processes == 1 else _OverProcesses
            distribution = kind(devices=devices, auto_shard_dataset=False)
            distribution.__dict__[MADE_HERE] = True
        keras.distribution.set_distribution(distribution)
        opened_before, self._opened = self._opened, distribution
        try:
            yield World(
                num_replicas=len(devices),
                replica_id=process_id * (len(devices) // num_processes),
                is_chief=process_id == 0,
                num_processes=num_processes,
                process_id=process_id,
                devices=[each for each in map(_name, jax.local_devices()) if each in devices],
                persists=True,
            )
        finally:
            self._opened = opened_before
            if keras.distribution.distribution() in (None, distribution):  # none after `clear_session`
                keras.distribution.set_distribution(before)

    def gather_objects(self, value: Any) -> list[Any]:
        return gather_objects(value)


processes = JaxProcesses()


def is_first() -> bool:
    """Return whether this is process 0. Avoids `jax.process_index`, which would create the devices."""
    if jax.distributed.is_initialized():
        return bool(distributed.global_state.process_id == 0)
    return os.environ.get("KERAS_DISTRIBUTION_PROCESS_ID", "0") == "0"


def _name(device: jax.Device) -> str:
    """Return the name of a device as in `keras.distribution.list_devices()`."""
    return f"{device.platform}:{device.id}"


def _check_can_open(before: Any, timeout: datetime.timedelta | None) -> None:
    # Check `is_initialized` first, because `process_count` would create the devices.
    if timeout is not None and jax.distributed.is_initialized() and jax.process_count() > 1:
        raise ValueError(
            "`timeout` cannot be set here for several processes, because JAX has already connected the processes. "
            f"Received: timeout={timeout.total_seconds():g} s. Set the time limit in JAX: "
            "`jax.distributed.initialize(..., heartbeat_timeout_seconds=...)`."
        )
    if before is not None and not isinstance(before, keras.distribution.DataParallel):
        raise ValueError(
            "`data_parallel()` sets its own distribution, so the layouts of the active distribution would be lost. "
            f"Received: {before!r}. Omit `data_parallel()`: `CrossShard` works with the active distribution. Or call "
            "`keras.distribution.set_distribution(None)` first."
        )


def _first_devices(num_replicas: int | None) -> list[Any]:
    """Return the first `num_replicas` devices, or all. Creates CPU devices if JAX has not started."""
    _make_cpu_devices(num_replicas)
    devices: list[Any] = keras.distribution.list_devices()
    if num_replicas is not None and num_replicas > len(devices):
        raise ValueError(
            f"`num_replicas` must be at most the number of devices. Received: num_replicas={num_replicas}, "
            f"devices={devices}. On CPU, enter `data_parallel(num_replicas={num_replicas})` before JAX makes its "
            "first array (in a notebook, restart the kernel first), or start Python with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={num_replicas}."
        )
    return devices[:num_replicas]


def _is_named_process() -> bool:
    """Return whether Keras' environment variables describe a job that this process belongs to."""
    return {"KERAS_DISTRIBUTION_JOB_ADDRESSES", "KERAS_DISTRIBUTION_NUM_PROCESSES"} <= os.environ.keys()


def _variables_of(task: jobs.Task) -> dict[str, str]:
    """Return the environment variables that connect this process to its job. Set CUDA_VISIBLE_DEVICES to its GPUs."""
    jobs.own_gpus(task)
    return {
        **jobs.all_gpus_for_jax(jobs.visible_gpus()),
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": f"{task.address}:{task.port}",
        "KERAS_DISTRIBUTION_NUM_PROCESSES": str(task.size),
        "KERAS_DISTRIBUTION_PROCESS_ID": str(task.rank),
    }


def _initialize(num_replicas: int | None, timeout: datetime.timedelta | None) -> None:
    """Connect the processes of the job, as `keras.distribution.initialize()` does."""
    given = os.environ["KERAS_DISTRIBUTION_NUM_PROCESSES"]
    _make_cpu_devices(None if num_replicas is None else max(1, num_replicas // int(given)))
    jax_initialize = jax.distributed.initialize
    if timeout is not None:  # set it in JAX, because Keras has no argument for it
        seconds = max(1, round(timeout.total_seconds()))
        names = ("initialization_timeout", "heartbeat_timeout_seconds", "shutdown_timeout_seconds")
        jax.distributed.initialize = functools.partial(jax_initialize, **dict.fromkeys(names, seconds))
    try:
        with seeding_without_tensorflow():
            keras.distribution.initialize()
    except RuntimeError as error:
        if "before any JAX" not in str(error):
            raise
        raise RuntimeError(
            "The processes in KERAS_DISTRIBUTION_JOB_ADDRESSES must be connected before JAX is used. Received: "
            "`data_parallel()` after an array, variable or model was created. Enter `data_parallel()` first."
        ) from error
    finally:
        jax.distributed.initialize = jax_initialize


@functools.cache
def _leave_at_once_on_errors() -> None:
    """Make an uncaught error end this process at once. JAX would wait, for minutes, until other processes end."""
    python_hook, statuses = sys.excepthook, list[int]()

    def hook(kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None) -> None:
        python_hook(kind, error, traceback)
        statuses.append(130 if issubclass(kind, KeyboardInterrupt) else 1)

    def leave() -> None:
        if statuses:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            if jax.process_index() == 0:
                time.sleep(2)  # other processes abort once process 0 ends, and may still have to print their errors
            os._exit(statuses[0])

    sys.excepthook = hook
    atexit.register(leave)  # the last registered handler runs first, so before JAX's


def announce(call: str, number: int = 0) -> list[int]:
    """Announce the next call to all processes, which must make the same call. Return each process's int32 `number`.

    `call` describes the call, such as "saves a model".

    Raises:
        ValueError: on every process, if the `call` of some processes differs.
    """
    gathered = _gather(np.array([zlib.crc32(call.encode()) >> 1, number], "int32")).tolist()
    gather_letters = lambda letters: _gather(np.array(letters, "uint8")).tolist()  # noqa: E731
    check_same_calls([kind for kind, _ in gathered], call, gather_letters, "process")
    return [number for _, number in gathered]


def gather_objects(value: Any, call: str = "exchanges values") -> list[Any]:
    """Return the picklable objects of all processes, in order. `call` is the purpose, such as "saves a model"."""
    if jax.process_count() == 1:
        return [value]
    # Wait for running steps. `gather_pickled` uses another thread. With one CPU device per process, its exchange could
    # overtake a step on some processes, and processes would then pair different collectives.
    jax.block_until_ready(jax.live_arrays())
    return gather_pickled(value, _gather, lambda length: announce(call, length))


def _gather(array: np.ndarray) -> np.ndarray:
    with timed("waiting"), naming_lost_processes():
        return np.asarray(multihost_utils.process_allgather(array)).reshape(-1, *array.shape)


@contextlib.contextmanager
def naming_lost_processes() -> Iterator[None]:
    """Replace errors about a lost connection by an error that lists the other processes and gives advice."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # a step cached by `jit` raises ValueError
        num_processes, mine = processes.process()
        if num_processes == 1 or not _LOST_CONNECTION.match(str(error)):
            raise
        others = [str(process) for process in range(num_processes) if process != mine]
        raise RuntimeError(
            "All processes must take part in each step, but at least one process is gone or stuck. Received: a failed "
            f"exchange of process {mine} with {plural('process') if len(others) > 1 else 'process'} "
            f"{', '.join(others)}. Read the output of the process that ended first for the cause. Restart the job: "
            "`keras_shardopt.callbacks.BackupAndRestore` resumes from the last backup. JAX's error is: "
            f"{str(error).strip().splitlines()[0]}"
        ) from error


# Matches XLA's messages about lost processes. Other messages, such as RESOURCE_EXHAUSTED, concern this process.
_LOST_CONNECTION = re.compile(
    "(UNAVAILABLE|DEADLINE_EXCEEDED): |(UNKNOWN|INTERNAL|ABORTED): .*(?i:gloo|nccl|connection)"
)


def coordinator() -> Any:
    """Return the client of JAX's coordinator, or None in a job of one process."""
    return distributed.global_state.client


class _Store:
    """The key-value store of JAX's coordinator, with the methods that `wait_in` calls."""

    def __init__(self) -> None:
        self._client = coordinator()
        self.set, self.delete_key = self._client.key_value_set, self._client.key_value_delete

    def check(self, keys: list[str]) -> bool:
        try:
            return all(self._client.blocking_key_value_get(key, _MILLISECONDS) for key in keys)
        except jax.errors.JaxRuntimeError:
            return False


_MILLISECONDS = 50


_predicts_together: contextvars.ContextVar[bool] = contextvars.ContextVar("predicts_together", default=False)


@contextlib.contextmanager
def predicting_together() -> Iterator[None]:
    """Make `predict` return the outputs of all processes in this block."""
    token = _predicts_together.set(True)
    try:
        yield
    finally:
        _predicts_together.reset(token)


class _OverProcesses(keras.distribution.DataParallel):
    """A distribution over several processes that raises an error with advice if Keras' `predict` would fail."""

    @property
    def auto_shard_dataset(self) -> bool:
        # Raise the error in this property, because Keras' `predict` reads it before it changes the model.
        if is_running("predict", _KERAS_TRAINER) and not _predicts_together.get():
            raise RuntimeError(
                "With several processes, `predict` needs the same data on every process, and a model passed to "
                f"`keras_shardopt.prepare`. Received: {jax.process_count()} processes, with a model that was not "
                "prepared, different data, `auto_shard=False` or `gather=False`. Call `keras_shardopt.prepare(model)`. "
                "Or predict with a copy in one process: `weights = model.get_weights()`, close `data_parallel()`, then "
                "`copy = keras.models.clone_model(model)`, `copy.set_weights(weights)` and `copy.predict(x)`."
            )
        return False  # each process feeds its own rows


_KERAS_TRAINER = "keras.src.backend.jax.trainer"
MADE_HERE = "_keras_shardopt_made_here"


def _make_cpu_devices(num_replicas: int | None) -> None:
    # If `XLA_FLAGS` sets the number of CPU devices, keep that number, because JAX rejects a second setting.
    given = re.search(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    before = jax.config.jax_num_cpu_devices
    wanted = before if given or num_replicas is None else num_replicas
    # If JAX is already running, this raises RuntimeError. The caller then checks the number of devices.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", wanted)
        _give_threads(int(given[1]) if given else wanted)


def _give_threads(num_devices: int) -> None:
    """Make XLA start enough threads for several devices on few cores, unless the user has set a number."""
    # PJRT_NPROC or NPROC sets XLA's number of CPU threads. The default is one per core, and at least one per device. A
    # device occupies a thread while it waits in a collective. If all threads wait for a device that has no thread, XLA
    # aborts the process after 40 s.
    wanted = max(16, 4 * num_devices)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if num_devices > 1 and cores < wanted and not {"NPROC", "PJRT_NPROC"} & os.environ.keys():
        os.environ["NPROC"] = str(wanted)
