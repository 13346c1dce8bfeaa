"""`Tower` and `replicate`: run a training step once per chunk of the batch (a run is a tower), and update once.

Private names of Keras touched here (test_tower.py checks that it exists):
    `keras.src.backend.common.global_state` - global attributes that `keras.utils.clear_session` clears.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import keras
from keras import ops, tree
from keras.src.backend.common import global_state

from keras_shardopt import arguments as check
from keras_shardopt.backends import for_backend
from keras_shardopt.numerics import FunctionT, Gradients, Tensor, Variable, add, map_values, overwrites_variable
from keras_shardopt.wrapping.chain import get_optimizer, shown
from keras_shardopt.wrapping.wrapper import OptimizerWrapper

# TensorFlow only (otherwise None): runs towers on several devices, while the weights stay on one device.
_on_devices = for_backend({"tensorflow": "keras_shardopt.backends.tensorflow.towers"})

_USED = "keras_shardopt_tower_has_been_used"

# Values of `loss_reduction`, with the names in `tf.losses.Reduction` of TensorFlow 1.
_SUMS = ("sum", "weighted_sum")
_MEANS = (
    "mean",
    "weighted_mean",
    "sum_over_batch_size",
    "weighted_sum_over_batch_size",
    "weighted_sum_by_nonzero_weights",
)


class _Replication:
    """The state of one call of a function that `replicate` has returned."""

    def __init__(self, num_towers: int, factor: float) -> None:
        self.num_towers = num_towers
        self.factor = factor
        self.tower = 0
        self.tower_was_used = False
        # The keys of these dicts are the `id` of an optimizer.
        self._calls: dict[int, list[_Call]] = {}
        self._names: dict[int, str] = {}
        self._num_calls: dict[int, list[int]] = {}  # how often each tower has called `apply`

    def collect(self, optimizer: Tower, grads: Gradients, variables: Sequence[Variable]) -> _Call | None:
        """Add the gradients of a tower's n-th `apply` call to those of earlier towers. The last tower gets the sums."""
        key = id(optimizer)
        self._names[key] = optimizer.name
        calls, counts = self._calls.setdefault(key, []), self._num_calls.setdefault(key, [0] * self.num_towers)
        position = counts[self.tower]
        counts[self.tower] += 1
        if self.tower > 0 and position >= counts[0]:
            self._raise_unequal_calls(key)
        if position == len(calls):
            calls.append(_Call())
        calls[position].add(grads, variables, optimizer._var_key, self.factor)
        if self.tower < self.num_towers - 1:
            return None
        call, calls[position] = calls[position], _Call()  # to free the gradients
        return call

    def end_tower(self) -> None:
        """Raise ValueError unless this tower called each optimizer as often as the first tower did."""
        if not self._num_calls:
            raise ValueError(
                "The step passed to `replicate` must update with a `Tower` optimizer. Received: a step that called no "
                f"`Tower` in tower {self.tower}. Use `Tower(optimizer)`. If the step itself is compiled (`jax.jit`, "
                '`tf.function`), compile the result of `replicate` instead. Under the "mixed_float16" policy, use '
                "`model.compile(Tower(LossScaleOptimizer(optimizer)), ..., auto_scale_loss=False)`: a "
                "`LossScaleOptimizer` around a `Tower` skips towers with an overflow."
            )
        for key, counts in self._num_calls.items():
            if counts[self.tower] != counts[0]:
                self._raise_unequal_calls(key)

    def _raise_unequal_calls(self, key: int) -> None:
        raise ValueError(
            "Each tower must call each `Tower` optimizer the same number of times. Received: "
            f"{self._num_calls[key][: self.tower + 1]} calls of `{self._names[key]}` in towers 0 to {self.tower}. Call "
            "each `Tower` for all data, outside conditions. If you compile, compile the result of `replicate`."
        )


class _Call:
    """The gradients of one `apply` call of an optimizer, summed over the towers so far."""

    def __init__(self) -> None:
        self._variables: dict[Any, Variable] = {}
        self._sums: dict[Any, Tensor | None] = {}

    def add(
        self,
        grads: Gradients,
        variables: Sequence[Variable],
        key_of: Callable[[Variable], Any],
        factor: float,
    ) -> None:
        for grad, variable in zip(grads, variables):
            key = key_of(variable)
            self._variables.setdefault(key, variable)
            before = self._sums.get(key)
            if grad is None:
                self._sums.setdefault(key, None)
                continue
            if overwrites_variable(variable):
                self._sums[key] = ops.copy(grad) if before is None else ops.maximum(before, grad)
                continue
            # Copy, because PyTorch adds the next tower's gradient to the same tensor, or sets it to zero.
            scaled = map_values(ops.copy if factor == 1 else lambda value: value * factor, grad)
            self._sums[key] = scaled if before is None else add(before, scaled, variable)

    @property
    def variables(self) -> list[Variable]:
        return list(self._variables.values())

    @property
    def grads(self) -> list[Tensor | None]:
        return list(self._sums.values())


_running = threading.local()  # per thread, because TensorFlow runs each replica's step in a thread


def _replication() -> _Replication | None:
    return getattr(_running, "replication", None)


@keras.saving.register_keras_serializable(package="keras_shardopt")
class Tower(OptimizerWrapper):
    r"""Accumulates the gradients of all towers of a step, and updates in the last tower.

    If $g_k$ is the gradient of tower $k$ of $K$, the inner optimizer gets, in the last tower,

    $\sum_k g_k$ (`loss_reduction="sum"`) or $\frac{1}{K} \sum_k g_k$ (otherwise).

    In the other towers, weights and `iterations` do not change. A missing gradient counts as 0. A variable without a
    gradient in all towers gets None. Sparse gradients (`tf.IndexedSlices`) are concatenated, and become dense only if
    the gradient of another tower is dense. For variables with `overwrite_with_gradient` (scales of float8 training),
    the largest value over towers is used.

    Outside `replicate`, and with one tower, each call updates directly.

    `Tower` is the outermost wrapper: `Tower(CrossShard(inner))` reduces once, for the sum over the towers. A step may
    use several `Tower` optimizers, or call one repeatedly. The n-th calls of an optimizer in all towers are one update.

    Args:
        optimizer_or_optimizer_fn: a `keras.optimizers.Optimizer`, its name or config, or a function without arguments
            that returns an optimizer. The function is called once, at first use.
        name: str or None. None derives a name from the class.

    Raises:
        TypeError: if `optimizer_or_optimizer_fn`, or at first use the function's result, is no optimizer.
        ValueError: inside `replicate`, if a `LossScaleOptimizer` or `CrossShard` is around this optimizer.

    Example:
        >>> import keras, keras_shardopt as ks
        >>> weight = keras.Variable(10.0)
        >>> optimizer = ks.Tower(lambda: keras.optimizers.SGD(1.0))
        >>> def step(batch):
        ...     optimizer.apply([keras.ops.sum(batch)], [weight])
        >>> in_towers = ks.replicate(step, num_towers=2, loss_reduction="sum")
        >>> in_towers(keras.ops.convert_to_tensor([1.0, 2.0]))
        >>> [float(keras.ops.convert_to_numpy(v)) for v in (weight, optimizer.iterations)]
        [7.0, 1.0]

    References:
        `tf.contrib.estimator.TowerOptimizer` of TensorFlow 1. It compared only the total number of calls, so it could
        lose gradients silently, and failed for a sparse gradient before a dense one. For the mean, it divided the loss;
        here gradients are divided, so custom training loops need no `scale_loss`.
    """

    _makes_gradients_global = True

    def __init__(self, optimizer_or_optimizer_fn: Any, name: str | None = None) -> None:
        given, is_made = optimizer_or_optimizer_fn, isinstance(optimizer_or_optimizer_fn, keras.optimizers.Optimizer)
        makes = callable(given) and not is_made
        self._init_around(None if makes else get_optimizer(given, "Tower", "optimizer_or_optimizer_fn"), name)
        self._factory = given if makes else None
        self._is_in_loss_scaling = False

    @property
    def inner(self) -> keras.optimizers.Optimizer:
        """The wrapped optimizer. The first access calls the function that creates it."""
        _mark_used()
        if self._factory is not None:
            made = get_optimizer(self._factory(), "Tower", "optimizer_or_optimizer_fn")
            self._inner, self._factory = (made,), None
        return self._inner[0]

    def __repr__(self) -> str:
        # Read `_inner`, so `repr` does not create the optimizer, and does not count as a use for `has_been_used`.
        factory = self._factory
        inside = shown(self._inner[0]) if factory is None else repr(factory)
        return f"{type(self).__name__}({inside})"

    def update_inner(self, grads: Gradients, variables: Sequence[Variable]) -> None:
        """Update. Inside `replicate`, collect the gradients of towers, and update in the last tower."""
        replication = _replication()
        if replication is None:
            self._collects = False
            super().update_inner(grads, variables)
            return
        self._check_is_outermost()
        call = replication.collect(self, grads, variables)
        self._collects = call is None
        if call is not None:
            super().update_inner(call.grads, call.variables)

    def _on_outer_loss_scaling(self) -> None:
        # Loss scaling around a `Tower` is an error only inside `replicate`, so `_check_is_outermost` raises it later.
        self._is_in_loss_scaling = True
        super()._on_outer_loss_scaling()

    def _check_is_outermost(self) -> None:
        outer = None
        if self._scope.is_reduced:
            outer = "CrossShard"
        elif self._is_in_loss_scaling:
            outer = "LossScaleOptimizer"
        if outer is not None:
            raise ValueError(
                f"Inside `replicate`, a `Tower` must be around `{outer}`, because `{outer}` otherwise runs once per "
                f"tower. Received: `{outer}` around a `Tower`. Use `Tower({outer}(optimizer))`"
                + (", and `model.compile(..., auto_scale_loss=False)`." if outer == "LossScaleOptimizer" else ".")
            )

    def get_name(self) -> str:
        """Return the name of the inner optimizer."""
        name: str = self.inner.name
        return name

    @staticmethod
    def has_been_used() -> bool:
        """Whether any `Tower` has used its inner optimizer. Even `get_name` counts as a use.

        Inside `replicate`, only uses in this call of the step count. Outside, all uses outside `replicate` count since
        the program started or `keras.utils.clear_session` was called.
        """
        replication = _replication()
        if replication is not None:
            return replication.tower_was_used
        return bool(global_state.get_global_attribute(_USED, False))


def _mark_used() -> None:
    replication = _replication()
    if replication is None:
        global_state.set_global_attribute(_USED, True)
    else:
        replication.tower_was_used = True


def replicate(
    step: FunctionT,
    num_towers: int,
    loss_reduction: str = "mean",
    devices: Sequence[str] | None = None,
) -> FunctionT:
    """Run a training step in towers: once per equal chunk of the batch, with one update at the end.

    The step must update with `Tower` optimizers. The batch, its last argument, may be any nested structure of arrays.
    Each array is split along dim 0 into `num_towers` chunks, in order. None and scalars go to every tower.

    - For `fit`, assign `model.train_step = ks.replicate(model.train_step, num_towers)` after `compile`. Towers run one
      after another, as micro-batches that need only one tower's memory for activations. After a first `fit` on
      TensorFlow or JAX, also call `model.make_train_function(force=True)`, because Keras keeps the compiled step.
    - A custom step is `step(batch) -> outputs`, or, as in Keras on JAX, `step(state, batch) -> (outputs, state)`. Each
      tower receives the previous tower's state. Pass inputs and targets as one batch: `step((x, y))`. Apply `jax.jit`
      or `tf.function` to the function that `replicate` returns, not to the step.

    Args:
        step: function to run.
        num_towers: int >= 1. With 1 the step runs unchanged, also without a `Tower`.
        loss_reduction: "mean" (default) averages the towers' gradients, for losses that are means over the batch, as
            in Keras ("sum_over_batch_size"). The update equals that of the whole batch, unless towers differ in masks
            or sums of sample weights. "sum" adds gradients, for losses that are sums. TensorFlow 1's names are also
            accepted; all but "weighted_sum" stand for "mean".
        devices: list of device names or None (default). TensorFlow only, such as `["GPU:0", "GPU:1"]`: tower k runs on
            device k, modulo their number. Weights stay on their device. None: the device of the step.

    Returns:
        A function with the arguments of `step`. It returns the last tower's outputs. (Metrics of Keras' `train_step`
        are then complete, because they accumulate over towers.) If the output is a float scalar, it counts as the
        loss, and is summed or averaged over towers.

    Raises:
        TypeError: if `step` is not callable or `num_towers` is not an int. When the step runs: if it is called with two
            arguments and does not return a pair with a state of the same shapes.
        ValueError: if `num_towers` or `loss_reduction` is invalid, or `devices` is not supported. When the step
            runs: if `num_towers` does not divide the batch, or towers differ in their number of optimizer calls.
        tf.errors.InvalidArgumentError: if `num_towers` does not divide the batch in a `tf.function` with an unknown
            batch size, such as the smaller last batch of `fit`. If the batch cannot be divided, no tower has run.

    Example:
        >>> import keras, numpy as np, keras_shardopt as ks
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile(ks.Tower(keras.optimizers.SGD(0.1)), loss="mse")
        >>> model.train_step = ks.replicate(model.train_step, num_towers=4)
        >>> history = model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=8, verbose=0)
        >>> int(keras.ops.convert_to_numpy(model.optimizer.iterations))
        1

    References:
        `tf.contrib.estimator.replicate_model_fn` of TensorFlow 1.
    """
    if not callable(step):
        raise TypeError(f"`step` must be a function. Received: step={step!r}. Use for example `model.train_step`.")
    num_towers = check.integer("num_towers", num_towers)
    _check_towers(loss_reduction, devices)
    factor = 1.0 if loss_reduction in _SUMS else 1.0 / num_towers

    @functools.wraps(step)
    def replicated(*args: Any) -> Any:
        if len(args) not in (1, 2):
            raise TypeError(
                "A replicated step must be called as `step(batch)` or `step(state, batch)`. "
                f"Received: {len(args)} arguments."
            )
        if num_towers == 1:
            return step(*args)
        *state, batch = args
        loss: Any = 0.0
        with _replicating(_Replication(num_towers, factor)) as replication, _divided(batch, num_towers) as parts:
            for tower, part in enumerate(parts):
                replication.tower = tower
                with _on_device(devices, tower):
                    returned = step(*state, part)
                replication.end_tower()
                outputs = returned
                if state:
                    outputs, state = _outputs_and_state(returned, state[0])
                if _is_loss(outputs):
                    outputs = loss = loss + outputs * factor
        return (outputs, *state) if state else outputs

    return cast(FunctionT, replicated)


def _check_towers(loss_reduction: str, devices: Sequence[str] | None) -> None:
    if not isinstance(loss_reduction, str) or loss_reduction not in _SUMS + _MEANS:
        raise ValueError(
            f'`loss_reduction` must be "sum" or "mean" (or one of {[*_SUMS[1:], *_MEANS[1:]]}). '
            f"Received: loss_reduction={loss_reduction!r}"
        )
    if devices is not None and _on_devices is None:
        raise ValueError(
            "`devices` is supported on TensorFlow only, because on other backends a tower needs the weights on its "
            f"device. Received: devices={devices!r}. Remove `devices`: towers then run one after another on one "
            "device. For several devices use `data_parallel()` with `CrossShard`."
        )
    if devices is not None and not devices:
        raise ValueError("`devices` must name at least one device. Received: devices=[]. Pass None instead.")


@contextlib.contextmanager
def _replicating(replication: _Replication) -> Iterator[_Replication]:
    if _replication() is not None:
        raise ValueError(
            "A replicated step must not run inside a replicated step. Call `replicate` once, around the step."
        )
    _running.replication = replication
    try:
        yield replication
    finally:
        _running.replication = None


def _is_loss(outputs: Any) -> bool:
    return isinstance(outputs, float) or (
        hasattr(outputs, "dtype") and len(outputs.shape) == 0 and "float" in str(outputs.dtype)
    )


def _outputs_and_state(returned: Any, state: Any) -> tuple[Any, list[Any]]:
    if not (isinstance(returned, tuple) and len(returned) == 2 and _shapes(returned[1]) == _shapes(state)):
        raise TypeError(
            "A replicated step with two arguments must be `step(state, batch) -> (outputs, state)`, and the state must "
            "keep its shapes. Received: a state of shapes "
            f"{_shapes(state)}, and a step that returned {check.with_article(returned)} of shapes {_shapes(returned)}. "
            "If the arguments are inputs and targets, pass one batch, `step((x, y))`."
        )
    return returned[0], [returned[1]]


def _shapes(nest: Any) -> list[tuple[int, ...]]:
    return [tuple(getattr(leaf, "shape", ())) for leaf in tree.flatten(nest)]


_RULE = "`num_towers` must divide the batch. Received: num_towers={}, a batch of"
_REMEDY = "Choose another batch size, and drop a smaller last batch."


@contextlib.contextmanager
def _divided(batch: Any, num_towers: int) -> Iterator[list[Any]]:
    """Split the batch, and yield the list of its chunks, one per tower. Towers must run inside this context."""
    leaves = tree.flatten(batch)
    with_rows = [leaf for leaf in leaves if _has_rows(leaf)]
    if not with_rows:
        raise ValueError(
            "The batch must have rows to split among towers. "
            f"Received: {batch!r}, without an array that has a first dimension. Pass arrays or tensors."
        )
    for leaf in with_rows:
        if leaf.shape[0] is not None and int(leaf.shape[0]) % num_towers:
            raise ValueError(f"{_RULE.format(num_towers)} {int(leaf.shape[0])}. {_REMEDY}")
    unknown = [leaf for leaf in with_rows if leaf.shape[0] is None]
    scope: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if unknown and _on_devices is not None:
        scope = _on_devices.running_if_divisible(unknown, num_towers, _RULE.format(num_towers), _REMEDY)
    with scope:
        split = [_rows_of_each(leaf, num_towers) if _has_rows(leaf) else [leaf] * num_towers for leaf in leaves]
        yield [tree.pack_sequence_as(batch, [parts[k] for parts in split]) for k in range(num_towers)]


def _rows_of_each(tensor: Tensor, num_towers: int) -> list[Tensor]:
    parts = None if _on_devices is None else _on_devices.divide_rows(tensor, num_towers)
    if parts is not None:
        return list(parts)
    size = tensor.shape[0] // num_towers
    return [tensor[k * size : (k + 1) * size] for k in range(num_towers)]


def _on_device(devices: Sequence[str] | None, tower: int) -> contextlib.AbstractContextManager[Any]:
    if not devices or _on_devices is None:
        return contextlib.nullcontext()
    scope: contextlib.AbstractContextManager[Any] = _on_devices.on_device(devices[tower % len(devices)])
    return scope


def _has_rows(leaf: Any) -> bool:
    shape = getattr(leaf, "shape", None)
    return shape is not None and len(shape) > 0
