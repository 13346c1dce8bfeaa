"""Replicas of `tf.distribute` strategies.

Private names of Keras touched here (a test holds each of them):
    `Optimizer._all_reduce_sum_gradients` - the reduction that Keras' TensorFlow optimizers make by themselves.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_shardopt._typing import Gradients, Groups, ReduceOp, Tensor, Variable
from keras_shardopt.replica.base import (
    Arrival,
    Framework,
    ReplicaBackend,
    SingleReplica,
    World,
    reduction_is_claimed,
)


class ReplicaContext(ReplicaBackend):
    """The replicas of a strategy, seen from inside `strategy.run` (as in `model.fit`)."""

    def __init__(self, strategy: tf.distribute.Strategy, context: Any) -> None:
        self._context = context
        self.num_replicas = strategy.num_replicas_in_sync
        self.is_chief = bool(strategy.extended.should_checkpoint)

    @property
    def replica_id(self) -> Any:
        return self._context.replica_id_in_sync_group

    def arrival(self, grads: Gradients, variables: Sequence[Variable]) -> Arrival:
        # Keras divides the losses of its trainer and of `keras.losses` by the number of replicas.
        return Arrival.LOCAL_PRESCALED

    def all_reduce(self, tensors: Sequence[Tensor], op: ReduceOp, groups: Groups | None = None) -> list[Tensor]:
        tensors = list(tensors)
        if not tensors:
            return []
        if groups is not None:
            members = self._members(groups)
            gathered = [tf.gather(stack, members) for stack in self._stacks(tensors)]
            return [_REDUCE[op](stack, axis=0) for stack in gathered]
        if op == "max":
            return [tf.reduce_max(stack, axis=0) for stack in self._stacks(tensors)]
        # One call for the whole list: the strategy packs it into as few transfers as it can.
        reduced: list[Tensor] = list(self._context.all_reduce(tf.distribute.ReduceOp.SUM, tensors))
        if op == "mean":
            reduced = [_divided(tensor, self.num_replicas) for tensor in reduced]
        return reduced

    def reduce_scatter(self, tensors: Sequence[Tensor], op: ReduceOp, groups: Groups | None = None) -> list[Tensor]:
        # tf.distribute has no reduce-scatter, so each replica reduces all and keeps its slice.
        reduced = self.all_reduce(tensors, op, groups)
        size = self.num_replicas if groups is None else len(groups[0])
        position = tf.convert_to_tensor(self.replica_id)
        if groups is not None:
            position = tf.gather(_positions(groups), position)
        return [tf.reshape(tensor, [size, -1])[position] for tensor in reduced]

    def all_gather(self, tensors: Sequence[Tensor], groups: Groups | None = None) -> list[Tensor]:
        if not tensors:
            return []
        if groups is None:
            return list(self._context.all_gather(list(tensors), axis=0))
        members = self._members(groups)
        return [tf.reshape(tf.gather(stack, members), [-1]) for stack in self._stacks(tensors)]

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> list[Tensor]:
        return [stack[root] for stack in self._stacks(tensors)]

    def _stacks(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Each tensor of all replicas, stacked along a new first axis."""
        if not tensors:
            return []
        rows = [tf.convert_to_tensor(tensor)[tf.newaxis] for tensor in tensors]
        return list(self._context.all_gather(rows, axis=0))

    def _members(self, groups: Groups) -> Tensor:
        """The replica ids of this replica's own group."""
        group_of = [next(i for i, group in enumerate(groups) if r in group) for r in range(self.num_replicas)]
        return tf.gather(tf.constant(groups), tf.gather(tf.constant(group_of), self.replica_id))


_REDUCE = {"sum": tf.reduce_sum, "mean": tf.reduce_mean, "max": tf.reduce_max}


def _positions(groups: Groups) -> Tensor:
    """For every replica id, its position inside its group."""
    order = {replica: position for group in groups for position, replica in enumerate(group)}
    return tf.constant([order[replica] for replica in range(len(order))])


def _divided(tensor: Tensor, divisor: int) -> Tensor:
    if isinstance(tensor, tf.IndexedSlices):
        return tf.IndexedSlices(_divided(tensor.values, divisor), tensor.indices, tensor.dense_shape)
    return tensor / tf.cast(divisor, tensor.dtype)


def _cond(condition: Tensor, action: Callable[[], Any]) -> None:
    def act() -> int:
        action()
        return 0

    tf.cond(condition, act, lambda: 0)


def _reduce_unless_claimed(optimizer: Any, grads_and_vars: Any) -> Any:
    """Stands in for an optimizer's own `_all_reduce_sum_gradients`."""
    if reduction_is_claimed(optimizer):
        return list(grads_and_vars)
    return type(optimizer)._all_reduce_sum_gradients(optimizer, grads_and_vars)


class TensorFlow(Framework):
    """`tf.distribute`: the strategy mirrors the variables, the replicas are its devices."""

    places_towers = True

    def place_tower(self, device: str) -> contextlib.AbstractContextManager[Any]:
        scope: contextlib.AbstractContextManager[Any] = tf.device(device)
        return scope

    def replicas(self, axis_name: str) -> ReplicaBackend:
        strategy = tf.distribute.get_strategy()
        if strategy.num_replicas_in_sync == 1:
            return SingleReplica()
        context = tf.distribute.get_replica_context()
        if context is None:
            raise ValueError(
                "Under a strategy with several replicas an optimizer must be applied on each of them. "
                f"Received: a call outside `strategy.run`, with {strategy.num_replicas_in_sync} replicas. "
                "Use `strategy.run(step)`, where `step` computes and applies the gradients."
            )
        return ReplicaContext(strategy, context)

    def take_over_reduction(self, optimizers: Sequence[Any]) -> None:
        for optimizer in optimizers:
            # On the instance, past Keras' attribute tracking: a subclass would change the name that is serialised.
            override = types.MethodType(_reduce_unless_claimed, optimizer)
            object.__setattr__(optimizer, "_all_reduce_sum_gradients", override)

    def check_ready(self, variables: Sequence[Variable], optimizers: Sequence[Any]) -> None:
        if tf.distribute.get_strategy().num_replicas_in_sync == 1:
            return
        for optimizer in optimizers:
            for argument in ("gradient_accumulation_steps", "ema_overwrite_frequency"):
                if getattr(optimizer, argument, None):
                    raise ValueError(
                        f"`{argument}` of an inner optimizer cannot work under a strategy with several replicas: it "
                        "puts a meeting of the replicas inside a condition, which TensorFlow forbids. "
                        f"Received: {type(optimizer).__name__}({argument}={getattr(optimizer, argument)}). "
                        f"Leave `{argument}` out."
                    )

    def update_if(
        self,
        condition: Tensor,
        update: Callable[[Sequence[Any]], None],
        grads: Sequence[Any],
        variables: Sequence[Variable],
    ) -> None:
        grads = tuple(grads)
        if tf.__internal__.distribute.strategy_supports_no_merge_call():
            _cond(condition, lambda: update(grads))
            return

        # Replicas cannot meet inside a condition, and the update of a variable is such a meeting. So they meet first,
        # decide together, and part again for the update.
        def together(strategy: tf.distribute.Strategy, condition: Any, grads: Any) -> None:
            first = strategy.experimental_local_results(condition)[0]
            _cond(first, lambda: strategy.extended.call_for_each_replica(update, args=(grads,)))

        tf.distribute.get_replica_context().merge_call(together, args=(condition, grads))

    def gradient_of(self, function: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
        value = tf.convert_to_tensor(value)  # what Keras' own conversion leaves a variable
        with tf.GradientTape() as tape:
            tape.watch(value)
            result = function(value)
        return tape.gradient(result, value)

    def outside_trace(self) -> contextlib.AbstractContextManager[Any]:
        scope: contextlib.AbstractContextManager[Any] = tf.init_scope()
        return scope

    @contextlib.contextmanager
    def world(self, num_replicas: int | None) -> Iterator[World]:
        if tf.distribute.has_strategy():
            strategy = tf.distribute.get_strategy()
            if num_replicas not in (None, strategy.num_replicas_in_sync):
                raise ValueError(
                    "`num_replicas` must agree with the strategy whose scope is open. "
                    f"Received: num_replicas={num_replicas}, strategy with {strategy.num_replicas_in_sync} replicas. "
                    "Leave `num_replicas` out, or open `data_parallel()` outside `strategy.scope()`."
                )
            yield _world_of(strategy)
            return
        devices = _devices(num_replicas)
        if len(devices) == 1:
            yield World()
            return
        if devices[0].device_type == "TPU":
            strategy = tf.distribute.TPUStrategy()
        else:
            # Strategies number their collectives from the same key, and TensorFlow aborts where it has seen a key with
            # another number of devices before. Its own tests step over used keys in this way.
            tf.distribute.MirroredStrategy._collective_key_base += 100_000
            strategy = tf.distribute.MirroredStrategy([device.name for device in devices])
        with strategy.scope():
            yield _world_of(strategy)

    def largest_difference(self, variables: Sequence[Variable]) -> float:
        largest = 0.0
        for variable in variables:
            value = getattr(variable, "value", variable)
            first, *others = [np.asarray(copy, "float64") for copy in getattr(value, "values", [value])]
            for other in others:
                largest = max(largest, float(np.max(np.abs(other - first), initial=0.0)))
        return largest


def _world_of(strategy: tf.distribute.Strategy) -> World:
    resolver = strategy.cluster_resolver
    num_processes, process_id = 1, 0
    if resolver is not None and resolver.task_type is not None:
        num_processes = resolver.cluster_spec().num_tasks(resolver.task_type)
        process_id = resolver.task_id
    local = strategy.num_replicas_in_sync // num_processes
    return World(
        num_replicas=strategy.num_replicas_in_sync,
        replica_id=process_id * local,
        is_chief=bool(strategy.extended.should_checkpoint),
        num_processes=num_processes,
        process_id=process_id,
    )


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
