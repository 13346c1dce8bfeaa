"""Tower and replicate: one update from the gradients of several towers, each a part of the batch.

Private names of Keras touched here (test_tower.py holds it):
    `keras.src.backend.common.global_state` - what `keras.utils.clear_session` forgets.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
from keras import ops, tree
from keras.src.backend.common import global_state

from keras_shardopt._typing import Gradients, Tensor, Variable
from keras_shardopt.numerics import add, map_values
from keras_shardopt.replica import framework, reduction_is_claimed
from keras_shardopt.wrapper import OptimizerWrapper, get_optimizer

_USED = "keras_shardopt_tower_has_been_used"

# `tf.losses.Reduction` has these names; all but the sum made the original average.
_SUMS = ("sum", "weighted_sum")
_MEANS = (
    "mean",
    "weighted_mean",
    "sum_over_batch_size",
    "weighted_sum_over_batch_size",
    "weighted_sum_by_nonzero_weights",
)


class _Replication:
    """One call of a replicated step: which tower runs, and what the towers before it have collected."""

    def __init__(self, num_towers: int, factor: float) -> None:
        self.num_towers = num_towers
        self.factor = factor
        self.tower = 0
        self.tower_was_used = False
        # By optimizer, one entry per call that it gets in each tower: the gradients so far, and how many towers
        # have added theirs.
        self._calls: dict[int, list[_Call]] = {}
        self._names: dict[int, str] = {}
        self._num_calls: dict[int, list[int]] = {}

    def collect(self, optimizer: Tower, grads: Gradients, variables: Sequence[Variable]) -> _Call | None:
        """Adds a tower's gradients. In the last tower, returns all that belongs to this call."""
        key = id(optimizer)
        self._names[key] = optimizer.name
        calls, counts = self._calls.setdefault(key, []), self._num_calls.setdefault(key, [0] * self.num_towers)
        position = counts[self.tower]
        counts[self.tower] += 1
        if self.tower > 0 and position >= counts[0]:
            self._refuse(key)
        if position == len(calls):
            calls.append(_Call())
        calls[position].add(grads, variables, optimizer._var_key, self.factor)
        if self.tower < self.num_towers - 1:
            return None
        call, calls[position] = calls[position], _Call()  # let go of the gradients
        return call

    def end_tower(self) -> None:
        """Compares the number of calls with that of the first tower."""
        if not self._num_calls:
            raise ValueError(
                "The step of `replicate` must update with a `Tower` optimizer. Received: a step that called none in "
                f"tower {self.tower}. Wrap the optimizer: `Tower(optimizer)`. If the step itself is compiled "
                "(`jax.jit`, `tf.function`), compile what `replicate` returns instead."
            )
        for key, counts in self._num_calls.items():
            if counts[self.tower] != counts[0]:
                self._refuse(key)

    def _refuse(self, key: int) -> None:
        raise ValueError(
            "Each tower must call each `Tower` optimizer equally often. Received: "
            f"{self._num_calls[key][: self.tower + 1]} calls of `{self._names[key]}` in towers 0 to {self.tower}. "
            "Let the step not depend on the data, and compile what `replicate` returns rather than the step."
        )


class _Call:
    """The gradients of all towers for one call of an optimizer, added up as they come."""

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
            # A copy in any case: PyTorch adds the next tower's gradient to the same tensor, or zeroes it.
            scaled = map_values(ops.copy if factor == 1 else lambda value: value * factor, grad)
            self._sums[key] = scaled if before is None else add(before, scaled, variable)

    @property
    def variables(self) -> list[Variable]:
        return list(self._variables.values())

    @property
    def grads(self) -> list[Tensor | None]:
        return list(self._sums.values())


_running = threading.local()  # TensorFlow's strategies run each replica's step in a thread of its own


def _replication() -> _Replication | None:
    return getattr(_running, "replication", None)


@keras.saving.register_keras_serializable(package="keras_shardopt")
class Tower(OptimizerWrapper):
    r"""Collects the gradients of the towers of one step, and updates once, in the last of them.

    Inside a step made by `replicate`, with $g_k$ the gradient of tower $k$ of $K$, the inner optimizer sees

    $\sum_k g_k$ (`loss_reduction="sum"`) or $\frac{1}{K} \sum_k g_k$ (else)

    in the last tower; in the others nothing is updated and `iterations` stays. A variable without a gradient in some
    towers gets the sum of the others, under the mean divided by the number of all towers; one that has none anywhere
    is passed on as None. Sparse gradients (`tf.IndexedSlices`) are joined, not added up, and become dense only where
    another tower's is. Only the running sum is kept.

    Outside `replicate`, and with one tower, everything goes straight to the inner optimizer.

    `Tower` is the outermost wrapper: `Tower(CrossShard(inner))` reduces once, for the sum over the towers. A step may
    use several `Tower` optimizers, or one several times: the n-th call of an optimizer in each tower belongs together.

    Args:
        optimizer_or_optimizer_fn: a `keras.optimizers.Optimizer`, the name or config of one, or a function without
            arguments that makes one. The function is called once, when the optimizer is first needed.
        name: str or None. None makes a name of the class name.

    Raises:
        TypeError: if `optimizer_or_optimizer_fn` is none of these; on first use, if the function returns none.
        ValueError: inside `replicate`, if a `LossScaleOptimizer` or `CrossShard` is around this optimizer.

    Example:
        >>> import keras, keras_shardopt as ks
        >>> weight = keras.Variable(10.0)
        >>> optimizer = ks.Tower(lambda: keras.optimizers.SGD(1.0))
        >>> def step(batch):
        ...     optimizer.apply([keras.ops.sum(batch)], [weight])
        >>> ks.replicate(step, num_towers=2, loss_reduction="sum")(keras.ops.convert_to_tensor([1.0, 2.0]))
        >>> float(keras.ops.convert_to_numpy(weight)), int(optimizer.iterations)
        (7.0, 1)

    References:
        `tf.contrib.estimator.TowerOptimizer` of TensorFlow 1. There a loop of numbers of calls that did not match was
        noticed only by their total, so that gradients could be lost in silence, and a sparse gradient before a dense
        one failed; the loss was divided for the mean, here the gradients are, so that loops of one's own need not
        call `scale_loss`.
    """

    makes_gradients_global = True

    def __init__(self, optimizer_or_optimizer_fn: Any, name: str | None = None) -> None:
        self.__dict__["_factory"] = None
        self.__dict__["_is_in_loss_scaling"] = False
        if callable(optimizer_or_optimizer_fn) and not isinstance(
            optimizer_or_optimizer_fn, keras.optimizers.Optimizer
        ):
            self.__dict__["_factory"] = optimizer_or_optimizer_fn
            inner = None
        else:
            inner = get_optimizer(optimizer_or_optimizer_fn, "Tower", "optimizer_or_optimizer_fn")
        self._init_around(inner, name)

    @property
    def inner(self) -> keras.optimizers.Optimizer:
        """The wrapped optimizer, made now if it was given as a function."""
        _mark_used()
        if self.__dict__["_factory"] is not None:
            made = get_optimizer(self.__dict__["_factory"](), "Tower", "optimizer_or_optimizer_fn")
            self.__dict__["_inner"], self.__dict__["_factory"] = (made,), None
        return self.__dict__["_inner"][0]

    def update_inner(self, grads: Gradients, variables: Sequence[Variable]) -> None:
        """Updates, or inside `replicate` collects until the last tower."""
        replication = _replication()
        if replication is None:
            super().update_inner(grads, variables)
            return
        self._refuse_to_be_inside()
        call = replication.collect(self, grads, variables)
        if call is not None:
            super().update_inner(call.grads, call.variables)

    def meet_outer_loss_scaling(self) -> None:
        """Remembers it: to update without `replicate` is still right."""
        self.__dict__["_is_in_loss_scaling"] = True
        super().meet_outer_loss_scaling()

    def _refuse_to_be_inside(self) -> None:
        outer = None
        if reduction_is_claimed(self):
            outer = "CrossShard"
        elif self.__dict__["_is_in_loss_scaling"]:
            outer = "LossScaleOptimizer"
        if outer is not None:
            raise ValueError(
                f"A `Tower` that collects must be around `{outer}`, not inside it: it would see only a part of what a "
                f"tower does. Use `Tower({outer}(optimizer))`"
                + (", and `model.compile(..., auto_scale_loss=False)`." if outer == "LossScaleOptimizer" else ".")
            )

    def get_name(self) -> str:
        """The name of the inner optimizer."""
        name: str = self.inner.name
        return name

    @staticmethod
    def has_been_used() -> bool:
        """Whether a `Tower` has needed its inner optimizer, be it for its name only.

        Inside `replicate`: in this call of the step. Outside: since the program or `keras.utils.clear_session`
        started. What happens inside `replicate` does not count outside.
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
    step: Callable[..., Any],
    num_towers: int,
    loss_reduction: str = "sum",
    devices: Sequence[str] | None = None,
) -> Callable[..., Any]:
    """Makes a step run once per tower, on its part of the batch, with one update at the end.

    The step must update with `Tower` optimizers. Its batch, the last argument, may be any nest of arrays; all are
    split along dim 0 into `num_towers` equal parts, in order (None and scalars go to every tower).

    - `model.train_step = ks.replicate(model.train_step, num_towers)` after `compile` lets `fit` train in towers on
      every backend: as micro-batches, which need the memory for activations of one tower only.
    - A step of one's own is `step(batch) -> outputs`, or `step(state, batch) -> (outputs, state)`, as Keras' own on
      JAX; the state goes from tower to tower. Compile (`jax.jit`, `tf.function`) what is returned, not the step.

    Args:
        step: the function to run.
        num_towers: int >= 1. With 1 the step runs unchanged, also without a `Tower`.
        loss_reduction: "sum" adds the towers' gradients. All else averages them: "mean", "sum_over_batch_size" (the
            name of what Keras' losses do over a batch: with them the mean makes towers equal one run of the whole
            batch, and the sum is `num_towers` times that), and TensorFlow 1's names of both.
        devices: names of devices on TensorFlow, such as `["GPU:0", "GPU:1"]`; tower k runs on the k-th, starting
            over at the end. None runs all towers where the step would run.

    Returns:
        A function with the arguments of `step`. It returns what the last tower returned (of Keras' `train_step`
        that is right, since metrics add up over towers), except that a scalar output counts as the loss, and is
        summed or averaged.

    Raises:
        TypeError: if `step` cannot be called or `num_towers` is not an int.
        ValueError: if `num_towers` or `loss_reduction` is wrong, or `devices` are given on another backend. When the
            step runs: if `num_towers` does not divide the batch (inside a `tf.function` that does not know its size,
            TensorFlow's InvalidArgumentError), or a tower calls an optimizer more or less often than others.

    Example:
        >>> import keras, numpy as np, keras_shardopt as ks
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile(ks.Tower(keras.optimizers.SGD(0.1)), loss="mse")
        >>> model.train_step = ks.replicate(model.train_step, num_towers=4, loss_reduction="mean")
        >>> history = model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=8, verbose=0)
        >>> int(model.optimizer.iterations)
        1

    References:
        `tf.contrib.estimator.replicate_model_fn` of TensorFlow 1, whose default averaged.
    """
    if not callable(step):
        raise TypeError(f"`step` must be a function. Received: step={step!r}. Use for example `model.train_step`.")
    if isinstance(num_towers, bool) or not isinstance(num_towers, int):
        raise TypeError(f"`num_towers` must be an int. Received: num_towers={num_towers!r}")
    if num_towers < 1:
        raise ValueError(f"`num_towers` must be >= 1. Received: num_towers={num_towers}")
    if loss_reduction not in _SUMS + _MEANS:
        raise ValueError(
            f'`loss_reduction` must be "sum" or "mean" (or one of {[*_SUMS[1:], *_MEANS[1:]]}). '
            f"Received: loss_reduction={loss_reduction!r}"
        )
    if devices is not None and not framework.places_towers:
        raise ValueError(
            "`devices` can be given on TensorFlow only: elsewhere the weights that a tower reads must be on its own "
            f"device. Received: devices={devices!r}. Leave it out, and use `data_parallel()` for several devices."
        )
    if devices is not None and not devices:
        raise ValueError("`devices` must name at least one device. Received: devices=[]. Leave it out for none.")
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
        with _replicating(_Replication(num_towers, factor)) as replication:
            for tower, part in enumerate(_parts(batch, num_towers)):
                replication.tower = tower
                with framework.place_tower(devices[tower % len(devices)]) if devices else contextlib.nullcontext():
                    returned = step(*state, part)
                replication.end_tower()
                outputs = returned
                if state:
                    outputs, state = returned[0], [returned[1]]
                if _is_scalar(outputs):
                    outputs = loss = loss + outputs * factor
        return (outputs, *state) if state else outputs

    return replicated


@contextlib.contextmanager
def _replicating(replication: _Replication) -> Iterator[_Replication]:
    if _replication() is not None:
        raise ValueError("A replicated step must not run inside another one. Call `replicate` once, around the step.")
    _running.replication = replication
    try:
        yield replication
    finally:
        _running.replication = None


def _is_scalar(outputs: Any) -> bool:
    return isinstance(outputs, float) or (hasattr(outputs, "dtype") and len(outputs.shape) == 0)


def _parts(batch: Any, num_towers: int) -> list[Any]:
    """The batch of each tower."""
    if num_towers > 1 and not any(getattr(leaf, "shape", ()) for leaf in tree.flatten(batch)):
        raise ValueError(
            "A batch must have rows that `num_towers` towers can share. "
            f"Received: {batch!r}, which holds no array with a first dimension. Pass arrays or tensors."
        )
    split = [_split(leaf, num_towers) for leaf in tree.flatten(batch)]
    return [tree.pack_sequence_as(batch, [parts[k] for parts in split]) for k in range(num_towers)]


def _split(leaf: Any, num_towers: int) -> Sequence[Any]:
    shape = getattr(leaf, "shape", None)
    if shape is None or len(shape) == 0:
        return [leaf] * num_towers
    if shape[0] is None:
        # A tf.function that serves batches of several sizes. TensorFlow checks the division when it runs.
        parts: Sequence[Any] = ops.split(leaf, num_towers)
        return parts
    size, rest = divmod(int(shape[0]), num_towers)
    if rest:
        raise ValueError(
            f"`num_towers` must divide the batch. Received: num_towers={num_towers}, a batch of {int(shape[0])}. "
            "Choose another batch size, and leave out a last batch that is smaller."
        )
    return [leaf[k * size : (k + 1) * size] for k in range(num_towers)]
