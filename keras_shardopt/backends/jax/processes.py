"""The processes of JAX programs, and their distributions.

Private names of Keras touched here (a test holds each of them):
    `keras.src.backend.jax.trainer` - the module whose `predict` asks for `DataParallel.auto_shard_dataset`.

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

from keras_shardopt.backends.jax.communicator import batch_size_of, spans_processes
from keras_shardopt.backends.keras_callers import is_running
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
    """JAX: replicas are devices of one program, in one process or several."""

    def __init__(self) -> None:
        # That of `data_parallel`.
        self._opened: keras.distribution.DataParallel | None = None

    needs_initial_broadcast = True

    def creates_variables_collectively(self) -> bool:
        return spans_processes(batch_size_of(keras.distribution.distribution()))

    def num_replicas(self) -> int:
        return batch_size_of(keras.distribution.distribution())

    def barrier(self, purpose: str, seconds: float, advice: str) -> None:
        if jax.process_count() > 1:
            wait_in(_Store(), self.process(), "process", purpose, seconds, advice)

    def versions(self) -> dict[str, str]:
        return {"JAX": jax.__version__}

    def process(self) -> tuple[int, int]:
        return jax.process_count(), jax.process_index()

    @contextlib.contextmanager
    def open(self, num_replicas: int | None, timeout: datetime.timedelta | None = None) -> Iterator[World]:
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
            # Each process feeds its own rows, on every backend alike, so Keras must not divide them once more.
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
    """Whether this is process 0, found without `jax.process_index`, which makes the devices."""
    if jax.distributed.is_initialized():
        return bool(distributed.global_state.process_id == 0)
    return os.environ.get("KERAS_DISTRIBUTION_PROCESS_ID", "0") == "0"


def _name(device: jax.Device) -> str:
    """The name of a device as in `keras.distribution.list_devices()`."""
    return f"{device.platform}:{device.id}"


def _check_can_open(before: Any, timeout: datetime.timedelta | None) -> None:
    # Not by `process_count`, which makes the devices.
    if timeout is not None and jax.distributed.is_initialized() and jax.process_count() > 1:
        raise ValueError(
            "`timeout` cannot be set here for several processes, because JAX has started them. "
            f"Received: timeout={timeout.total_seconds():g} s. Give it to JAX before: "
            "`jax.distributed.initialize(..., heartbeat_timeout_seconds=...)`."
        )
    if before is not None and not isinstance(before, keras.distribution.DataParallel):
        raise ValueError(
            "`data_parallel()` sets a distribution of its own, and the layouts of the active one would be lost. "
            f"Received: {before!r}. Leave `data_parallel()` out, as a `CrossShard` needs no more than the active "
            "distribution; or call `keras.distribution.set_distribution(None)` before."
        )


def _first_devices(num_replicas: int | None) -> list[Any]:
    """Return that many devices, or all. On CPU, make them if JAX has not started."""
    _make_cpu_devices(num_replicas)
    devices: list[Any] = keras.distribution.list_devices()
    if num_replicas is not None and num_replicas > len(devices):
        raise ValueError(
            f"`num_replicas` must be at most the number of devices. Received: num_replicas={num_replicas}, "
            f"devices={devices}. On CPU, enter `data_parallel(num_replicas={num_replicas})` before JAX makes its "
            "first array, or start Python with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={num_replicas}."
        )
    return devices[:num_replicas]


def _is_named_process() -> bool:
    """Whether this is one of the processes of a job that the variables of Keras name."""
    return {"KERAS_DISTRIBUTION_JOB_ADDRESSES", "KERAS_DISTRIBUTION_NUM_PROCESSES"} <= os.environ.keys()


def _initialize(num_replicas: int | None, timeout: datetime.timedelta | None) -> None:
    """Connects the processes of the job, as `keras.distribution.initialize()` does."""
    given = os.environ["KERAS_DISTRIBUTION_NUM_PROCESSES"]
    _make_cpu_devices(None if num_replicas is None else max(1, num_replicas // int(given)))
    in_jax = jax.distributed.initialize
    if timeout is not None:  # which Keras does not hand on
        seconds = max(1, round(timeout.total_seconds()))
        names = ("initialization_timeout", "heartbeat_timeout_seconds", "shutdown_timeout_seconds")
        jax.distributed.initialize = functools.partial(in_jax, **dict.fromkeys(names, seconds))
    try:
        with seeding_without_tensorflow():
            keras.distribution.initialize()
    except RuntimeError as error:
        if "before any JAX" not in str(error):
            raise
        raise RuntimeError(
            "The processes that KERAS_DISTRIBUTION_JOB_ADDRESSES names must be connected before JAX is used. Received: "
            "a `data_parallel()` after some array, variable or model was made. Enter `data_parallel()` first."
        ) from error
    finally:
        jax.distributed.initialize = in_jax


@functools.cache
def _leave_at_once_on_errors() -> None:
    """Lets a process with an uncaught error end, which JAX lets wait at its end, for minutes, until the others do."""
    in_python, statuses = sys.excepthook, list[int]()

    def hook(kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None) -> None:
        in_python(kind, error, traceback)
        statuses.append(130 if issubclass(kind, KeyboardInterrupt) else 1)

    def leave() -> None:
        if statuses:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            if jax.process_index() == 0:
                time.sleep(2)  # the others abort when it is gone, and may be about to say what went wrong there
            os._exit(statuses[0])

    sys.excepthook = hook
    atexit.register(leave)  # before JAX's, which was registered earlier


def tell(call: str, number: int = 0) -> list[int]:
    """Tells all processes what this one is about to do together with them, and a number.

    Args:
        call: what it does, in words that are equal where it is the same: "process 0 ...".
        number: int of 32 bits.

    Returns:
        The number of each process.

    Raises:
        ValueError: on every process, if some are about to do something else.
    """
    told = _gather(np.array([zlib.crc32(call.encode()) >> 1, number], "int32")).tolist()
    gather_letters = lambda letters: _gather(np.array(letters, "uint8")).tolist()  # noqa: E731
    check_same_calls([kind for kind, _ in told], call, gather_letters, "process")
    return [number for _, number in told]


def gather_objects(value: Any, call: str = "exchanges values") -> list[Any]:
    """What each process gives, whatever it is, in the order of their ids. `call` is as in `tell`."""
    if jax.process_count() == 1:
        return [value]
    # With one CPU device for each process, what is exchanged here from another thread can overtake a step that is still
    # running, in some processes only, and then one's numbers are taken for another's.
    jax.block_until_ready(jax.live_arrays())
    return gather_pickled(value, _gather, lambda length: tell(call, length))


def _gather(array: np.ndarray) -> np.ndarray:
    """An array of each process, along a new first dimension."""
    with naming_lost_processes():
        return np.asarray(multihost_utils.process_allgather(array)).reshape(-1, *array.shape)


@contextlib.contextmanager
def naming_lost_processes() -> Iterator[None]:
    """A block in which the error about a lost connection names the other processes, and the remedy."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # ValueError where `jit` finds a step in its cache
        num_processes, mine = processes.process()
        if num_processes == 1 or not _LOST_CONNECTION.match(str(error)):
            raise
        others = [str(process) for process in range(num_processes) if process != mine]
        raise RuntimeError(
            "All processes must take part in each step, and one of them is gone or stuck. Received: a failed exchange "
            f"of process {mine} with {plural('process') if len(others) > 1 else 'process'} {', '.join(others)}. The "
            "output of the process that ended first says why. Start the job again: with "
            "`keras_shardopt.callbacks.BackupAndRestore` training continues from its last backup. JAX's error is: "
            f"{str(error).strip().splitlines()[0]}"
        ) from error


# The beginnings of XLA's errors. RESOURCE_EXHAUSTED and the like are this process's own errors.
_LOST_CONNECTION = re.compile(
    "(UNAVAILABLE|DEADLINE_EXCEEDED): |(UNKNOWN|INTERNAL|ABORTED): .*(?i:gloo|nccl|connection)"
)


class _Store:
    """The store of JAX' coordinator."""

    def __init__(self) -> None:
        self._client: Any = distributed.global_state.client
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
    """A block in which `predict` gives every process the outputs of all."""
    token = _predicts_together.set(True)
    try:
        yield
    finally:
        _predicts_together.reset(token)


class _OverProcesses(keras.distribution.DataParallel):
    """Several processes; says what Keras cannot do there before Keras fails."""

    @property
    def auto_shard_dataset(self) -> bool:
        # The first thing that `predict` asks; later it has taken the weights out of the model.
        if is_running("predict", _KERAS_TRAINER) and not _predicts_together.get():
            raise RuntimeError(
                "`predict` must be that of a prepared model to run over several processes, with the same data on all "
                f"of them. Received: a distribution over {jax.process_count()} processes, and a model that is not "
                "prepared, a part of the data, `auto_shard=False` or `gather=False`. Call "
                "`keras_shardopt.prepare(model)`; or predict with a copy in one process: `weights = "
                "model.get_weights()`, close `data_parallel()`, then `copy = keras.models.clone_model(model)`, "
                "`copy.set_weights(weights)` and `copy.predict(x)`."
            )
        return False  # each process feeds its own rows


_KERAS_TRAINER = "keras.src.backend.jax.trainer"
MADE_HERE = "_keras_shardopt_made_here"


def _make_cpu_devices(num_replicas: int | None) -> None:
    # Where the user has decided in `XLA_FLAGS`, JAX refuses to be told twice.
    given = re.search(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    before = jax.config.jax_num_cpu_devices
    wanted = before if given or num_replicas is None else num_replicas
    # RuntimeError: JAX runs already, so what it has must do. Whether that is enough is checked by the caller.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", wanted)
        _give_threads(int(given[1]) if given else wanted)


def _give_threads(num_devices: int) -> None:
    """Lets XLA start enough threads for several devices on a few cores; the user's number stands."""
    # XLA's CPU client takes the size of its thread pool from PJRT_NPROC or else NPROC; else it has a thread for every
    # core, and at least one for every device. Who waits in a collective keeps a thread: where all of them wait, the
    # device that they wait for has none left, and after 40 s XLA aborts the process.
    wanted = max(16, 4 * num_devices)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if num_devices > 1 and cores < wanted and not {"NPROC", "PJRT_NPROC"} & os.environ.keys():
        os.environ["NPROC"] = str(wanted)
