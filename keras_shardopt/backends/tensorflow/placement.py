"""Variables on TensorFlow, mirrored by a strategy.

Private names of Keras touched here (a test checks that each exists):
    `Optimizer._distribution_strategy` - the strategy of an optimizer, used by its updates.
    `Variable._initialize` - creates TensorFlow's variable in the current scope.

Private names of TensorFlow touched here (tests/unit/wrapping/test_tensorflow_checkpoint.py checks that each exists):
    `Trackable._serialize_to_tensors`, `_restore_from_tensors` - the tensors of a variable in a checkpoint.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_shardopt.arguments import with_article
from keras_shardopt.backends.keras_callers import warn_user
from keras_shardopt.backends.models import is_prepared
from keras_shardopt.backends.patches import install
from keras_shardopt.backends.placement import Placement
from keras_shardopt.backends.tensorflow import losses as tf_losses
from keras_shardopt.backends.tensorflow.communicator import _process_of
from keras_shardopt.backends.tensorflow.processes import gather, num_replicas_when_made, processes
from keras_shardopt.backends.tensorflow.runtime import disable_reduction
from keras_shardopt.numerics import Tensor, Variable

_VALUE = "VARIABLE_VALUE"
"""The name of a variable's value in a `tf.train.Checkpoint`."""


def _value_of(variable: Any) -> Any:
    """Return TensorFlow's variable: the one inside a Keras variable, or `variable` itself."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def _copies_of(variable: Any) -> Sequence[Any]:
    """Return the copies of a variable on the replicas of this process."""
    value = _value_of(variable)
    copies: Sequence[Any] = getattr(value, "values", [value])
    return copies


def num_mirrored(variable: Any) -> int:
    """Return on how many replicas a variable has copies."""
    value = _value_of(variable)
    strategy = value.distribute_strategy if isinstance(value, tf.distribute.DistributedValues) else None
    return 1 if strategy is None else int(strategy.num_replicas_in_sync)


def check_mirrored(variables: Sequence[Variable], num_replicas: int) -> None:
    """Raise ValueError unless every replica has a copy of each of these variables."""
    for variable in variables if num_replicas > 1 else ():
        if num_replicas > num_mirrored(variable):  # Keras would fail with an unclear error, or train on one device
            raise ValueError(
                f"`{getattr(variable, 'path', variable.name)}` was made outside the strategy of the optimizer, which "
                f"has {num_replicas} replicas. Build or load the model, and create the optimizer, inside "
                "`with keras_shardopt.data_parallel():`."
            )


def move_into_strategy(optimizers: Sequence[Any]) -> None:
    """Move optimizers and their variables into the current strategy. Raise ValueError inside `strategy.run`."""
    strategy = tf.distribute.get_strategy()
    for optimizer in optimizers if strategy.num_replicas_in_sync > 1 else ():
        if optimizer._distribution_strategy is strategy:
            continue
        if not tf.distribute.in_cross_replica_context():
            raise ValueError(
                "An optimizer that is first used inside `strategy.run` must be made in the scope of that strategy. "
                f"Received: {with_article(optimizer)} made outside this scope, for {strategy.num_replicas_in_sync} "
                "replicas. Create it inside `with strategy.scope():`, or call `build` of the optimizer there."
            )
        optimizer._distribution_strategy = strategy
        mirror(optimizer.variables)


def mirror(variables: Sequence[Variable]) -> None:
    """Copy variables from outside the current strategy to each of its replicas."""
    strategy = tf.distribute.get_strategy()
    for variable in variables if strategy.num_replicas_in_sync > 1 else ():
        if not strategy.extended.variable_created_in_scope(variable.value):
            variable._initialize(variable.numpy())


def _check_trainer(model: Any) -> None:
    """Raise ValueError if the model's `compile` options fail in Keras' trainer with several replicas."""
    if model is None or not getattr(model, "compiled", False) or model.run_eagerly:
        return
    if model.jit_compile:
        raise ValueError(
            "Under a strategy with several replicas, TensorFlow cannot compile the whole step with XLA. "
            f"Received: jit_compile=True, for the model `{model.name}`. Use `model.compile(..., jit_compile=False)`; "
            "for a loaded model, set `model.jit_compile = False` before `fit`."
        )
    if model.steps_per_execution > 1 and not is_prepared(model):
        raise ValueError(
            "Under a strategy with several replicas, Keras' loop of several steps fails. Received: "
            f"steps_per_execution={model.steps_per_execution}, for the model `{model.name}`. Call "
            "`keras_shardopt.prepare(model)` after `compile`, to run single steps, or omit `steps_per_execution`."
        )


def _check_can_divide(variables: Sequence[Variable]) -> None:
    values = map(_value_of, variables)
    strategies = [value.distribute_strategy for value in values if isinstance(value, tf.distribute.DistributedValues)]
    if (
        strategies
        and strategies[0].num_replicas_in_sync > 1
        and not isinstance(strategies[0], tf.distribute.MirroredStrategy)
    ):
        raise ValueError(
            "`shard_state=True` needs a `MirroredStrategy` on TensorFlow. "
            f"Received: {with_article(strategies[0])}. Use `shard_state=False` here."
        )


def _warn_if_loaded_outside(variables: Sequence[Variable]) -> None:
    is_alone = not any(num_mirrored(variable) > 1 for variable in variables)
    if processes.num_replicas_of_last_scope > 1 and is_alone and processes.process()[1] == 0:
        warn_user(
            "To train a loaded model on several replicas, load the model inside the scope. Received: a loaded "
            f"optimizer and weights on one device, after a scope of {processes.num_replicas_of_last_scope} replicas. "
            "Load the model inside `with keras_shardopt.data_parallel():`. To train on one device, load the model "
            "inside `with keras_shardopt.data_parallel(1):`."
        )


class TensorFlowPlacement(Placement):
    """Places variables on TensorFlow. A `tf.distribute` strategy mirrors variables on its devices, the replicas."""

    state_sharding = "copies"

    def before_build(
        self, variables: Sequence[Variable], optimizer: Any, innermost: Sequence[Any], shards_state: bool
    ) -> None:
        check_mirrored(variables, max(num_replicas_when_made(optimizer), processes.num_replicas()))
        move_into_strategy([optimizer, *innermost])
        if shards_state:
            _check_can_divide(variables)
        disable_reduction(innermost, optimizer.scope_inside)
        if tf.distribute.has_strategy():
            install("randomness")

    def check(
        self,
        variables: Sequence[Variable],
        optimizers: Sequence[Any],
        is_loaded: bool = False,
        shards_state: bool = False,
    ) -> None:
        if is_loaded:
            _warn_if_loaded_outside(variables)
        if tf.distribute.get_strategy().num_replicas_in_sync == 1:
            num_replicas = max((num_mirrored(optimizer.iterations) for optimizer in optimizers), default=1)
            check_mirrored(variables, num_replicas)
            return
        _check_trainer(tf_losses.model_of_step())
        for optimizer in optimizers:
            for argument in ("gradient_accumulation_steps", "ema_overwrite_frequency"):
                if getattr(optimizer, argument, None):
                    given = f"{argument}={getattr(optimizer, argument)}"
                    raise ValueError(
                        f"`{argument}` of the optimizer inside `CrossShard` cannot work with several replicas, because "
                        "replicas of TensorFlow cannot communicate inside a condition. Received: "
                        f"{type(optimizer).__name__}({given}). "
                        + (
                            f"Use `CrossShard({type(optimizer).__name__}(...), {given})`."
                            if argument == "gradient_accumulation_steps"
                            else f"Omit `{argument}`."
                        )
                    )

    def colocate_with(self, variable: Variable) -> contextlib.AbstractContextManager[Any]:
        strategy = getattr(_value_of(variable), "distribute_strategy", None)
        # Inside `strategy.run`, new variables already belong to the strategy, and its scope cannot be entered again.
        if strategy is None or (tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()):
            return contextlib.nullcontext()
        scope: contextlib.AbstractContextManager[Any] = strategy.scope()
        return scope

    def replica_values(self, variable: Variable) -> list[np.ndarray]:
        return [np.asarray(copy) for copy in _copies_of(variable)]

    def assign_replica_values(self, variable: Variable, arrays: Sequence[np.ndarray]) -> None:
        if len(arrays) == 1:
            variable.assign(arrays[0])
            return
        for copy, array in zip(_copies_of(variable), arrays, strict=True):
            copy.assign(array.astype(copy.dtype.as_numpy_dtype))

    def outside_strategy(self, function: Callable[[], Any]) -> Any:
        if not tf.distribute.has_strategy():
            return function()
        # Use a new thread: a strategy's scope applies only to the thread that entered it. Inside the scope, all workers
        # would have to create a variable together.
        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            return executor.submit(function).result()

    def bytes_held(self, variables: Sequence[Variable]) -> int:
        copies = map(_copies_of, variables)
        return sum(max(copy.shape.num_elements() * copy.dtype.size for copy in each) for each in copies)

    def fingerprints(self, variables: Sequence[Variable]) -> np.ndarray:
        values = [_value_of(variable) for variable in variables]
        strategy = next((v.distribute_strategy for v in values if hasattr(v, "values")), None)
        if strategy is None:
            return np.zeros((1, len(values)), "uint64")
        # Hash this process's copies, one per replica. A variable outside the strategy has one copy for all replicas.
        num_local = max(len(getattr(value, "values", [0])) for value in values)
        rows = []
        for replica in range(num_local):
            copies = [getattr(value, "values", [value] * num_local)[replica] for value in values]
            with tf.device(copies[0].device):
                rows.append(_fingerprints([tf.convert_to_tensor(copy) for copy in copies]))
        mine = np.stack([row.numpy() for row in rows]).astype("uint64")
        return np.concatenate(gather(strategy, mine))


placement = TensorFlowPlacement()


def store_whole(variable: Variable, shape: Sequence[int]) -> None:
    """Make TensorFlow's checkpoints store one array of this shape for a variable whose copies each hold a slice."""
    copies = variable.value.values

    def serialize() -> dict[str, Tensor]:
        whole = tf.concat([tf.convert_to_tensor(copy) for copy in copies], 0)
        return {_VALUE: tf.reshape(whole[: math.prod(shape)], shape)}

    def restore(tensors: dict[str, Tensor]) -> Tensor:
        whole = tf.reshape(tensors[_VALUE], [-1])
        missing = len(copies) * int(copies[0].shape[0]) - math.prod(shape)
        rows = tf.split(tf.pad(whole, [[0, missing]]), len(copies))
        return tf.group(*(copy.assign(row) for copy, row in zip(copies, rows)))

    variable._serialize_to_tensors, variable._restore_from_tensors = serialize, restore


def reading_is_collective(variables: Sequence[Variable]) -> bool:
    """Return whether all processes must read the values of these variables together."""
    return any(
        value.synchronization is tf.VariableSynchronization.ON_READ
        and _process_of(value.distribute_strategy.cluster_resolver)[0] > 1
        for value in map(_value_of, variables)
        if hasattr(value, "distribute_strategy")
    )


@tf.function(jit_compile=True, reduce_retracing=False)
def _fingerprints(tensors: list[Tensor]) -> Tensor:
    return tf.stack([_fingerprint(tensor) for tensor in tensors])


def _fingerprint(tensor: Tensor) -> Tensor:
    # The hash is the sum of h(w_i + i * c) over the 32-bit words w_i, modulo 2**32. h, the last steps of MurmurHash3,
    # is a bijection, so changing one word always changes the sum. If h were linear, swapping two words would not
    # change the sum.
    words = _words(tensor)
    mixed = words + tf.cast(tf.range(tf.size(words)), tf.uint32) * tf.constant(0x9E3779B9, tf.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        mixed = tf.bitwise.bitwise_xor(mixed, tf.bitwise.right_shift(mixed, tf.constant(shift, tf.uint32)))
        mixed *= tf.constant(factor, tf.uint32)
    return tf.reduce_sum(mixed)


def _words(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as uint32: one number per element, or two per element of 8 bytes."""
    if tensor.dtype.is_complex:
        tensor = tf.stack([tf.math.real(tensor), tf.math.imag(tensor)])
    if tensor.dtype != tf.bool:
        tensor = tf.bitcast(tensor, {1: tf.uint8, 2: tf.uint16}.get(tensor.dtype.size, tf.uint32))
    return tf.cast(tf.reshape(tensor, [-1]), tf.uint32)
