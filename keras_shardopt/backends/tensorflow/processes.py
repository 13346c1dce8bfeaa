"""The processes of TensorFlow programs, and their strategies.

Private names of Keras touched here (a test holds each of them):
    `keras.src.backend.tensorflow.trainer` - the module that calls `strategy.reduce` where `fit` cannot work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import types
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_shardopt.backends.keras_callers import caller_module
from keras_shardopt.backends.processes import Processes, World, gather_pickled
from keras_shardopt.backends.tensorflow import losses as tf_losses
from keras_shardopt.backends.tensorflow.communicator import _process_of


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
        devices = _devices(num_replicas)
        self.num_replicas_of_last_scope = len(devices)
        if len(devices) == 1:
            yield World(forget=self._forget_scope)
            return
        if devices[0].device_type == "TPU":
            strategy = tf.distribute.TPUStrategy()
        else:
            # Strategies number their collectives from the same key, and TensorFlow aborts where it has seen a key with
            # another number of devices before. Its own tests step over used keys in this way.
            tf.distribute.MirroredStrategy._collective_key_base += 100_000
            strategy = tf.distribute.MirroredStrategy([device.name for device in devices])
        with strategy.scope():
            yield dataclasses.replace(_world_of(strategy), forget=self._forget_scope)

    def _forget_scope(self) -> None:
        self.num_replicas_of_last_scope = 1

    def gather_objects(self, value: Any) -> list[Any]:
        strategy = tf.distribute.get_strategy()
        world = _world_of(strategy)
        if world.num_processes == 1:
            return [value]
        num_local = world.num_replicas // world.num_processes

        def everyones(array: np.ndarray) -> np.ndarray:
            with strategy.scope():
                return gather(strategy, np.stack([array] * num_local))[0][::num_local]

        return gather_pickled(value, everyones)


processes = TensorFlowProcesses()
_num_replicas_when_made: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def optimizer_made(optimizer: Any) -> None:
    """See `optimizers.made`. From the first such optimizer on it is seen what steps do to their losses."""
    strategy = tf.distribute.get_strategy()
    _num_replicas_when_made.setdefault(optimizer, int(strategy.num_replicas_in_sync))
    _refuse_trainer(strategy)
    tf_losses.watch()


def num_replicas_when_made(optimizer: Any) -> int:
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
            f"(keras issue 20585). Received: a strategy with {strategy.num_replicas_in_sync} replicas in "
            f"{_world_of(strategy).num_processes} processes. Write the loop yourself: `strategy.run(step)`, where "
            "`step` computes the gradients of the loss divided by the number of replicas and calls "
            "`optimizer.apply(gradients, variables)`."
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
    )


def local_replicas(strategy: tf.distribute.Strategy) -> tuple[int, int]:
    """The first replica that this process runs, and how many it runs."""
    world = _world_of(strategy)
    return world.replica_id, world.num_replicas // world.num_processes


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
    """The arrays (of unsigned integers below 2**63, all of one shape) of all processes."""
    world = _world_of(strategy)
    if world.num_processes == 1:
        return [array]
    values = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(array[context.replica_id_in_sync_group - world.replica_id][None].astype("int64"))
    )
    return [strategy.gather(values, axis=0).numpy().astype("uint64")]
