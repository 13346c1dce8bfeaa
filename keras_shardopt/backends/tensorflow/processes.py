"""The processes of TensorFlow programs, and their strategies.

Private names of Keras touched here (a test holds each of them):
    `keras.src.backend.tensorflow.trainer` - the module that calls `strategy.reduce` where `fit` cannot work.

Of TensorFlow: `tensorflow.python.distribute.collective_all_reduce_strategy.CollectiveAllReduceExtended`, whose
`_initialize_local_devices` - the devices of a worker, of which it takes one CPU device only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import functools
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

from keras_shardopt.backends.keras_callers import caller_module
from keras_shardopt.backends.patches import install
from keras_shardopt.backends.processes import Processes, World, check_same_calls, gather_pickled
from keras_shardopt.backends.tensorflow.communicator import _process_of
from keras_shardopt.numerics import Optimizer


class TensorFlowProcesses(Processes):
    """`tf.distribute`: the strategy mirrors the variables, the replicas are its devices."""

    num_replicas_of_last_scope: int = 1
    """Of the scope that was entered last, also after it was left, until it is closed for good."""

    def creates_variables_collectively(self) -> bool:
        return tf.distribute.has_strategy() and self.process()[0] > 1

    def num_replicas(self) -> int:
        return int(tf.distribute.get_strategy().num_replicas_in_sync)

    def versions(self) -> dict[str, str]:
        return {"TensorFlow": tf.__version__}

    def process(self) -> tuple[int, int]:
        if tf.distribute.has_strategy():
            return _process_of(tf.distribute.get_strategy().cluster_resolver)
        # Also outside the scope of the strategy, where a worker is known by its environment alone.
        return _process_of(tf.distribute.cluster_resolver.TFConfigClusterResolver())

    @contextlib.contextmanager
    def open(self, num_replicas: int | None, timeout: datetime.timedelta | None = None) -> Iterator[World]:
        if tf.distribute.has_strategy():
            strategy = tf.distribute.get_strategy()
            if timeout is not None and _process_of(strategy.cluster_resolver)[0] > 1:
                raise ValueError(
                    "`timeout` cannot be set here for several processes, because the strategy has started them. "
                    f"Received: timeout={timeout.total_seconds():g} s. Give it to TensorFlow before the strategy: "
                    "`tf.config.experimental.configure_coordination_service(service_type='standalone', "
                    "heartbeat_timeout_in_ms=...)`, or `tf.distribute.experimental.CommunicationOptions("
                    "timeout_seconds=...)` to the strategy."
                )
            if num_replicas not in (None, strategy.num_replicas_in_sync):
                raise ValueError(
                    "`num_replicas` must agree with the strategy whose scope is open. "
                    f"Received: num_replicas={num_replicas}, strategy with {strategy.num_replicas_in_sync} replicas. "
                    "Leave `num_replicas` out, or open `data_parallel()` outside `strategy.scope()`."
                )
            _refuse_trainer(strategy)
            self.num_replicas_of_last_scope = strategy.num_replicas_in_sync
            yield dataclasses.replace(_world_of(strategy), forget=self._forget_scope)
            return
        if self.process()[0] > 1:
            strategy = _workers_strategy(num_replicas, timeout)
            _refuse_trainer(strategy)
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


def tell(call: str, number: int = 0) -> list[int]:
    """As `tell` of JAX: what this worker is about to do together with the others, and a number of 32 bits."""
    strategy = tf.distribute.get_strategy()
    told = _everyones(strategy, np.array([zlib.crc32(call.encode()) >> 1, number])).tolist()
    gather_letters = lambda letters: _everyones(strategy, np.array(letters)).tolist()  # noqa: E731
    check_same_calls([kind for kind, _ in told], call, gather_letters, "process")
    return [number for _, number in told]


def gather_objects(value: Any, call: str = "exchanges values") -> list[Any]:
    """What each worker gives, whatever it is, in their order. `call` is as in `tell`."""
    strategy = tf.distribute.get_strategy()
    if num_workers(strategy) == 1:
        return [value]

    def length_of(length: int) -> list[int]:
        with strategy.scope():  # which the thread that asks is not in
            return tell(call, length)

    return gather_pickled(value, functools.partial(_everyones, strategy), length_of)


@contextlib.contextmanager
def naming_workers(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """A block in which the error about a worker that does not answer names it, and its address."""
    try:
        yield
    except (tf.errors.AbortedError, tf.errors.DeadlineExceededError, tf.errors.UnavailableError) as error:
        me = processes.process()[1]
        named = {int(number) for number in re.findall(r"task:(\d+)", str(error))} - {me}
        if not named and "CoordinationService" not in str(error):
            raise
        addresses = [each for kind in strategy.cluster_resolver.cluster_spec().as_dict().values() for each in kind]
        missing = [f"worker {number} ({addresses[number]})" for number in sorted(named) if number < len(addresses)]
        who = ", ".join(missing) or f"worker 0 ({addresses[0]}), which watches over all workers,"
        raise RuntimeError(
            "All workers must take part in each step, and one of them is gone or stuck. Received: no answer from "
            f"{who} on worker {me} ({addresses[me]}). That worker's own output says why. Start the job again: with "
            "`keras_shardopt.callbacks.BackupAndRestore` it goes on from its last backup. TensorFlow's error is: "
            f"{type(error).__name__}: {error}"
        ) from error


def _everyones(strategy: tf.distribute.Strategy, array: np.ndarray) -> np.ndarray:
    """The arrays of all workers, along a new first dimension."""
    _, num_local = local_replicas(strategy)
    with strategy.scope():
        return gather(strategy, np.stack([array] * num_local))[0][::num_local]


def num_workers(strategy: tf.distribute.Strategy) -> int:
    """How many processes a strategy trains in."""
    return _process_of(strategy.cluster_resolver)[0]


_num_replicas_when_made: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def optimizer_made(optimizer: Optimizer) -> None:
    """See `optimizers.made`. From the first such optimizer on it is seen what steps do to their losses."""
    strategy = tf.distribute.get_strategy()
    _num_replicas_when_made.setdefault(optimizer, int(strategy.num_replicas_in_sync))
    _refuse_trainer(strategy)
    install("reduction")


def num_replicas_when_made(optimizer: Optimizer) -> int:
    """How many replicas the scope had in which an optimizer was made."""
    return _num_replicas_when_made.get(optimizer, 1)


_KERAS_TRAINER = "keras.src.backend.tensorflow.trainer"


def _refuse_trainer(strategy: tf.distribute.Strategy) -> None:
    """Makes Keras' trainer fail with words that help where it would fail without."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) or "reduce" in vars(strategy):
        return
    # Nothing of ours is called before Keras fails, except what Keras fails in: it hands this strategy per-replica
    # batches (`fit`, `evaluate`) and scalars (`train_on_batch`) to reduce that it cannot. Others may reduce as usual.
    strategy.reduce = types.MethodType(_reduce_unless_for_trainer, strategy)


def _reduce_unless_for_trainer(strategy: tf.distribute.Strategy, *args: Any, **kwargs: Any) -> Any:
    if caller_module() == _KERAS_TRAINER:
        raise ValueError(
            "Keras' own `fit`, `evaluate`, `train_on_batch` and `test_on_batch` cannot run under a "
            "`MultiWorkerMirroredStrategy`: Keras reduces batches and metrics in ways that this strategy does not know "
            f"(keras issue 20585). Received: a model that is not prepared, on {strategy.num_replicas_in_sync} replicas "
            f"in {num_workers(strategy)} processes. Compile the model with a `CrossShard` inside "
            "`keras_shardopt.data_parallel()`, or call `keras_shardopt.prepare(model)` after `compile`. One with "
            "`group_assignment` needs a custom training loop here: `strategy.run(step)`, where `step` calls "
            "`optimizer.apply`."
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
    """The end of a device's name: "cpu:0" of "/job:worker/replica:0/task:1/device:CPU:0"."""
    return device.rpartition("device:")[2].lower()


def local_replicas(strategy: tf.distribute.Strategy) -> tuple[int, int]:
    """The first replica that this process runs, and how many it runs."""
    world = _world_of(strategy)
    return world.replica_id, world.num_replicas // world.num_processes


_DEVICES = "KERAS_SHARDOPT_DEVICES_PER_PROCESS"
"""Set by `keras_shardopt.launch`. TensorFlow has no variable for it."""

_strategy_of_workers: dict[datetime.timedelta | None, Any] = {}
"""The one that was made from `TF_CONFIG`, by its timeout. A program has one: TensorFlow starts its server once."""


def _workers_strategy(num_replicas: int | None, timeout: datetime.timedelta | None) -> tf.distribute.Strategy:
    """That of the workers which `TF_CONFIG` names, over all accelerators of each, else all its logical CPU devices."""
    if not _strategy_of_workers:
        _strategy_of_workers[timeout] = _make_workers_strategy(num_replicas, timeout)
    ((made_with, strategy),) = _strategy_of_workers.items()
    if timeout not in (None, made_with):
        raise ValueError(
            "`timeout` must be set where the first `data_parallel()` of a program connects the workers. "
            f"Received: timeout={timeout.total_seconds():g} s, after a scope without it or with another. Give it there."
        )
    if num_replicas not in (None, strategy.num_replicas_in_sync):
        raise ValueError(
            "`num_replicas` must be that of all workers of `TF_CONFIG` together. "
            f"Received: num_replicas={num_replicas}, for {num_workers(strategy)} workers with "
            f"{strategy.num_replicas_in_sync} devices in all. Leave it out."
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
    in_tensorflow = extended._initialize_local_devices

    def all_cpus(self: Any, resolver: Any, worker: str) -> tuple[tuple[str, ...], str]:
        devices, kind = in_tensorflow(self, resolver, worker)
        have = tf.config.get_logical_device_configuration(tf.config.list_physical_devices("CPU")[0]) or [None]
        return (tuple(f"{worker}/device:CPU:{i}" for i in range(len(have))) if kind == "CPU" else devices), kind

    extended._initialize_local_devices = all_cpus
    if seconds is not None:
        # TensorFlow waits for the workers in C++, without a limit, and no Python thread can raise an error meanwhile.
        faulthandler.dump_traceback_later(seconds, exit=True, file=2)
    try:
        return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    except RuntimeError as error:
        if "startup" not in str(error):
            raise
        raise RuntimeError(
            "The workers of `TF_CONFIG` must be connected before TensorFlow is used. Received: a `data_parallel()` "
            "after some tensor, variable or model was made. Enter `data_parallel()` first."
        ) from error
    finally:
        if seconds is not None:
            faulthandler.cancel_dump_traceback_later()
        extended._initialize_local_devices = in_tensorflow


def _devices(num_replicas: int | None) -> list[Any]:
    """All local accelerators, else all logical CPU devices; the first `num_replicas` of them."""
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
    """The strategy of these devices. Later scopes reuse it: the variables of a model belong to one strategy."""
    if "TPU" in devices[0]:
        return tf.distribute.TPUStrategy()
    # Strategies number their collectives from the same key, and TensorFlow aborts where it has seen a key with
    # another number of devices before. Its own tests step over used keys in this way.
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
            f"with {len(have)}. Enter `data_parallel(num_replicas={num_replicas})` before any tensor, variable or "
            "model is made, or call `tf.config.set_logical_device_configuration` at the start of the program."
        ) from error


def gather(strategy: tf.distribute.Strategy, array: np.ndarray) -> list[np.ndarray]:
    """The arrays (of unsigned integers below 2**63, all of one shape) of all replicas, one row of which is each's.

    Returns:
        A list of one array, whose rows are those of all processes.
    """
    world = _world_of(strategy)
    if world.num_processes == 1:
        return [array]
    # Of a few sizes only, as TensorFlow traces each.
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
    """A function that stacks the vectors, of this length, of all replicas."""
    del length  # each has a function of its own, or TensorFlow warns of many traces

    def on_replica(vector: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        is_mine = tf.range(strategy.num_replicas_in_sync) == context.replica_id_in_sync_group
        # A sum in which each replica has a place of its own: one exchange, where a gather makes two.
        placed = tf.where(is_mine[:, tf.newaxis], vector[tf.newaxis], tf.zeros_like(vector)[tf.newaxis])
        return context.all_reduce(tf.distribute.ReduceOp.SUM, placed)

    @tf.function
    def exchange(values: Any) -> tf.Tensor:
        return strategy.experimental_local_results(strategy.run(on_replica, args=(values,)))[0]

    return exchange
