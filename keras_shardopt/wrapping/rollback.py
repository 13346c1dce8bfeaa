"""If an update is skipped, restores the variables that its forward pass has changed.

A forward pass in training mode assigns variables outside the optimizer: moving statistics, seeds, counters. Their
values are saved just before the first such assignment since the last update. So unassigned variables (a frozen
backbone) cost nothing, and assignments between steps (`load_weights`) remain. On JAX, a step receives and returns all
state, so nothing is saved: after a skipped update, the received values replace the returned ones.

Metrics are not restored. They count all batches, as in Keras.

Private names of Keras touched here (a test checks that each exists):
    `keras.src.backend.common.global_state`, "current_call_ctx", `CallContext.training` - whether, and how, a layer is
        being called.
    `keras.src.backend.common.stateless_scope.in_stateless_scope` - whether assignments reach variables at all.
    `Variable._value` - the value without autocast.
    `Layer._non_trainable_variables`, `_seed_generators` - variables created as not trainable, without frozen weights.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
from keras import ops
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import in_stateless_scope

from keras_shardopt.backends import for_backend
from keras_shardopt.backends.active import placement, runtime
from keras_shardopt.backends.models import (
    buffers_of,
    ids_of_states,
    layers_of,
    mix_in,
    models_with,
    optimizers_of,
    states_of,
)
from keras_shardopt.backends.patches import install
from keras_shardopt.backends.user_warnings import warn
from keras_shardopt.numerics import Optimizer, Tensor, Variable
from keras_shardopt.wrapping.chain import Wrapping, chain_of, descendants
from keras_shardopt.wrapping.slots import empty_name_scope


class Rollback:
    """Restores variables that forward passes have changed if `optimizer`, the outermost wrapper, skips an update."""

    def __init__(self, optimizer: Optimizer, window: Any, add_variable: Callable[..., Variable] | None) -> None:
        self.window = window
        """Counts the micro-batches of an update (`update/window.py`); None without gradient accumulation."""
        self._within_window = False
        self._warned = False
        models = models_with(optimizer._trainable_variables)
        self.variables: list[Variable] = changed_by_forward_passes(models)
        """The variables to restore."""
        self._positions = {id(v): i for i, v in enumerate(self.variables)}
        # The variables that forward passes have assigned so far, and their saved values. A step of `fit` saves all of
        # them at its beginning, because one call is faster than many. Buffers are included from the start, because
        # PyTorch modules assign them without `Variable.assign`.
        buffers = {id(buffer) for model in models for buffer in buffers_of(model)}
        self._assigned: dict[int, Variable] = {id(v): v for v in self.variables if id(v) in buffers}
        self._entries: dict[int, _SavedValue] = {}
        self.snapshots: list[Variable] = []
        """The values of `variables` before the first micro-batch of the current update, for compiled steps."""
        runs_each_step = runtime.version(optimizer._iterations) is not None  # None if Python does not run in each step
        if not runs_each_step and add_variable is not None:
            self.snapshots = [
                add_variable(shape=v.shape, initializer="zeros", dtype=v.dtype, name=f"before_window_{i}")
                for i, v in enumerate(self.variables)
            ]
        for model in models:
            if runtime.updates_are_stateless:
                mix_in(model, _RollsBackStateless)
            elif runs_each_step:
                mix_in(model, _RollsBack)

    # -- in `apply` ----------------------------------------------------------------------------------------------

    def begin(self, optimizer: Optimizer) -> Any:
        """Prepare for an update by `optimizer`. Return a value to pass to `settle` after the update."""
        save_before_assignments()
        return _Stamp(stamp(optimizer._iterations))

    def settle(self, optimizer: Any, before: _Stamp) -> None:
        """Restore the variables if `optimizer` has skipped the update."""
        if optimizer._collects or _more_gradients_follow.get():
            return
        after, window = stamp(optimizer._iterations), self.window
        if isinstance(after, int):
            self._within_window = window is not None and not window.is_complete
            if not self._within_window:
                self._discard() if after != before.value else self._put_back()
            return
        saved = self._restorable()
        self._discard()
        if not saved:
            return
        skipped = ops.equal(before.value, after)
        if window is not None:
            skipped = ops.logical_and(skipped, window.is_complete)
            before_window = []
            for variable, value in saved:
                snapshot = self.snapshots[self._positions[id(variable)]]
                value = ops.where(window.starts, value, ops.convert_to_tensor(snapshot))
                snapshot.assign(value)
                before_window.append((variable, value))
            saved = before_window
        variables = [variable for variable, _ in saved]

        def put_back(values: Sequence[Tensor]) -> None:
            for variable, value in zip(variables, values):
                variable.assign(value)

        # If replicas decide separately whether to skip, only some run `put_back`, so `put_back` must not communicate.
        scopes = [part.scope_inside for part in chain_of(optimizer) if hasattr(part, "scope_inside")]
        updates_differ = any(scope.updates_differ for scope in scopes)
        runtime.cond(skipped, put_back, [value for _, value in saved], variables, communicates=not updates_differ)

    def _restorable(self) -> list[tuple[Variable, Tensor]]:
        found = []
        for variable in self.variables:
            value = _saved.of(variable)
            if value is None:
                continue
            if _is_usable(value):
                found.append((variable, value))
            elif _graphs is not None and _graphs.is_further_inside(value):
                self._warn(f"Received: `{variable.path}`, assigned in a nested function or loop.")
        return found

    def _discard(self) -> None:
        values = _saved.values
        for variable in self.variables:
            if values.pop(id(variable), None) is not None:
                self._assigned[id(variable)] = variable

    def _put_back(self) -> None:
        for variable, value in self._restorable():
            variable.assign(value)
        self._discard()
        self._within_window = False

    def _warn(self, received: str) -> None:
        if not self._warned:
            self._warned = True
            warn(
                "Moving statistics and seeds cannot be restored here after a skipped update, so the statistics may "
                f"contain NaN. {received}",
            )

    # -- in the steps of `fit` -----------------------------------------------------------------------------------

    def _begin_step(self, is_compiled: bool) -> None:
        """At the beginning of a step of `fit`, save the values of variables, and discard values saved earlier."""
        if self._within_window:
            for variable in self.variables if is_compiled else ():
                _saved.save_once(variable)
            return
        self._discard()
        if is_compiled and len(self._assigned) < len(self.variables):  # compiled code skips `_assign`, so include all
            self._assigned.update((id(variable), variable) for variable in self.variables)
        variables = list(self._assigned.values())
        values = [variable._value for variable in variables]
        if len(self._entries) == len(variables):
            runtime.add_n([entry.value for entry in self._entries.values()], values, True)
        else:
            self._entries = {id(v): _saved.entry(v, ops.copy(value)) for v, value in zip(variables, values)}
        _saved.values.update(self._entries)

    def settled(self, model: Any, state: Any, result: Any) -> Any:
        """Return the result of a stateless `train_step`, with variables restored if the update was skipped."""
        optimizer = model.optimizer
        if not _is_step_of_keras(model, state, result):
            self._warn("Received: a `train_step` without the four inputs and outputs of Keras' training state.")
            return result
        if optimizer._collects:
            return result
        logs, (weights, others, after, metrics) = result
        others, after = list(others), list(after)
        position = {id(v): i for i, v in enumerate(optimizer.variables)}
        iterations = position[id(optimizer._iterations)]
        skipped = ops.equal(state[2][iterations], after[iterations])
        starts = None
        if self.window is not None:
            counter = position[id(self.window.counter)]
            starts = ops.equal(state[2][counter], 0)
            skipped = ops.logical_and(skipped, ops.equal(after[counter], 0))
        for i, variable in enumerate(model.non_trainable_variables):
            value = state[1][i]
            if id(variable) not in self._positions or value is others[i]:
                continue
            if starts is not None:
                snapshot = position[id(self.snapshots[self._positions[id(variable)]])]
                value = after[snapshot] = ops.where(starts, value, state[2][snapshot])
            others[i] = ops.where(skipped, value, others[i])
        return logs, (weights, others, after, metrics)


_more_gradients_follow: contextvars.ContextVar[bool] = contextvars.ContextVar("more_gradients_follow", default=False)


@contextlib.contextmanager
def before_more(more_comes: bool) -> Iterator[None]:
    """If more gradients follow (`more_comes`), an `apply` without an update in this block does not count as skipped."""
    token = _more_gradients_follow.set(more_comes)
    try:
        yield
    finally:
        _more_gradients_follow.reset(token)


def rollback_of(optimizer: Optimizer) -> Rollback | None:
    """Return a `Rollback` for a new wrapper, or None if none of its optimizers skips updates.

    Only the outermost wrapper restores variables, so wrappers inside it lose their `Rollback`.
    """
    chain = chain_of(optimizer)
    wrappers = [part for part in descendants(optimizer) if isinstance(part, Wrapping)]
    made = [part._rollback for part in wrappers if part._rollback is not None]
    for part in wrappers:
        part._rollback = None
    if not any(map(may_skip_updates, chain)):
        return None
    accumulating = next((part for part in chain if getattr(part, "accumulation", None) is not None), None)
    window = None if accumulating is None else accumulating.accumulation.window
    # Reuse the `Rollback` of an inner wrapper only if it has variables to restore and the same window.
    for rollback in made:
        if rollback.variables and rollback.window is window:
            return rollback
    with empty_name_scope(), placement.colocate_with(next(iter(optimizer._trainable_variables), None)):
        rollback = Rollback(optimizer, window, getattr(accumulating, "add_variable", None))
    if window is not None:
        window.snapshots = rollback.snapshots
    placement.place(rollback.snapshots, "replicated")
    return rollback


def may_skip_updates(optimizer: Optimizer) -> bool:
    """Whether the optimizer itself, not one inside it, can skip updates with nonfinite gradients."""
    return getattr(optimizer, "_may_skip_updates", isinstance(optimizer, keras.optimizers.LossScaleOptimizer))


class _Stamp:
    """Hides a number from torch.compile, because torch.compile would compile the step again for each value."""

    def __init__(self, value: Any) -> None:
        self.value = value


def stamp(counter: Variable) -> Any:
    """Return a value that changes with the counter: an int if Python can read one now, a tensor otherwise."""
    version = runtime.version(counter)
    return ops.copy(ops.convert_to_tensor(counter)) if version is None else version


# TensorFlow only (otherwise None): detects saved tensors of another graph, which cannot be used.
_graphs = for_backend({"tensorflow": "keras_shardopt.backends.tensorflow.graphs"})


def _is_usable(tensor: Tensor) -> bool:
    """Whether a tensor saved earlier can be used in the current TensorFlow graph."""
    return _graphs is None or bool(_graphs.is_in_reach(tensor))


def changed_by_forward_passes(models: Sequence[Any]) -> list[Variable]:
    """Return the variables that forward passes can assign, such as moving statistics, seeds and counters."""
    metrics = {id(v) for model in models for v in model.metrics_variables}
    found: dict[int, Variable] = {}
    for model in models:
        for layer in layers_of(model):
            seeds = [generator.state for generator in layer._seed_generators]
            for variable in [*layer._non_trainable_variables, *seeds, *states_of(layer)]:
                is_small = keras.backend.is_float_dtype(variable.dtype) or len(variable.shape) < 2
                if is_small and id(variable) not in metrics:
                    found[id(variable)] = variable
        found |= {id(buffer): buffer for buffer in buffers_of(model)}
    return list(found.values())


def _is_step_of_keras(model: Any, state: Any, result: Any) -> bool:
    parts = (model.trainable_variables, model.non_trainable_variables, model.optimizer.variables)

    def fits(state: Any) -> bool:
        is_state = isinstance(state, (tuple, list)) and len(state) == 4
        return is_state and all(isinstance(s, (tuple, list)) and len(s) == len(p) for s, p in zip(state, parts))

    return isinstance(result, (tuple, list)) and len(result) == 2 and fits(state) and fits(result[1])


def statistics_in(models: Sequence[Any]) -> list[Variable]:
    """Return the float variables that forward passes can assign (moving statistics), except the states of RNNs."""
    own = {key for model in models for key in ids_of_states(model)}
    return [v for v in changed_by_forward_passes(models) if id(v) not in own and keras.backend.is_float_dtype(v.dtype)]


class _RollsBackStateless(keras.Model):
    """Mixed into models on JAX: after a skipped update, restores variables in the state that a step returns."""

    is_outermost = True  # `mix_in` puts this `train_step` around all others, so it gets the state that they return

    def train_step(self, state: Any, data: Any) -> Any:
        result = super().train_step(state, data)
        rollback = getattr(self.optimizer, "_rollback", None)
        if any(extension.restores_skipped_updates for extension in getattr(self.optimizer, "extension_stages", ())):
            return result
        if rollback is not None:
            return rollback.settled(self, state, result)
        for optimizer in optimizers_of(self):
            other = getattr(optimizer, "_rollback", None)
            if optimizer is not self.optimizer and other is not None:
                other._warn("Received: a `train_step` with optimizers other than `model.optimizer`.")
        return result


class _RollsBack(keras.Model):
    """Mixed into models whose steps run in Python: saves values at the beginning of a step."""

    def train_step(self, data: Any) -> Any:
        rollback = getattr(self.optimizer, "_rollback", None)
        if rollback is not None:
            runtime.no_compile(rollback._begin_step, bool(self.jit_compile))
        return super().train_step(data)


# -- saving values before assignments ------------------------------------------------------------------------------


class _SavedValue(NamedTuple):
    variable: weakref.ref[Any]
    value: Tensor


class _SavedValues(threading.local):  # per thread, because TensorFlow's replicas are threads
    """The values of variables before a forward pass assigned them."""

    def __init__(self) -> None:
        self.values: dict[int, _SavedValue] = {}
        """The saved values, by `id` of the variable."""

    def of(self, variable: Variable) -> Tensor | None:
        saved = self.values.get(id(variable))
        return None if saved is None or saved.variable() is not variable else saved.value

    def before_assignment(self, variable: Variable) -> None:
        """Save the value of a non-trainable variable that a layer is about to assign, unless it is saved already."""
        call = global_state.get_global_attribute("current_call_ctx")
        if call is None:
            if id(variable) in self.values and not in_stateless_scope():
                del self.values[id(variable)]  # an assignment outside of layers must survive a rollback
            return
        value = self.of(variable)
        if value is None or not _is_usable(value):
            training = getattr(call, "training", None)  # may be a tensor
            if training is not None and training is not False and not in_stateless_scope():
                self.save(variable)

    def save_once(self, variable: Variable) -> None:
        if self.of(variable) is None:
            self.save(variable)

    def save(self, variable: Variable) -> None:
        # On JAX, `value` includes the assignments of a stateless scope. On other backends, `_value` avoids autocast.
        now = variable.value if runtime.updates_are_stateless else variable._value
        self.values[id(variable)] = self.entry(variable, ops.copy(ops.convert_to_tensor(now)))

    def entry(self, variable: Variable, value: Tensor) -> _SavedValue:
        """Return an entry for the dict `self.values`. The entry is deleted together with the variable."""
        key, values = id(variable), self.values
        return _SavedValue(weakref.ref(variable, lambda _: values.pop(key, None)), value)


_saved = _SavedValues()
_is_saving = False
_assign_in_keras = keras.Variable.assign


def save_before_assignments() -> None:
    """From now on, save the value of each variable before a forward pass assigns it."""
    global _is_saving
    _is_saving = True
    if not runtime.updates_are_stateless:
        install("skips")


_before_assignment: Callable[[Variable], None] | None = None


@contextlib.contextmanager
def watching_layers(before_assignment: Callable[[Variable], None]) -> Iterator[None]:
    """Call `before_assignment(variable)` before each assignment by a layer during the block."""
    global _before_assignment
    save_before_assignments()
    previous, _before_assignment = _before_assignment, before_assignment
    try:
        yield
    finally:
        _before_assignment = previous


def save_before_assignment(variable: Variable) -> None:
    """Save the value of a variable that a loss function is about to assign."""
    if _is_saving:
        _saved.save(variable)


@runtime.no_autograph
def _assign(variable: Variable, value: Any) -> Tensor:
    """Replaces `keras.Variable.assign`. Saves the old value first."""
    # On backends other than TensorFlow, compiled code has no concrete value to save.
    if not variable.trainable and (_graphs is not None or runtime.is_concrete(value)):
        _saved.before_assignment(variable)
    if _before_assignment is not None and global_state.get_global_attribute("current_call_ctx") is not None:
        _before_assignment(variable)
    return _assign_in_keras(variable, value)


def assign_saved(variable: Variable, value: Any) -> None:
    """Save a variable's value, then assign a new value that a forward pass has returned but not assigned."""
    save_before_assignment(variable)
    _assign_in_keras(variable, value)
