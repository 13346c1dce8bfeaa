"""Replicas of `tf.distribute` strategies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_shardopt.backends.communicator import Communicator, Evidence, GradientState
from keras_shardopt.backends.tensorflow import losses as tf_losses
from keras_shardopt.backends.traffic import note
from keras_shardopt.numerics import Gradients, ReduceOp, Tensor, Variable


class ReplicaContext(Communicator):
    """The replicas of a strategy, inside `strategy.run` (as in `model.fit`)."""

    evidence = Evidence()

    def __init__(self, strategy: tf.distribute.Strategy, context: Any) -> None:
        self._context = context
        self.num_replicas = strategy.num_replicas_in_sync
        self.is_multi_process = _process_of(strategy.cluster_resolver)[0] > 1
        self._is_on_tpu = isinstance(strategy, (tf.distribute.TPUStrategy, tf.distribute.experimental.TPUStrategy))

    @property
    def replica_id(self) -> Any:
        if self._groups is not None:
            return self._at_own_id(self._positions_by_id)
        return self._context.replica_id_in_sync_group

    def _at_own_id(self, values: list[Any]) -> Any:
        return tf.gather(tf.constant(values), self.world.replica_id)

    def gradient_state(self, grads: Gradients, variables: Sequence[Variable]) -> GradientState:
        seen = tf_losses.noted()
        is_divided = tf_losses.DIVIDED in seen and not tf_losses.is_bare(variables, grads)
        doubts = [_READ] if tf_losses.BY_HAND in seen and not is_divided else []
        is_of_this_step = not seen.isdisjoint({tf_losses.DIVIDED, tf_losses.UNDIVIDED})
        self.evidence = Evidence(is_of_this_step, [*doubts, *_doubts(seen)])
        return GradientState.LOCAL_PRESCALED if is_divided else GradientState.LOCAL

    def all_reduce(self, tensors: Sequence[Tensor], op: ReduceOp) -> list[Tensor]:
        tensors = list(tensors)
        if not tensors:
            return []
        if self._groups is not None:
            if self._is_on_tpu and op != "max":
                sums = [self._sum_on_tpu(tensor) for tensor in tensors]
                return [_divided(tensor, self.num_replicas) for tensor in sums] if op == "mean" else sums
            members = self.members
            gathered = [tf.gather(stack, members) for stack in self._stacks(tensors)]
            return [_REDUCE[op](stack, axis=0) for stack in gathered]
        if op == "max":
            return [tf.reduce_max(stack, axis=0) for stack in self._stacks(tensors)]
        reduced: list[Tensor] = [None] * len(tensors)
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            # Reduce all tensors of a dtype in one call, so the strategy can pack them into few transfers. A call with
            # several dtypes would fail.
            alike = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
            note("all_reduce", [tf.convert_to_tensor(tensors[i]) for i in alike], self.num_replicas)
            with _explaining_merge_calls():
                sums = self._context.all_reduce(tf.distribute.ReduceOp.SUM, [tensors[i] for i in alike])
            for i, total in zip(alike, sums):
                reduced[i] = total
        if op == "mean":
            reduced = [_divided(tensor, self.num_replicas) for tensor in reduced]
        return reduced

    def all_to_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        note("all_to_all", tensors, self.num_replicas)
        return self._concatenated(tensors, takes_part=True)

    def _concatenated(self, tensors: Sequence[Tensor], takes_part: bool) -> list[Tensor]:
        """Concatenate the tensors of the group's replicas. With `takes_part`, use only this replica's slice of each."""
        if self.is_multi_process or self._is_on_tpu:
            raise ValueError(
                "On TensorFlow, this `compression` needs a `MirroredStrategy` in one process. Received: another "
                'strategy. Use `compression="bfloat16"`, or omit `compression`.'
            )
        replicas = range(self.world.num_replicas)
        groups = [range(len(replicas))] * len(replicas) if self._groups is None else self._members_by_id

        def together(strategy: tf.distribute.Strategy, given: Sequence[Any]) -> Any:
            rows = [strategy.experimental_local_results(tensor) for tensor in given]

            def on_replica() -> list[Tensor]:
                context = tf.distribute.get_replica_context()
                members = groups[int(tf.get_static_value(context.replica_id_in_sync_group))]
                me = members.index(int(tf.get_static_value(context.replica_id_in_sync_group)))

                def part(tensor: Tensor) -> Tensor:
                    return tf.split(tensor, len(members))[me] if takes_part else tensor

                return [tf.concat([part(row[member]) for member in members], 0) for row in rows]

            return strategy.extended.call_for_each_replica(on_replica)

        with _explaining_merge_calls():
            return list(self._context.merge_call(together, args=(list(tensors),)))

    def all_reduce_in_tree(self, tensors: Sequence[Tensor], factor: float) -> list[Tensor]:
        """Return sums over the replicas of one process, times `factor`. Adds pairs of tensors, then pairs of sums."""
        note("all_reduce", tensors, self.num_replicas)

        def together(strategy: tf.distribute.Strategy, given: Sequence[Any]) -> list[Tensor]:
            devices = dict.fromkeys(strategy.extended.worker_devices, 0)
            totals = []
            for tensor in given:
                values = strategy.experimental_local_results(tensor)
                device = min(devices, key=devices.__getitem__)
                devices[device] += values[0].shape.num_elements() * values[0].dtype.size
                with tf.device(device):
                    while len(values) > 1:
                        values = [tf.add(a, b) for a, b in zip(values[::2], values[1::2])]
                    totals.append(values[0] if factor == 1 else values[0] * tf.cast(factor, values[0].dtype))
            return totals

        with _explaining_merge_calls():
            return list(self._context.merge_call(together, args=(list(tensors),)))

    def all_gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if not tensors:
            return []
        if any(tensor.dtype.size == 1 for tensor in tensors):  # TensorFlow does not gather one-byte dtypes
            note("all_gather", tensors, self.num_replicas)
            return self._concatenated(tensors, takes_part=False)
        if self._groups is None:
            return self._gathered(list(tensors))
        members = self.members
        return [tf.reshape(tf.gather(stack, members), [-1]) for stack in self._stacks(tensors)]

    def _stacks(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Stack each tensor of all replicas along a new first axis."""
        if not tensors:
            return []
        rows = [tf.convert_to_tensor(tensor)[tf.newaxis] for tensor in tensors]
        return self._gathered(rows)

    def _gathered(self, tensors: list[Tensor]) -> list[Tensor]:
        # TensorFlow cannot gather bfloat16, so send its bits as float16.
        sent = [tf.bitcast(t, tf.float16) if t.dtype == tf.bfloat16 else t for t in tensors]
        note("all_gather", sent, self.world.num_replicas)
        gathered = self._context.all_gather(sent, axis=0)
        return [tf.bitcast(g, t.dtype) if t.dtype == tf.bfloat16 else g for g, t in zip(gathered, tensors)]

    def _sum_on_tpu(self, tensor: Tensor) -> Tensor:
        # On TPUs, this op sums within groups of replicas. `tf.compat.v1.tpu.cross_replica_sum` calls it too.
        assignment = tf.constant(self._groups, tf.int32)
        return tf.raw_ops.CrossReplicaSum(input=tf.convert_to_tensor(tensor), group_assignment=assignment)


@contextlib.contextmanager
def _explaining_merge_calls() -> Iterator[None]:
    """Replace TensorFlow's errors about `merge_call` by an error with advice."""
    try:
        yield
    except RuntimeError as error:
        if "merge_call" not in str(error):
            raise
        raise RuntimeError(
            "Replicas cannot communicate in a `tf.function`, condition or loop inside a step. Updates communicate, and "
            "so do losses of a model passed to `keras_shardopt.prepare`. Received: an update or a loss inside a "
            "`tf.function`, condition or loop. Remove `@tf.function` from functions that the step calls, because the "
            "whole step is already compiled. Compute losses outside conditions and loops."
        ) from error


_MIXTURE = (
    "Either all losses of a step must be divided by the number of replicas, or none. Received: a loss function that "
    "returns a scalar. Keras does not divide this scalar, but divides other losses or penalties, so the scalar is too "
    "large by that factor. Return one value for each row from the loss function, or call "
    "`keras_shardopt.prepare(model)`."
)


_READ = (
    "`CrossShard` cannot determine whether this step divides its loss by the number of replicas. Received: a step that "
    "reads the number of replicas, but does not use it in the loss. So `CrossShard` averages the gradients of the "
    'replicas. If the loss is not divided, use `CrossShard(..., gradients="local")`. If the step divides the loss '
    'elsewhere, use `CrossShard(..., gradients="prescaled")`.'
)


def evidence_of(replicas: Communicator, state: GradientState | None = None) -> Evidence:
    """Return warnings about the detected `GradientState`, or about the `state` that the user set."""
    if not isinstance(replicas, ReplicaContext):
        return Evidence()
    return replicas.evidence if state is None else Evidence(doubts=_objections(state))


def _objections(state: GradientState) -> Sequence[str]:
    """Return warnings if the losses of this step are not divided as the user's argument `gradients` says."""
    seen = tf_losses.noted()
    if {tf_losses.DIVIDED, tf_losses.UNDIVIDED} <= seen:
        return [_MIXTURE]
    if state is GradientState.LOCAL and tf_losses.BY_NUMBER in seen:
        return [
            '`gradients="local"` is for losses that are not divided by the number of replicas. Received: a step that '
            "divides its loss, as Keras' losses do, so updates are too small by that factor. Omit `gradients`, unless "
            "the step multiplies the loss by that number again."
        ]
    if state is GradientState.LOCAL_PRESCALED and tf_losses.UNDIVIDED in seen:
        return [
            '`gradients="prescaled"` is for losses that are divided by the number of replicas. Received: a loss '
            "function that returns a scalar. Keras does not divide this scalar, so updates are too large by that "
            "factor. Omit `gradients`."
        ]
    return ()


def _doubts(seen: set[str]) -> list[str]:
    """Return warnings about gradients that may be wrong. `seen` has properties of the losses, such as `DIVIDED`."""
    doubts = []
    if {tf_losses.DIVIDED, tf_losses.UNDIVIDED} <= seen:
        doubts.append(_MIXTURE)
    if tf_losses.BARE_TERM in seen:
        doubts.append(
            "Either all terms of a loss must be divided by the number of replicas, or none. Received: an undivided "
            "term, such as a bare mean, next to a term that Keras divides. The undivided term is too large by that "
            "factor. Divide this term: `term / tf.distribute.get_strategy().num_replicas_in_sync`."
        )
    is_mean = tf_losses.IN_MODEL in seen and tf_losses.SUM not in seen
    if seen.isdisjoint({tf_losses.DIVIDED, tf_losses.UNDIVIDED}) and not is_mean:
        doubts.append(
            "`CrossShard` cannot determine whether a custom training step divides its loss by the number of replicas. "
            "Received: a step without a known division, so `CrossShard` averages the gradients of the replicas. Use "
            '`CrossShard(..., gradients="local")` if the loss is the mean over the rows of one replica. Use '
            '`CrossShard(..., gradients="prescaled")` if the loss is divided by the number of replicas, or by the rows '
            "of the whole batch."
        )
    if tf_losses.OWN_WEIGHTS in seen:
        doubts.append(
            'A loss with `reduction="mean_with_sample_weight"` must divide by the weights of all rows. Received: a '
            "model that was not passed to `keras_shardopt.prepare`. Each replica divides by the weights of its own "
            "rows, so the update differs from that of one process. Call `keras_shardopt.prepare(model)` after "
            "`compile`."
        )
    return doubts


_REDUCE = {"sum": tf.reduce_sum, "mean": tf.reduce_mean, "max": tf.reduce_max}


def _divided(tensor: Tensor, divisor: int) -> Tensor:
    if isinstance(tensor, tf.IndexedSlices):
        return tf.IndexedSlices(_divided(tensor.values, divisor), tensor.indices, tensor.dense_shape)
    return tensor / tf.cast(divisor, tensor.dtype)


def _process_of(resolver: Any) -> tuple[int, int]:
    """Return the number of tasks (processes) of the cluster that train, and this task's index among them."""
    spec = {} if resolver is None else resolver.cluster_spec().as_dict()
    tasks = [(kind, i) for kind in ("chief", "worker") for i in range(len(spec.get(kind, [])))]
    me = None if resolver is None else (resolver.task_type, resolver.task_id)
    return (len(tasks), tasks.index(me)) if me in tasks else (1, 0)
