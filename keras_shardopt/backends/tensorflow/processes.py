"""The processes of TensorFlow jobs, and their strategies.

Private names of Keras touched here (a test checks that each exists):
    `keras.src.backend.tensorflow.trainer` - the module whose calls of `strategy.reduce` make `fit` fail.

Of TensorFlow: `tensorflow.python.distribute.collective_all_reduce_strategy.CollectiveAllReduceExtended`, with
`_initialize_local_devices` - chooses the devices of a worker, at most one CPU device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import functools
import json
import os
import re
import types
import weakref
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy

from keras_shardopt.backends import jobs
from keras_shardopt.backends.keras_callers import caller_module
from keras_shardopt.backends.patches import install
from keras_shardopt.backends.phases import timed
from keras_shardopt.backends.processes import Processes, World, check_same_calls, gather_pickled
from keras_shardopt.backends.tensorflow.communicator import _process_of
from keras_shardopt.numerics import Optimizer


class TensorFlowProcesses(Processes):
    """Sets up the workers of a TensorFlow job. The devices of a `tf.distribute` strategy are the replicas."""

    num_replicas_of_last_scope: int = 1
    """The number of replicas of the last `data_parallel()` scope. 1 before the first scope, and after its `close()`."""

    def creates_variables_collectively(self) -> bool:
        return tf.distribute.has_strategy() and self.process()[0] > 1

    def num_replicas(self) -> int:
        return int(tf.distribute.get_strategy().num_replicas_in_sync)

    def versions(self) -> dict[str, str]:
        return {"TensorFlow": tf.__version__}

    def process(self) -> tuple[int, int]:
        if tf.distribute.has_strategy():
            return _process_of(tf.distribute.get_strategy().cluster_resolver)
        # Outside the strategy's scope, only TF_CONFIG identifies a worker.
        return _process_of(tf.distribute.cluster_resolver.TFConfigClusterResolver())

    @contextlib.contextmanager
    def open(self, num_replicas: int | None, timeout: datetime.timedelta | None = None) -> Iterator[World]:
        if tf.distribute.has_strategy():
            strategy = tf.distribute.get_strategy()
            if timeout is not None and _process_of(strategy.cluster_resolver)[0] > 1:
                raise ValueError(
                    "`timeout` cannot be set here for several processes, because the strategy has connected the "
                    f"processes. Received: timeout={timeout.total_seconds():g} s. Set the time limit before the "
                    "strategy is created: "
                    "`tf.config.experimental.configure_coordination_service(service_type='standalone', "
                    "heartbeat_timeout_in_ms=...)`, or pass "
                    "`tf.distribute.experimental.CommunicationOptions(timeout_seconds=...)` to the strategy."
                )
            if num_replicas not in (None, strategy.num_replicas_in_sync):
                raise ValueError(
                    "`num_replicas` must agree with the strategy of the open scope. "
                    f"Received: num_replicas={num_replicas}, strategy with {strategy.num_replicas_in_sync} replicas. "
                    "Omit `num_replicas`, or open `data_parallel()` outside `strategy.scope()`."
                )
            _make_trainer_raise(strategy)
            self.num_replicas_of_last_scope = strategy.num_replicas_in_sync
            yield dataclasses.replace(_world_of(strategy), forget=self._forget_scope)
            return
        if num_replicas != 1:
            jobs.join("TF_CONFIG", _variables_of)
        if self.process()[0] > 1:
            strategy = _workers_strategy(num_replicas, timeout)
            _make_trainer_raise(strategy)
            self.num_replicas_of_last_scope = strategy.num_replicas_in_sync
            with strategy.scope():
                yield dataclasses.replace(_world_of(strategy), forget=self._forget_scope)
            return
        devices = _devices(num_replicas)
        self.num_replicas_of_last_scope = len(devices)
        if len(devices) == 1:
            yield World(devices=[_name(devices[0].name)], forget=self._forget_scope)
            return
        strategy = _strategy_of(*(device.name for device in devices))
        with strategy.scope():
            yield dataclasses.replace(_world_of(strategy), forget=self._forget_scope)

    def _forget_scope(self) -> None:
        self.num_replicas_of_last_scope = 1

    def gather_objects(self, value: Any) -> list[Any]:
        return gather_objects(value)


processes = TensorFlowProcesses()


def announce(call: str, number: int = 0) -> list[int]:
    """Announce the next call to all workers, which must make the same call. Return each worker's 32-bit `number`.

    `call` describes the call, such as "saves a model".
    """
    strategy = tf.distribute.get_strategy()
    gathered = _gathered(strategy, np.array([zlib.crc32(call.encode()) >> 1, number])).tolist()
    gather_letters = lambda letters: _gathered(strategy, np.array(letters)).tolist()  # noqa: E731
    check_same_calls([kind for kind, _ in gathered], call, gather_letters, "process")
    return [number for _, number in gathered]


def gather_objects(value: Any, call: str = "exchanges values") -> list[Any]:
    """Return the picklable objects of all workers, in order. `call` describes the purpose, such as "saves a model"."""
    strategy = tf.distribute.get_strategy()
    if num_workers(strategy) == 1:
        return [value]

    def length_of(length: int) -> list[int]:
        with strategy.scope():  # `gather_pickled` calls this in a thread outside the scope
            return announce(call, length)

    return gather_pickled(value, functools.partial(_gathered, strategy), length_of)


@contextlib.contextmanager
def naming_workers(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Replace errors about a worker that does not answer by an error with the worker's address and advice."""
    try:
        yield
    except (tf.errors.AbortedError, tf.errors.DeadlineExceededError, tf.errors.UnavailableError) as error:
        me = processes.process()[1]
        named = {int(number) for number in re.findall(r"task:(\d+)", str(error))} - {me}
        if not named and "CoordinationService" not in str(error):
            raise
        addresses = [each for kind in strategy.cluster_resolver.cluster_spec().as_dict().values() for each in kind]
        missing = [f"worker {number} ({addresses[number]})" for number in sorted(named) if number < len(addresses)]
        who = ", ".join(missing) or f"worker 0 ({addresses[0]}), which monitors all workers,"
        raise RuntimeError(
            "All workers must take part in each step, but at least one worker is gone or stuck. Received: no answer "
            f"from {who} on worker {me} ({addresses[me]}). Read that worker's output for the cause. Restart the job: "
            "`keras_shardopt.callbacks.BackupAndRestore` resumes from the last backup. TensorFlow's error is: "
            f"{type(error).__name__}: {error}"
        ) from error


def _gathered(strategy: tf.distribute.Strategy, array: np.ndarray) -> np.ndarray:
    _, num_local = local_replicas(strategy)
    with timed("waiting"), strategy.scope():
        return gather(strategy, np.stack([array] * num_local))[0][::num_local]


def num_workers(strategy: tf.distribute.Strategy) -> int:
    """Return the number of processes of a strategy."""
    return _process_of(strategy.cluster_resolver)[0]


_num_replicas_when_made: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def optimizer_created(optimizer: Optimizer) -> None:
    """Record the number of replicas for which an optimizer is created, and install the detection of divided losses."""
    strategy = tf.distribute.get_strategy()
    _num_replicas_when_made.setdefault(optimizer, int(strategy.num_replicas_in_sync))
    _make_trainer_raise(strategy)
    install("reduction")


def num_replicas_when_made(optimizer: Optimizer) -> int:
    """Return the number of replicas of the scope in which an optimizer was created."""
    return _num_replicas_when_made.get(optimizer, 1)


_KERAS_TRAINER = "keras.src.backend.tensorflow.trainer"


def _make_trainer_raise(strategy: tf.distribute.Strategy) -> None:
    """Make Keras' own trainer, which fails with this strategy, raise an error with advice."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) or "reduce" in vars(strategy):
        return
    # Replace `strategy.reduce`, because Keras' trainer fails there: this strategy cannot reduce the trainer's
    # per-replica batches (`fit`, `evaluate`) and scalars (`train_on_batch`). Other callers reduce as usual.
    strategy.reduce = types.MethodType(_reduce_except_for_trainer, strategy)


def _reduce_except_for_trainer(strategy: tf.distribute.Strategy, *args: Any, **kwargs: Any) -> Any:
    if caller_module() == _KERAS_TRAINER:
        raise ValueError(
            "Keras' own `fit`, `evaluate`, `train_on_batch` and `test_on_batch` cannot run under a "
            "`MultiWorkerMirroredStrategy`, because this strategy does not support Keras' reductions of batches and "
            "metrics (Keras issue 20585). Received: a model that was not passed to `keras_shardopt.prepare`, on "
            f"{strategy.num_replicas_in_sync} replicas in {num_workers(strategy)} processes. Compile the model with a "
            "`CrossShard` inside `keras_shardopt.data_parallel()`, or call `keras_shardopt.prepare(model)` after "
            "`compile`. A `CrossShard` with `group_assignment` needs a custom training loop here: "
            "`strategy.run(step)`, where `step` calls `optimizer.apply`."
        )
    return type(strategy).reduce(strategy, *args, **kwargs)


def _world_of(strategy: tf.distribute.Strategy) -> World:
    num_processes, process_id = _process_of(strategy.cluster_resolver)
    local = strategy.num_replicas_in_sync // num_processes
    return World(
        num_replicas=strategy.num_replicas_in_sync,
        replica_id=process_id * local,
        is_chief=bool(strategy.extended.should_checkpoint),
        num_processes=num_processes,
        process_id=process_id,
        devices=[_name(device) for device in strategy.extended.worker_devices],
    )


def _name(device: str) -> str:
    """Return the short name of a device: "cpu:0" for "/job:worker/replica:0/task:1/device:CPU:0"."""
    return device.rpartition("device:")[2].lower()


def local_replicas(strategy: tf.distribute.Strategy) -> tuple[int, int]:
    """Return the id of this process's first replica, and the number of replicas of this process."""
    world = _world_of(strategy)
    return world.replica_id, world.num_replicas // world.num_processes


_DEVICES = "KERAS_SHARDOPT_DEVICES_PER_PROCESS"
"""The environment variable with a worker's number of CPU devices. `keras_shardopt.launch` sets it, because TensorFlow
has no such variable."""


def _variables_of(task: jobs.Task) -> dict[str, str]:
    """Return `TF_CONFIG`, which connects this process to its job. Set CUDA_VISIBLE_DEVICES to this process's GPUs."""
    if len(task.hosts) < task.size:
        raise RuntimeError(
            f"On TensorFlow each process needs the addresses of all other processes, but `{task.command}` does not set "
            f"these addresses. Received: {task.size} processes, {task.local_size} on this machine. Use `srun` with "
            "`--distribution=block`, set TF_CONFIG, or start `python -m keras_shardopt.launch` on each machine."
        )
    jobs.own_gpus(task)
    workers = [f"{host}:{task.port + rank}" for rank, host in enumerate(task.hosts)]
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": task.rank}})}


_strategy_of_workers: dict[datetime.timedelta | None, Any] = {}
"""The strategy made from `TF_CONFIG`, keyed by its timeout. TensorFlow allows only one such strategy in a program."""


def _workers_strategy(num_replicas: int | None, timeout: datetime.timedelta | None) -> tf.distribute.Strategy:
    """Return the strategy of the workers in `TF_CONFIG`, over all their accelerators or logical CPU devices."""
    if not _strategy_of_workers:
        _strategy_of_workers[timeout] = _make_workers_strategy(num_replicas, timeout)
    ((made_with, strategy),) = _strategy_of_workers.items()
    if timeout not in (None, made_with):
        raise ValueError(
            "`timeout` must be set in the first `data_parallel()` of a program, which connects the workers. Received: "
            f"timeout={timeout.total_seconds():g} s, after a scope with a different timeout. Pass this `timeout` "
            "to the first `data_parallel()`."
        )
    if num_replicas not in (None, strategy.num_replicas_in_sync):
        raise ValueError(
            "`num_replicas` must be the number of devices of all workers in `TF_CONFIG`. Received: "
            f"num_replicas={num_replicas}, for {num_workers(strategy)} workers with {strategy.num_replicas_in_sync} "
            "devices in all. Omit `num_replicas`."
        )
    return strategy


def _make_workers_strategy(num_replicas: int | None, timeout: datetime.timedelta | None) -> tf.distribute.Strategy:
    num_processes, _ = processes.process()
    kinds = [kind for kind in ("TPU", "GPU") if tf.config.list_physical_devices(kind)]
    num_devices = int(os.environ.get(_DEVICES, 1)) if num_replicas is None else num_replicas // num_processes
    if not kinds and num_devices > 1:
        _make_cpu_devices(num_devices)
    seconds = None if timeout is None else timeout.total_seconds()
    options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=seconds)
    extended = collective_all_reduce_strategy.CollectiveAllReduceExtended
    tensorflow_devices = extended._initialize_local_devices

    def all_cpus(self: Any, resolver: Any, worker: str) -> tuple[tuple[str, ...], str]:
        devices, kind = tensorflow_devices(self, resolver, worker)
        have = tf.config.get_logical_device_configuration(tf.config.list_physical_devices("CPU")[0]) or [None]
        return (tuple(f"{worker}/device:CPU:{i}" for i in range(len(have))) if kind == "CPU" else devices), kind

    extended._initialize_local_devices = all_cpus
    if seconds is not None:
        # `faulthandler` ends the process after the timeout. TensorFlow waits for workers in C++ without a limit, and
        # meanwhile no Python thread can raise an error.
        faulthandler.dump_traceback_later(seconds, exit=True, file=2)
    try:
        return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    except RuntimeError as error:
        if "startup" not in str(error):
            raise
        raise RuntimeError(
            "The workers in `TF_CONFIG` must be connected before TensorFlow is used. Received: `data_parallel()` "
            "after a tensor, variable or model was created. Enter `data_parallel()` first."
        ) from error
    finally:
        if seconds is not None:
            faulthandler.cancel_dump_traceback_later()
        extended._initialize_local_devices = tensorflow_devices


def _devices(num_replicas: int | None) -> list[Any]:
    """Return the first `num_replicas` local accelerators (None means all). Without any, return logical CPU devices."""
    kinds = [kind for kind in ("TPU", "GPU") if tf.config.list_physical_devices(kind)]
    kind = kinds[0] if kinds else "CPU"
    if kind == "CPU" and num_replicas is not None:
        _make_cpu_devices(num_replicas)
    devices: list[Any] = tf.config.list_logical_devices(kind)
    if num_replicas is None:
        return devices
    if num_replicas > len(devices):
        raise ValueError(
            f"`num_replicas` must be at most the number of {kind} devices. "
            f"Received: num_replicas={num_replicas}, devices={[device.name for device in devices]}."
        )
    return devices[:num_replicas]


@functools.cache
def _strategy_of(*devices: str) -> tf.distribute.Strategy:
    """Return the strategy of these devices. Later scopes reuse it, because variables belong to one strategy."""
    if "TPU" in devices[0]:
        return tf.distribute.TPUStrategy()
    # Skip the keys of earlier strategies, as TensorFlow's tests do. All strategies number their collectives from the
    # same key, and TensorFlow aborts if it uses a key again with another number of devices.
    tf.distribute.MirroredStrategy._collective_key_base += 100_000
    return tf.distribute.MirroredStrategy(devices)


def _make_cpu_devices(num_replicas: int) -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    have = tf.config.get_logical_device_configuration(cpu) or [None]
    if len(have) >= num_replicas:
        return
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * num_replicas)
    except RuntimeError as error:
        raise RuntimeError(
            f"`num_replicas={num_replicas}` needs that many logical CPU devices, and TensorFlow is already running "
            f"with {len(have)}. Enter `data_parallel(num_replicas={num_replicas})` before a tensor, variable or model "
            "is created (in a notebook, restart the kernel first), or call "
            "`tf.config.set_logical_device_configuration` at the start of the program."
        ) from error


def gather(strategy: tf.distribute.Strategy, array: np.ndarray) -> list[np.ndarray]:
    """Gather equal-shaped arrays of integers in [0, 2**63), with a row per local replica, from all processes.

    Return a list with one array: the rows of all replicas.
    """
    world = _world_of(strategy)
    if world.num_processes == 1:
        return [array]
    # Pad arrays to one of a few sizes, because TensorFlow traces the exchange again for each size.
    flat = array.reshape(len(array), -1).astype("int64")
    padded = np.zeros((len(flat), 4 ** max(2, -(-(flat.shape[1] - 1).bit_length() // 2))), "int64")
    padded[:, : flat.shape[1]] = flat
    values = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(padded[context.replica_id_in_sync_group - world.replica_id])
    )
    rows = _exchange(strategy, padded.shape[1])(values).numpy()[:, : flat.shape[1]]
    return [rows.reshape(world.num_replicas, *array.shape[1:]).astype("uint64")]


@functools.cache
def _exchange(strategy: tf.distribute.Strategy, length: int) -> Any:
    """Return a function that stacks vectors of this length from all replicas."""
    del length  # only a key of the cache: TensorFlow warns if one function is traced for several lengths

    def on_replica(vector: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        is_mine = tf.range(strategy.num_replicas_in_sync) == context.replica_id_in_sync_group
        # Sum arrays in which only this replica's row is not zero. A sum is one collective. A gather would be two.
        placed = tf.where(is_mine[:, tf.newaxis], vector[tf.newaxis], tf.zeros_like(vector)[tf.newaxis])
        return context.all_reduce(tf.distribute.ReduceOp.SUM, placed)

    @tf.function
    def exchange(values: Any) -> tf.Tensor:
        return strategy.experimental_local_results(strategy.run(on_replica, args=(values,)))[0]

    return exchange
