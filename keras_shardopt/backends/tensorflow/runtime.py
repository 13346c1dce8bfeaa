"""Tracing and control flow on TensorFlow.

Private names of Keras touched here (a test checks that each exists):
    `Optimizer._all_reduce_sum_gradients` - the built-in reduction of Keras' TensorFlow optimizers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_shardopt.backends.communicator import Communicator, SingleReplica
from keras_shardopt.backends.gradient_scope import GradientScope
from keras_shardopt.backends.runtime import Runtime
from keras_shardopt.backends.tensorflow import losses as tf_losses
from keras_shardopt.backends.tensorflow.communicator import ReplicaContext
from keras_shardopt.numerics import FunctionT, Tensor, Variable


def _cond(condition: Any, action: Callable[[], Any], otherwise: Callable[[], Any] = lambda: None) -> None:
    if isinstance(condition, bool):
        (action if condition else otherwise)()
        return

    def acting(chosen: Callable[[], Any]) -> int:
        chosen()
        return 0

    tf.cond(condition, functools.partial(acting, action), functools.partial(acting, otherwise))


def _restore_unless(condition: Any, update: Callable[[], None], variables: Sequence[Variable]) -> None:
    """Call `update()`, then restore this replica's copies of `variables` if `condition` is false.

    Replicas must assign weights together, so none can assign inside a condition that differs between replicas.
    """
    before = [tf.identity(keras.ops.convert_to_tensor(variable)) for variable in variables]
    update()
    # Restore weights on each replica, but counters of Keras' optimizers on all replicas together, because assigning a
    # counter copies the first replica's value to all.
    is_own = [getattr(variable, "aggregation", "none") == "none" for variable in variables]
    own = [pair for pair, own_value in zip(zip(variables, before), is_own) if own_value]
    common = [pair for pair, own_value in zip(zip(variables, before), is_own) if not own_value]

    def restore() -> None:
        for variable, value in own:
            variable.assign(value)

    _cond(condition, lambda: None, restore)

    def together(strategy: tf.distribute.Strategy, condition: Any, before: Any) -> None:
        def count(copy: Any, value: Any, condition: Any, change: Any) -> Any:
            return copy.assign(value + tf.where(condition, change, tf.zeros_like(change)))

        for (variable, _), values in zip(common, before):
            copies = getattr(variable, "value", variable)
            now, value = (strategy.experimental_local_results(each)[0] for each in (copies, values))
            strategy.extended.update(copies, count, args=(values, condition, now - value))

    if common:
        context = tf.distribute.get_replica_context()
        context.merge_call(together, args=(condition, [value for _, value in common]))


_SCOPES = "_keras_shardopt_scopes"


def reducing_once(in_keras: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of `Optimizer._all_reduce_sum_gradients` that leaves reduced gradients unchanged."""

    @functools.wraps(in_keras)
    def reduce(optimizer: Any, grads_and_vars: Any) -> Any:
        if any(scope.is_reduced for scope in vars(optimizer).get(_SCOPES, ())):
            return list(grads_and_vars)
        return in_keras(optimizer, grads_and_vars)

    return reduce


def disable_reduction(optimizers: Sequence[Any], scope: GradientScope) -> None:
    """Keep these Keras optimizers from reducing gradients again that are already reduced, as recorded in `scope`."""
    for optimizer in optimizers:
        optimizer.__dict__[_SCOPES] = (*optimizer.__dict__.get(_SCOPES, ()), scope)


def num_summed() -> int:
    """Return the number of replicas over which Keras' optimizers sum gradients that are not yet reduced."""
    return int(runtime.communicator("").num_replicas)


class TensorFlowRuntime(Runtime):
    """Traces and differentiates on TensorFlow. The devices of a `tf.distribute` strategy are the replicas."""

    def no_autograph(self, function: FunctionT) -> FunctionT:
        plain: FunctionT = tf.autograph.experimental.do_not_convert(function)
        return plain

    def communicator(self, axis_name: str) -> Communicator:
        strategy = tf.distribute.get_strategy()
        if strategy.num_replicas_in_sync == 1:
            return SingleReplica()
        context = tf.distribute.get_replica_context()
        if context is None:
            raise ValueError(
                "Under a strategy with several replicas an optimizer must be applied on each replica. Received: a call "
                f"outside `strategy.run`, with {strategy.num_replicas_in_sync} replicas. Use `strategy.run(step)`, "
                "where `step` computes and applies the gradients."
            )
        return ReplicaContext(strategy, context)

    def value_and_grad(
        self,
        loss: Callable[[], tuple[Tensor, Any]],
        variables: Sequence[Variable],
        axis_name: str | None,
        before_assign: Callable[[Variable], None] | None = None,
    ) -> tuple[list[Tensor | None], Any]:
        with tf.GradientTape() as tape:
            if axis_name is None:
                tape.watch([getattr(variable, "value", variable) for variable in variables])
            value, more = loss()
        found: list[Tensor | None] = tape.gradient(value, list(variables))
        return found, more

    def cond(
        self,
        condition: Any,
        update: Callable[[Sequence[Any]], None],
        grads: Sequence[Any],
        variables: Sequence[Variable],
        communicates: bool = True,
        apart: bool = False,
        mostly: bool = False,
    ) -> None:
        grads = tuple(grads)
        if apart and not isinstance(condition, bool):
            _restore_unless(condition, lambda: update(grads), variables)
            return
        if not communicates or tf.__internal__.distribute.strategy_supports_no_merge_call():
            _cond(condition, lambda: update(grads))
            return

        # Replicas cannot communicate inside a condition, but updating a variable communicates. So evaluate the
        # condition outside the replica context, and update in a new replica context inside the condition.
        copy_loss_notes = tf_losses.carried()

        def update_on_replica(grads: Sequence[Any]) -> None:
            copy_loss_notes()
            update(grads)

        def together(strategy: tf.distribute.Strategy, condition: Any, grads: Any) -> None:
            first = strategy.experimental_local_results(condition)[0]
            _cond(first, lambda: strategy.extended.call_for_each_replica(update_on_replica, args=(grads,)))

        tf.distribute.get_replica_context().merge_call(together, args=(condition, grads))

    def add_n(self, variables: Sequence[Variable], values: Sequence[Tensor | None], starts: Any) -> None:
        # Assign or add in place. The default implementation selects between tensors, with twice the memory traffic.
        def begin() -> None:
            for variable, value in zip(variables, values):
                variable.assign(tf.zeros_like(variable) if value is None else value)

        def add() -> None:
            for variable, value in zip(variables, values):
                if value is not None:
                    getattr(variable, "value", variable).assign_add(value)

        _cond(starts, begin, add)

    def is_concrete(self, value: Any) -> bool:
        return tf.executing_eagerly()

    def raise_if(
        self, condition: Any, nonfinite_source: Tensor, names: Sequence[str], rule: str, after: Sequence[Variable] = ()
    ) -> None:
        if tf.executing_eagerly():
            super().raise_if(condition, nonfinite_source, names, rule)
            return
        name = tf.gather(tf.constant([*names, "an unidentified variable"]), nonfinite_source[1] % (len(names) + 1))
        message = [
            rule,
            "Received: NaN or infinity on replica",
            nonfinite_source[0],
            "(-1: unknown), first in the gradient of",
            name,
        ]
        # Without these dependencies, the assertion could run before the assignments, because it reads no variable.
        with tf.control_dependencies([tf.identity(keras.ops.convert_to_tensor(variable)) for variable in after]):
            tf.debugging.Assert(tf.logical_not(condition), message)

    def init_scope(self) -> contextlib.AbstractContextManager[Any]:
        scope: contextlib.AbstractContextManager[Any] = tf.init_scope()
        return scope


runtime = TensorFlowRuntime()
