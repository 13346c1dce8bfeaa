"""Replicas of `tf.distribute` strategies.

Private names of Keras touched here (a test holds each of them):
    `Optimizer._all_reduce_sum_gradients` - the reduction that Keras' TensorFlow optimizers make by themselves.
    `keras.src.backend.tensorflow.trainer` - the module that calls `strategy.reduce` where `fit` cannot work.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import pickle
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_shardopt._typing import FunctionT, Gradients, Groups, ReduceOp, Tensor, Variable
from keras_shardopt.arguments import with_article
from keras_shardopt.backends.communicator import Arrival, ReplicaBackend, SingleReplica
from keras_shardopt.backends.gradient_scope import reduction_is_claimed
from keras_shardopt.backends.processes import World
from keras_shardopt.backends.runtime import Framework
from keras_shardopt.backends.tensorflow import losses as tf_losses


class ReplicaContext(ReplicaBackend):
    """The replicas of a strategy, seen from inside `strategy.run` (as in `model.fit`)."""

    inner_optimizers_sum = True

    def __init__(self, strategy: tf.distribute.Strategy, context: Any) -> None:
        self._context = context
        self.num_replicas = strategy.num_replicas_in_sync
        self.is_chief = bool(strategy.extended.should_checkpoint)
        self.spans_processes = _process_of(strategy.cluster_resolver)[0] > 1
        self._is_on_tpu = isinstance(strategy, (tf.distribute.TPUStrategy, tf.distribute.experimental.TPUStrategy))

    @property
    def replica_id(self) -> Any:
        return self._context.replica_id_in_sync_group

    def arrival(self, grads: Gradients, variables: Sequence[Variable]) -> Arrival:
        seen = tf_losses.noted()
        self.has_seen_losses = not seen.isdisjoint({tf_losses.DIVIDED, tf_losses.UNDIVIDED})
        self.doubts = _doubts(seen)
        is_divided = tf_losses.DIVIDED in seen and not tf_losses.is_bare(variables, grads)
        if tf_losses.BY_HAND in seen and not is_divided:
            self.doubts = [_READ, *self.doubts]
        return Arrival.LOCAL_PRESCALED if is_divided else Arrival.LOCAL

    def objections(self, arrival: Arrival) -> Sequence[str]:
        seen = tf_losses.noted()
        if {tf_losses.DIVIDED, tf_losses.UNDIVIDED} <= seen:
            return [_MIXTURE]
        if arrival is Arrival.LOCAL and tf_losses.BY_NUMBER in seen:
            return [
                'Gradients are "local" where the loss is not divided by the number of replicas. Received: '
                '`gradients="local"`, and a step that divides it, as the losses of Keras do, so that updates are as '
                "many times too small. Leave `gradients` out, unless the step multiplies the loss by that number again."
            ]
        if arrival is Arrival.LOCAL_PRESCALED and tf_losses.UNDIVIDED in seen:
            return [
                'Gradients are "prescaled" where the loss is divided by the number of replicas. Received: '
                '`gradients="prescaled"`, and a loss function that returns a scalar, which Keras does not divide, so '
                "that updates are as many times too large. Leave `gradients` out."
            ]
        return ()

    def notice_divided_loss(self, loss: Tensor, adds_up: bool = False) -> Tensor:
        return tf_losses.note_divided(loss, adds_up)

    def all_reduce(self, tensors: Sequence[Tensor], op: ReduceOp, groups: Groups | None = None) -> list[Tensor]:
        tensors = list(tensors)
        if not tensors:
            return []
        if groups is not None:
            if self._is_on_tpu and op != "max":
                sums = [_sum_on_tpu(tensor, groups) for tensor in tensors]
                return [_divided(tensor, len(groups[0])) for tensor in sums] if op == "mean" else sums
            members = self._members(groups)
            gathered = [tf.gather(stack, members) for stack in self._stacks(tensors)]
            return [_REDUCE[op](stack, axis=0) for stack in gathered]
        if op == "max":
            return [tf.reduce_max(stack, axis=0) for stack in self._stacks(tensors)]
        reduced: list[Tensor] = [None] * len(tensors)
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            # One call for all of a dtype: the strategy packs them into as few transfers as it can. It would pack those
            # of several dtypes together too, and fail.
            alike = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
            with _meeting():
                sums = self._context.all_reduce(tf.distribute.ReduceOp.SUM, [tensors[i] for i in alike])
            for i, total in zip(alike, sums):
                reduced[i] = total
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
            return self._gathered(list(tensors))
        members = self._members(groups)
        return [tf.reshape(tf.gather(stack, members), [-1]) for stack in self._stacks(tensors)]

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0, groups: Groups | None = None) -> list[Tensor]:
        position = root if groups is None else self._members(groups)[root]
        return [tf.gather(stack, position) for stack in self._stacks(tensors)]

    def _stacks(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Each tensor of all replicas, stacked along a new first axis."""
        if not tensors:
            return []
        rows = [tf.convert_to_tensor(tensor)[tf.newaxis] for tensor in tensors]
        return self._gathered(rows)

    def _gathered(self, tensors: list[Tensor]) -> list[Tensor]:
        # TensorFlow gathers no bfloat16, but any two bytes.
        sent = [tf.bitcast(t, tf.float16) if t.dtype == tf.bfloat16 else t for t in tensors]
        gathered = self._context.all_gather(sent, axis=0)
        return [tf.bitcast(g, t.dtype) if t.dtype == tf.bfloat16 else g for g, t in zip(gathered, tensors)]

    def _members(self, groups: Groups) -> Tensor:
        """The replica ids of this replica's own group."""
        group_of = [next(i for i, group in enumerate(groups) if r in group) for r in range(self.num_replicas)]
        return tf.gather(tf.constant(groups), tf.gather(tf.constant(group_of), self.replica_id))


@contextlib.contextmanager
def _meeting() -> Iterator[None]:
    """Says what to do where replicas cannot exchange anything."""
    try:
        yield
    except RuntimeError as error:
        if "merge_call" not in str(error):
            raise
        raise RuntimeError(
            "Replicas cannot exchange anything in a `tf.function`, condition or loop inside a step, and must for an "
            "update, and in a prepared model for a loss. Received: a call from inside one. Leave out the "
            "`@tf.function` of what the step calls (the step as a whole is compiled already), and compute losses "
            "outside of conditions and loops."
        ) from error


_MIXTURE = (
    "All losses of a step must be divided by the number of replicas, or none. Received: a loss function that "
    "returns a scalar, which Keras does not divide, beside losses or penalties that it divides, so that the "
    "scalar counts as many times as there are replicas. Let the loss function return one value for each row, "
    "or call `keras_shardopt.prepare(model)`."
)


_READ = (
    "Whether the loss of a step that reads the number of replicas is divided by it cannot be known for sure. "
    "Received: one in which that number is not found, so that `CrossShard` averages the gradients of the replicas. Use "
    '`CrossShard(..., gradients="local")` if that is right, and `CrossShard(..., gradients="prescaled")` if the step '
    "divides in another place."
)


def _doubts(seen: set[str]) -> list[str]:
    """What may be wrong with gradients of a step in which this was seen of the losses."""
    doubts = []
    if {tf_losses.DIVIDED, tf_losses.UNDIVIDED} <= seen:
        doubts.append(_MIXTURE)
    if tf_losses.BARE_TERM in seen:
        doubts.append(
            "All terms of a loss must be divided by the number of replicas, or none. Received: a loss with a term that "
            "is not, such as a bare mean, beside one that Keras divides, so that it counts as many times as there are "
            "replicas. Divide it, too: `term / tf.distribute.get_strategy().num_replicas_in_sync`."
        )
    is_mean = tf_losses.IN_MODEL in seen and tf_losses.SUM not in seen
    if seen.isdisjoint({tf_losses.DIVIDED, tf_losses.UNDIVIDED}) and not is_mean:
        doubts.append(
            "Whether the loss of a custom training step is divided by the number of replicas cannot be known. "
            "Received: a step in which nothing was seen to divide, so that `CrossShard` averages the gradients of the "
            'replicas. Use `CrossShard(..., gradients="local")` if the loss is the mean over the rows of one replica, '
            'and `CrossShard(..., gradients="prescaled")` if it is divided by the number of replicas, or by the rows '
            "of the whole batch."
        )
    if tf_losses.OWN_WEIGHTS in seen:
        doubts.append(
            'A loss with `reduction="mean_with_sample_weight"` divides by the weights of all rows. Received: a model '
            "that is not prepared, so that each replica divides by the weights of its own rows, and the update is "
            "another one than that of one process. Call `keras_shardopt.prepare(model)` after `compile`."
        )
    return doubts


_REDUCE = {"sum": tf.reduce_sum, "mean": tf.reduce_mean, "max": tf.reduce_max}


def _sum_on_tpu(tensor: Tensor, groups: Groups) -> Tensor:
    # The op that `tf.compat.v1.tpu.cross_replica_sum` makes. It has no kernel elsewhere.
    assignment = tf.constant([list(group) for group in groups], tf.int32)
    return tf.raw_ops.CrossReplicaSum(input=tf.convert_to_tensor(tensor), group_assignment=assignment)


def _positions(groups: Groups) -> Tensor:
    """For every replica id, its position inside its group."""
    order = {replica: position for group in groups for position, replica in enumerate(group)}
    return tf.constant([order[replica] for replica in range(len(order))])


def _divided(tensor: Tensor, divisor: int) -> Tensor:
    if isinstance(tensor, tf.IndexedSlices):
        return tf.IndexedSlices(_divided(tensor.values, divisor), tensor.indices, tensor.dense_shape)
    return tensor / tf.cast(divisor, tensor.dtype)


def _num_mirrored(variable: Any) -> int:
    """On how many replicas a variable has copies."""
    value = variable.value if isinstance(variable, keras.Variable) else variable
    strategy = value.distribute_strategy if isinstance(value, tf.distribute.DistributedValues) else None
    return 1 if strategy is None else int(strategy.num_replicas_in_sync)


def _check_mirrored(variables: Sequence[Variable], num_replicas: int) -> None:
    """Raises ValueError if not each of the replicas has copies of these variables."""
    for variable in variables if num_replicas > 1 else ():
        if num_replicas > _num_mirrored(variable):  # Keras would fail without a word, or train on one device
            raise ValueError(
                f"`{getattr(variable, 'path', variable.name)}` was made outside the strategy of the optimizer, which "
                f"has {num_replicas} replicas. Build the model inside `with keras_shardopt.data_parallel():`, where "
                "the optimizer is made, and load a saved one there, too."
            )


def check_made_inside(optimizers: Sequence[Any]) -> None:
    """Raises ValueError if one of these was made outside the strategy in whose scope it is about to be built."""
    strategy = tf.distribute.get_strategy()
    for optimizer in optimizers if strategy.num_replicas_in_sync > 1 else ():
        if not optimizer.built and _num_mirrored(optimizer._iterations) == 1:
            raise ValueError(
                "The optimizer of a model must be made in the scope of the model's strategy. "
                f"Received: {with_article(optimizer)} that was made outside it, for a model on "
                f"{strategy.num_replicas_in_sync} replicas. Make it, and call `compile`, inside "
                "`with model.distribute_strategy.scope():`."
            )


def _check_trainer(model: Any) -> None:
    """Raises ValueError where a model was compiled for what Keras' trainer cannot do with several replicas."""
    if model is None or not getattr(model, "compiled", False) or model.run_eagerly:
        return
    if model.jit_compile:
        raise ValueError(
            "Under a strategy with several replicas TensorFlow cannot compile the whole step with XLA. "
            f"Received: jit_compile=True, for the model `{model.name}`. Use `model.compile(..., jit_compile=False)`; "
            "for a model that is loaded from a file, set `model.jit_compile = False` before `fit`."
        )
    if model.steps_per_execution > 1 and "_make_function" not in vars(model):
        raise ValueError(
            "Under a strategy with several replicas Keras' loop of several steps fails. "
            f"Received: steps_per_execution={model.steps_per_execution}, for the model `{model.name}`. Call "
            "`keras_shardopt.prepare(model)` after `compile`, which makes the steps one by one, or leave it out."
        )


def _cond(condition: Any, action: Callable[[], Any]) -> None:
    if isinstance(condition, bool):
        if condition:
            action()
        return

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
    steps_are_traced = True

    num_replicas_of_last_scope: int = 1
    """Of the scope that was entered last, also after it was left, until it is closed for good."""

    def makes_variables_together(self) -> bool:
        return tf.distribute.has_strategy() and self.process()[0] > 1

    def as_written(self, function: FunctionT) -> FunctionT:
        plain: FunctionT = tf.autograph.experimental.do_not_convert(function)
        return plain

    def notice(self, optimizer: Any) -> None:
        super().notice(optimizer)
        _refuse_trainer(tf.distribute.get_strategy())
        tf_losses.watch()

    def place_tower(self, device: str) -> contextlib.AbstractContextManager[Any]:
        scope: contextlib.AbstractContextManager[Any] = tf.device(device)
        return scope

    def divide_rows(self, tensor: Tensor, num_parts: int) -> list[Tensor]:
        if isinstance(tensor, tf.SparseTensor):
            return list(tf.sparse.split(sp_input=tensor, num_split=num_parts, axis=0))
        if tensor.shape[0] is not None:
            return super().divide_rows(tensor, num_parts)
        if isinstance(tensor, tf.RaggedTensor):
            size = tensor.nrows() // num_parts
            return [tensor[k * size : (k + 1) * size] for k in range(num_parts)]
        # XLA drops assertions, but fails with the name of the operation before anything runs.
        return list(tf.split(tensor, num_parts, name="num_towers_must_divide_the_batch"))

    @contextlib.contextmanager
    def running_if_divisible(self, tensors: Sequence[Tensor], divisor: int, rule: str, remedy: str) -> Iterator[None]:
        assertions = []
        for tensor in tensors:
            size = tensor.dense_shape[0] if isinstance(tensor, tf.SparseTensor) else _num_rows(tensor)
            assertions.append(tf.debugging.Assert(tf.equal(size % divisor, 0), [rule, size, remedy]))
        with tf.variable_creator_scope(_created_anyway), tf.control_dependencies(assertions):
            yield

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

    def num_replicas_of_scope(self) -> int:
        return int(tf.distribute.get_strategy().num_replicas_in_sync)

    def check_scope(self, variables: Sequence[Variable], num_replicas: int, optimizer: Any) -> None:
        _check_mirrored(variables, max(num_replicas, self.num_replicas_of_scope()))
        check_made_inside([optimizer])

    def forget_scope(self) -> None:
        self.num_replicas_of_last_scope = 1

    def check_loaded(self, variables: Sequence[Variable]) -> None:
        if self.num_replicas_of_last_scope > 1 and not any(_num_mirrored(variable) > 1 for variable in variables):
            warnings.warn(
                "A model that is to train on several replicas must be loaded inside the scope. Received: a loaded "
                f"optimizer and weights that are on one device, after a scope of {self.num_replicas_of_last_scope} "
                "replicas. Load it inside `with keras_shardopt.data_parallel():`. To train on one device, load it "
                "inside `with keras_shardopt.data_parallel(1):`.",
                stacklevel=2,
            )

    def check_ready(self, variables: Sequence[Variable], optimizers: Sequence[Any]) -> None:
        if tf.distribute.get_strategy().num_replicas_in_sync == 1:
            num_replicas = max((_num_mirrored(optimizer.iterations) for optimizer in optimizers), default=1)
            _check_mirrored(variables, num_replicas)
            return
        _check_trainer(tf_losses.model_of_step())
        for optimizer in optimizers:
            for argument in ("gradient_accumulation_steps", "ema_overwrite_frequency"):
                if getattr(optimizer, argument, None):
                    given = f"{argument}={getattr(optimizer, argument)}"
                    raise ValueError(
                        f"`{argument}` of an inner optimizer cannot work under a strategy with several replicas: it "
                        "puts a meeting of the replicas inside a condition, which TensorFlow forbids. "
                        f"Received: {type(optimizer).__name__}({given}). "
                        + (
                            f"Use `CrossShard({type(optimizer).__name__}(...), {given})`."
                            if argument == "gradient_accumulation_steps"
                            else f"Leave `{argument}` out."
                        )
                    )

    def gradients_and_more(
        self, loss: Callable[[], tuple[Tensor, Any]], variables: Sequence[Variable], axis_name: str
    ) -> tuple[list[Tensor | None], Any]:
        with tf.GradientTape() as tape:
            value, more = loss()
        found: list[Tensor | None] = tape.gradient(value, list(variables))
        return found, more

    arrival_in_steps = Arrival.LOCAL

    num_replicas_of_steps = num_replicas_of_scope

    def compiled(
        self, function: Callable[..., Tensor], variables: Sequence[Variable], jit_compile: bool | None
    ) -> Callable[..., Tensor]:
        from keras_shardopt.steps import tensorflow as tf_step  # it builds on this module

        return tf_step.compiled(function, jit_compile)

    def when(self, condition: Any, action: Callable[[], None], variables: Sequence[Variable]) -> None:
        _cond(condition, action)

    def beside(self, variable: Variable) -> contextlib.AbstractContextManager[Any]:
        strategy = getattr(getattr(variable, "value", variable), "distribute_strategy", None)
        # On a replica new variables are the strategy's anyway, and its scope cannot be entered.
        if strategy is None or (tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()):
            return contextlib.nullcontext()
        scope: contextlib.AbstractContextManager[Any] = strategy.scope()
        return scope

    def num_copies(self, variables: Sequence[Variable]) -> int:
        values = [getattr(variable, "value", variable) for variable in variables]
        distributed = [value for value in values if isinstance(value, tf.distribute.DistributedValues)]
        strategies = [value.distribute_strategy for value in distributed]
        if not strategies or strategies[0].num_replicas_in_sync == 1:
            return 1
        if not isinstance(strategies[0], tf.distribute.MirroredStrategy):
            raise ValueError(
                "`shard_state=True` works on TensorFlow under a `MirroredStrategy`. "
                f"Received: {with_article(strategies[0])}. Use `shard_state=False` here."
            )
        return int(strategies[0].num_replicas_in_sync)

    def copies(self, variable: Variable) -> list[np.ndarray]:
        value = getattr(variable, "value", variable)
        return [np.asarray(copy) for copy in getattr(value, "values", [value])]

    def assign_each(self, variable: Variable, arrays: Sequence[np.ndarray]) -> None:
        value = getattr(variable, "value", variable)
        for copy, array in zip(getattr(value, "values", [value]), arrays, strict=True):
            copy.assign(array.astype(copy.dtype.as_numpy_dtype))

    def without_replicas(self, function: Callable[[], Any]) -> Any:
        # A strategy is known to the thread in which its scope was entered.
        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            return executor.submit(function).result()

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
        note_again = tf_losses.carried()

        def update_on_replica(grads: Sequence[Any]) -> None:
            note_again()
            update(grads)

        def together(strategy: tf.distribute.Strategy, condition: Any, grads: Any) -> None:
            first = strategy.experimental_local_results(condition)[0]
            _cond(first, lambda: strategy.extended.call_for_each_replica(update_on_replica, args=(grads,)))

        tf.distribute.get_replica_context().merge_call(together, args=(condition, grads))

    def is_known(self, value: Any) -> bool:
        return tf.executing_eagerly()

    def is_in_reach(self, tensor: Tensor) -> bool:
        graph = getattr(tensor, "graph", None)  # an eager tensor has none
        return tf.executing_eagerly() if graph is None else graph is tf.compat.v1.get_default_graph()

    def is_further_inside(self, tensor: Tensor) -> bool:
        graph, here = getattr(tensor, "graph", None), tf.compat.v1.get_default_graph()
        while graph is not None and graph is not here:
            graph = getattr(graph, "outer_graph", None)
        return graph is not None and not tf.executing_eagerly()

    def stop_if(
        self, condition: Any, culprit: Tensor, names: Sequence[str], rule: str, after: Sequence[Variable] = ()
    ) -> None:
        if tf.executing_eagerly():
            super().stop_if(condition, culprit, names, rule)
            return
        name = tf.gather(tf.constant([*names, "a variable that cannot be told"]), culprit[1] % (len(names) + 1))
        said = [rule, "Received: NaN or infinity on replica", culprit[0], "(-1: unknown), first in that of", name]
        # Nothing else orders them: the assignments are not of what the condition is made of.
        with tf.control_dependencies([tf.identity(keras.ops.convert_to_tensor(variable)) for variable in after]):
            tf.debugging.Assert(tf.logical_not(condition), said)

    def gradient_of(self, function: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
        value = tf.convert_to_tensor(value)  # what Keras' own conversion leaves a variable
        with tf.GradientTape() as tape:
            tape.watch(value)
            result = function(value)
        return tape.gradient(result, value)

    def outside_trace(self) -> contextlib.AbstractContextManager[Any]:
        scope: contextlib.AbstractContextManager[Any] = tf.init_scope()
        return scope

    def versions(self) -> dict[str, str]:
        return {"TensorFlow": tf.__version__}

    def process(self) -> tuple[int, int]:
        if tf.distribute.has_strategy():
            return _process_of(tf.distribute.get_strategy().cluster_resolver)
        # Also outside the scope of the strategy, where a worker is known by its environment alone.
        return _process_of(tf.distribute.cluster_resolver.TFConfigClusterResolver())

    @contextlib.contextmanager
    def world(self, num_replicas: int | None, timeout: datetime.timedelta | None = None) -> Iterator[World]:
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
            yield _world_of(strategy)
            return
        devices = _devices(num_replicas)
        self.num_replicas_of_last_scope = len(devices)
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

    def prepare(self, model: Any, reducers_of: Callable[[Any], list[Any]]) -> None:
        from keras_shardopt.fit import tensorflow as tf_fit  # it builds on this module

        if all(_num_mirrored(variable) == 1 for variable in model.trainable_variables):
            _check_mirrored(model.trainable_variables, self.num_replicas_of_last_scope)
        tf_fit.prepare(model, reducers_of)

    def largest_difference(self, variables: Sequence[Variable]) -> float:
        largest = 0.0
        for variable in variables:
            value = getattr(variable, "value", variable)
            first, *others = [np.asarray(copy, "float64") for copy in getattr(value, "values", [value])]
            for other in others:
                largest = max(largest, float(np.max(np.abs(other - first), initial=0.0)))
        return largest

    def fingerprints(self, variables: Sequence[Variable]) -> np.ndarray:
        values = [variable.value if isinstance(variable, keras.Variable) else variable for variable in variables]
        strategy = next((v.distribute_strategy for v in values if hasattr(v, "values")), None)
        if strategy is None:
            return np.zeros((1, len(values)), "uint64")
        # The copies in this process; a variable that is not the strategy's has one, and equals itself everywhere.
        num_local = max(len(getattr(value, "values", [0])) for value in values)
        rows = []
        for replica in range(num_local):
            copies = [getattr(value, "values", [value] * num_local)[replica] for value in values]
            with tf.device(copies[0].device):
                rows.append(_fingerprints([tf.convert_to_tensor(copy) for copy in copies]))
        mine = np.stack([row.numpy() for row in rows]).astype("uint64")
        return np.concatenate(self._gather(strategy, mine))

    def alone(self, function: Callable[[], Any]) -> Any:
        if _process_of(tf.distribute.get_strategy().cluster_resolver)[0] == 1:
            return function()
        # In a thread of its own, which knows of no strategy: under this one, workers make new variables together.
        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            return executor.submit(function).result()

    def together(self, variable: Variable) -> contextlib.AbstractContextManager[Any]:
        return self.beside(variable)

    def reads_together(self, variables: Sequence[Variable]) -> bool:
        values = [variable.value if isinstance(variable, keras.Variable) else variable for variable in variables]
        return any(
            value.synchronization is tf.VariableSynchronization.ON_READ
            and _process_of(value.distribute_strategy.cluster_resolver)[0] > 1
            for value in values
            if hasattr(value, "distribute_strategy")
        )

    def draw_apart(self, variables: Sequence[Variable]) -> None:
        from keras_shardopt.backends.tensorflow import random_numbers as tf_random

        if tf.distribute.has_strategy():
            tf_random.draw_apart()

    def gather_objects(self, value: Any) -> list[Any]:
        strategy = tf.distribute.get_strategy()
        world = _world_of(strategy)
        if world.num_processes == 1:
            return [value]
        mine = np.frombuffer(pickle.dumps(value), "uint8")
        num_local = world.num_replicas // world.num_processes

        def everyones(array: np.ndarray) -> np.ndarray:
            return self._gather(strategy, np.stack([array] * num_local))[0][::num_local]

        def gathered() -> list[Any]:
            with strategy.scope():
                lengths = everyones(np.array(len(mine)))
                padded = np.zeros(int(max(lengths)), "uint8")
                padded[: len(mine)] = mine
                rows = everyones(padded).astype("uint8")
            return [pickle.loads(row[: int(length)].tobytes()) for row, length in zip(rows, lengths)]

        # In a thread of its own, which knows nothing of a replica, or a graph that is being traced, in this one.
        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            return executor.submit(gathered).result()

    def _gather(self, strategy: tf.distribute.Strategy, array: np.ndarray) -> list[np.ndarray]:
        """The arrays (of unsigned integers below 2**63, all of one shape) of all processes."""
        world = _world_of(strategy)
        if world.num_processes == 1:
            return [array]
        values = strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(
                array[context.replica_id_in_sync_group - world.replica_id][None].astype("int64")
            )
        )
        return [strategy.gather(values, axis=0).numpy().astype("uint64")]


_KERAS_TRAINER = "keras.src.backend.tensorflow.trainer"


def _refuse_trainer(strategy: tf.distribute.Strategy) -> None:
    """Makes Keras' trainer fail with words that help where it would fail without."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) or "reduce" in vars(strategy):
        return
    # Nothing of ours is called before Keras fails, except what Keras fails in: it hands this strategy per-replica
    # batches (`fit`, `evaluate`) and scalars (`train_on_batch`) to reduce that it cannot. Others may reduce as ever.
    strategy.reduce = types.MethodType(_reduce_unless_for_trainer, strategy)


def _reduce_unless_for_trainer(strategy: tf.distribute.Strategy, *args: Any, **kwargs: Any) -> Any:
    if sys._getframe(1).f_globals.get("__name__") == _KERAS_TRAINER:
        raise ValueError(
            "Keras' own `fit`, `evaluate`, `train_on_batch` and `test_on_batch` cannot run under a "
            "`MultiWorkerMirroredStrategy`: Keras reduces batches and metrics in ways that this strategy does not know "
            f"(keras issue 20585). Received: a strategy with {strategy.num_replicas_in_sync} replicas in "
            f"{_world_of(strategy).num_processes} processes. Write the loop yourself: `strategy.run(step)`, where "
            "`step` computes the gradients of the loss divided by the number of replicas and calls "
            "`optimizer.apply(gradients, variables)`."
        )
    return type(strategy).reduce(strategy, *args, **kwargs)


@tf.function(jit_compile=True, reduce_retracing=False)
def _fingerprints(tensors: list[Tensor]) -> Tensor:
    return tf.stack([_fingerprint(tensor) for tensor in tensors])


def _fingerprint(tensor: Tensor) -> Tensor:
    # The sum of h(w_i + i * c) over the 32-bit words w_i, modulo 2**32, where h (the last steps of MurmurHash3) takes
    # no two words to the same one: another word, another sum. A linear h would not do: with it, two floats of
    # opposite sign could change places unseen.
    words = _words(tensor)
    mixed = words + tf.cast(tf.range(tf.size(words)), tf.uint32) * tf.constant(0x9E3779B9, tf.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        mixed = tf.bitwise.bitwise_xor(mixed, tf.bitwise.right_shift(mixed, tf.constant(shift, tf.uint32)))
        mixed *= tf.constant(factor, tf.uint32)
    return tf.reduce_sum(mixed)


def _words(tensor: Tensor) -> Tensor:
    """The bits of a tensor in unsigned integers of 32 bits, each of a whole element or a part of one."""
    if tensor.dtype.is_complex:
        tensor = tf.stack([tf.math.real(tensor), tf.math.imag(tensor)])
    if tensor.dtype != tf.bool:
        tensor = tf.bitcast(tensor, {1: tf.uint8, 2: tf.uint16}.get(tensor.dtype.size, tf.uint32))
    return tf.cast(tf.reshape(tensor, [-1]), tf.uint32)


def _created_anyway(create: Any, **arguments: Any) -> Any:
    # An initial value that waits for an assertion cannot be computed outside the function, which XLA needs.
    with tf.control_dependencies(None):
        return create(**arguments)


def _num_rows(tensor: Tensor) -> Tensor:
    return tensor.nrows() if isinstance(tensor, tf.RaggedTensor) else tf.shape(tensor)[0]


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


def _process_of(resolver: Any) -> tuple[int, int]:
    """How many tasks of the cluster train, and which of them this is."""
    spec = {} if resolver is None else resolver.cluster_spec().as_dict()
    tasks = [(kind, i) for kind in ("chief", "worker") for i in range(len(spec.get(kind, [])))]
    me = None if resolver is None else (resolver.task_type, resolver.task_id)
    return (len(tasks), tasks.index(me)) if me in tasks else (1, 0)


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
