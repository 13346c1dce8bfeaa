"""Restores what a forward pass has changed where its update is skipped.

A forward pass in training mode assigns variables that no optimizer sees: moving statistics, seeds, counters. Each is
noted before it is assigned for the first time since the last update, so that what nobody assigns (a frozen backbone)
costs nothing, and what somebody else sets in between (`load_weights`) stays. On JAX, where a step is a function of all
state, its state before and after is compared instead.

Metrics are not put back: they count all batches, as they do in Keras.

Private names of Keras touched here (a test holds each of them):
    `keras.src.backend.common.global_state`, "current_call_ctx", `CallContext.training` - whether, and how, a layer is
        being called.
    `keras.src.backend.common.stateless_scope.in_stateless_scope` - whether assignments reach variables at all.
    `Variable._value` - the value without autocast.
    `Layer._non_trainable_variables`, `_seed_generators` - what a layer has made as not trainable, and not frozen since.
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
from keras_shardopt.wrapping.chain import Wrapping, descendants
from keras_shardopt.wrapping.slots import empty_name_scope


class Rollback:
    """Puts back what forward passes have changed where `optimizer`, the outermost wrapper, skips an update.

    Args:
        optimizer: an optimizer that is just being built.
        accumulators: those of the `CrossShard` in it that accumulates, or None.
        add_variable: makes variables for what must be kept within a window where steps are traced.
    """

    def __init__(self, optimizer: Optimizer, accumulators: Any, add_variable: Callable[..., Variable] | None) -> None:
        self.accumulators = accumulators
        """Those of the `CrossShard` that accumulates, or None."""
        self._within_window = False
        self._warned = False
        models = models_with(optimizer._trainable_variables)
        self.variables: list[Variable] = changed_by_forward_passes(models)
        """What is put back."""
        # Those that were noted before; and notes of them, so that a step of `fit` notes all at once where it begins.
        # That takes a fraction of what noting one after another does, of which small models would feel it.
        buffers = {id(buffer) for model in models for buffer in buffers_of(model)}  # modules assign them in silence
        self._assigned: dict[int, Variable] = {id(v): v for v in self.variables if id(v) in buffers}
        self._entries: dict[int, _Note] = {}
        self.snapshots: list[Variable] = []
        """The values of `variables` when the window began, where Python does not see each step."""
        # Whether Python runs for each step, and so can keep account.
        sees_each_step = runtime.version(optimizer._iterations) is not None
        if accumulators is not None and not sees_each_step and add_variable is not None:
            self.snapshots = [
                add_variable(shape=v.shape, initializer="zeros", dtype=v.dtype, name=f"before_window_{i}")
                for i, v in enumerate(self.variables)
            ]
        for model in models:
            if runtime.updates_are_stateless:
                mix_in(model, _RollsBackStateless)
            elif sees_each_step:
                mix_in(model, _RollsBack)

    # -- in `apply` ----------------------------------------------------------------------------------------------

    def begin(self, optimizer: Optimizer) -> Any:
        """To be called before `optimizer` updates; returns what `settle` takes."""
        note_assignments()
        return _Stamp(stamp(optimizer._iterations))

    def settle(self, optimizer: Any, before: _Stamp) -> None:
        """To be called when `optimizer` has updated, or skipped the update, or added to a window."""
        if optimizer._collects or _more_comes.get():
            return
        after, window = stamp(optimizer._iterations), self.accumulators
        if isinstance(after, int):
            self._within_window = window is not None and not window.is_complete
            if not self._within_window:
                self._forget() if after != before.value else self._put_back()
            return
        noted = self._noted()
        self._forget()
        if not noted:
            return
        skipped = ops.equal(before.value, after)
        if window is not None:
            skipped = ops.logical_and(skipped, window.is_complete)
            before_window = []
            for variable, value in noted:
                snapshot = self.snapshots[_position(variable, self.variables)]
                value = ops.where(window.starts, value, ops.convert_to_tensor(snapshot))
                snapshot.assign(value)
                before_window.append((variable, value))
            noted = before_window
        variables = [variable for variable, _ in noted]

        def put_back(values: Sequence[Tensor]) -> None:
            for variable, value in zip(variables, values):
                variable.assign(value)

        # Of what is inside this optimizer, as the counter is one replica's own where any part in there trains apart.
        scopes = [part.scope_inside for part in (optimizer, *descendants(optimizer)) if hasattr(part, "scope_inside")]
        apart = any(scope.updates_differ for scope in scopes)
        runtime.cond(skipped, put_back, [value for _, value in noted], variables, communicates=not apart)

    def _noted(self) -> list[tuple[Variable, Tensor]]:
        found = []
        for variable in self.variables:
            note = _notes.of(variable)
            if note is None:
                continue
            if _is_in_reach(note):
                found.append((variable, note))
            elif _graphs is not None and _graphs.is_further_inside(note):
                self._warn(f"Received: `{variable.path}`, assigned in a function or loop of its own.")
        return found

    def _forget(self) -> None:
        values = _notes.values
        for variable in self.variables:
            if values.pop(id(variable), None) is not None:
                self._assigned[id(variable)] = variable

    def _put_back(self) -> None:
        for variable, value in self._noted():
            variable.assign(value)
        self._forget()
        self._within_window = False

    def _warn(self, received: str) -> None:
        if not self._warned:
            self._warned = True
            warn(
                "Where an update is skipped, moving statistics and seeds cannot be put back here, so that a NaN may "
                f"stay in them. {received}",
            )

    # -- in the steps of `fit` -----------------------------------------------------------------------------------

    def _begin_step(self, is_compiled: bool) -> None:
        """Where Python runs each step: what was noted before it, by a forward pass without an update, is over."""
        if self._within_window:
            for variable in self.variables if is_compiled else ():
                _notes.keep(variable)
            return
        self._forget()
        if is_compiled and len(self._assigned) < len(self.variables):  # no assignment is seen there
            self._assigned.update((id(variable), variable) for variable in self.variables)
        variables = list(self._assigned.values())
        values = [variable._value for variable in variables]
        if len(self._entries) == len(variables):
            runtime.add_n([note.value for note in self._entries.values()], values, True)
        else:
            self._entries = {id(v): _notes.made(v, ops.copy(value)) for v, value in zip(variables, values)}
        _notes.values.update(self._entries)

    def settled(self, model: Any, state: Any, result: Any) -> Any:
        """The result of a stateless `train_step`, of one replica perhaps, with what it should have left as it was."""
        optimizer = model.optimizer
        if not _is_step_of_keras(model, state, result):
            self._warn("Received: a `train_step` that does not take and return the four parts of Keras' own.")
            return result
        if optimizer._collects:
            return result
        logs, (weights, others, after, metrics) = result
        others, after = list(others), list(after)
        position = {id(v): i for i, v in enumerate(optimizer.variables)}
        iterations = position[id(optimizer._iterations)]
        skipped = ops.equal(state[2][iterations], after[iterations])
        starts = None
        if self.accumulators is not None:
            counter = position[id(self.accumulators.counter)]
            starts = ops.equal(state[2][counter], 0)
            skipped = ops.logical_and(skipped, ops.equal(after[counter], 0))
        mine = {id(v): i for i, v in enumerate(self.variables)}
        for i, variable in enumerate(model.non_trainable_variables):
            value = state[1][i]
            if id(variable) not in mine or value is others[i]:
                continue
            if starts is not None:
                snapshot = position[id(self.snapshots[mine[id(variable)]])]
                value = after[snapshot] = ops.where(starts, value, state[2][snapshot])
            others[i] = ops.where(skipped, value, others[i])
        return logs, (weights, others, after, metrics)


_more_comes: contextvars.ContextVar[bool] = contextvars.ContextVar("more_comes", default=False)


@contextlib.contextmanager
def before_more(more_comes: bool) -> Iterator[None]:
    """Within it, where more gradients come before there is an update, none counts as skipped."""
    token = _more_comes.set(more_comes)
    try:
        yield
    finally:
        _more_comes.reset(token)


def rollback_of(optimizer: Optimizer) -> Rollback | None:
    """What puts back what skipped updates leave behind, for a wrapper that is just being built; None if none are.

    That is the affair of the outermost wrapper: those further inside lose theirs.
    """
    chain = [optimizer, *descendants(optimizer)]
    wrappers = [part for part in chain[1:] if isinstance(part, Wrapping)]
    made = [part._rollback for part in wrappers if part._rollback is not None]
    for part in wrappers:
        part._rollback = None
    if not any(map(leaves_out_updates, chain)):
        return None
    accumulating = next((part for part in chain if getattr(part, "accumulation", None) is not None), None)
    accumulators = None if accumulating is None else accumulating.accumulation
    # One from further inside may know neither the window nor, where state is divided, the model.
    for rollback in made:
        if rollback.variables and rollback.accumulators is accumulators:
            return rollback
    with empty_name_scope(), placement.colocate_with(next(iter(optimizer._trainable_variables), None)):
        rollback = Rollback(optimizer, accumulators, getattr(accumulating, "add_variable", None))
    if accumulators is not None:
        accumulators.snapshots = rollback.snapshots
    placement.place(rollback.snapshots, "replicated")
    return rollback


def leaves_out_updates(optimizer: Optimizer) -> bool:
    """Whether it itself leaves out updates with gradients that are not finite."""
    return getattr(optimizer, "_leaves_out_updates", isinstance(optimizer, keras.optimizers.LossScaleOptimizer))


class _Stamp:
    """Holds what torch.compile must not look at, or it would compile anew for each number."""

    def __init__(self, value: Any) -> None:
        self.value = value


def stamp(counter: Variable) -> Any:
    """What changes with a counter: an int if that is known now, else its value."""
    version = runtime.version(counter)
    return ops.copy(ops.convert_to_tensor(counter)) if version is None else version


# Where a tensor from earlier may be one of another graph.
_graphs = for_backend({"tensorflow": "keras_shardopt.backends.tensorflow.graphs"})


def _is_in_reach(tensor: Tensor) -> bool:
    """Whether a tensor from earlier can be used here."""
    return _graphs is None or bool(_graphs.is_in_reach(tensor))


def changed_by_forward_passes(models: Sequence[Any]) -> list[Variable]:
    """What layers have made as not trainable, without weights that were frozen or quantized later, and metrics."""
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


def _position(variable: Variable, variables: Sequence[Variable]) -> int:
    return next(i for i, other in enumerate(variables) if other is variable)


def _is_step_of_keras(model: Any, state: Any, result: Any) -> bool:
    parts = (model.trainable_variables, model.non_trainable_variables, model.optimizer.variables)

    def fits(state: Any) -> bool:
        is_state = isinstance(state, (tuple, list)) and len(state) == 4
        return is_state and all(isinstance(s, (tuple, list)) and len(s) == len(p) for s, p in zip(state, parts))

    return isinstance(result, (tuple, list)) and len(result) == 2 and fits(state) and fits(result[1])


def statistics_in(models: Sequence[Any]) -> list[Variable]:
    """Of these models what forward passes change and means can be taken of: moving statistics."""
    own = {number for model in models for number in ids_of_states(model)}  # of each replica's rows
    return [v for v in changed_by_forward_passes(models) if id(v) not in own and keras.backend.is_float_dtype(v.dtype)]


class _RollsBackStateless(keras.Model):
    """A model whose skipped updates leave nothing, where steps return all state."""

    is_outermost = True  # it needs the state that the whole step returns

    def train_step(self, state: Any, data: Any) -> Any:
        result = super().train_step(state, data)
        rollback = getattr(self.optimizer, "_rollback", None)
        if any(extension.settles_skips for extension in getattr(self.optimizer, "extension_stages", ())):
            return result
        if rollback is not None:
            return rollback.settled(self, state, result)
        for optimizer in optimizers_of(self):
            other = getattr(optimizer, "_rollback", None)
            if optimizer is not self.optimizer and other is not None:
                other._warn("Received: a `train_step` with optimizers other than `model.optimizer`.")
        return result


class _RollsBack(keras.Model):
    """A model that notes what a step may have to put back, where Python runs each step."""

    def train_step(self, data: Any) -> Any:
        rollback = getattr(self.optimizer, "_rollback", None)
        if rollback is not None:
            runtime.no_compile(rollback._begin_step, bool(self.jit_compile))
        return super().train_step(data)


# -- noting --------------------------------------------------------------------------------------------------------


class _Note(NamedTuple):
    variable: weakref.ref[Any]
    value: Tensor


class _Notes(threading.local):  # TensorFlow's replicas are threads
    """What variables were before a forward pass assigned them."""

    def __init__(self) -> None:
        self.values: dict[int, _Note] = {}
        """By the number that Python gives a variable as long as it lives."""

    def of(self, variable: Variable) -> Tensor | None:
        known = self.values.get(id(variable))
        return None if known is None or known.variable() is not variable else known.value

    def see(self, variable: Variable) -> None:
        """To be called before a variable that is not trainable is assigned."""
        call = global_state.get_global_attribute("current_call_ctx")
        if call is None:
            if id(variable) in self.values and not in_stateless_scope():
                del self.values[id(variable)]  # whoever sets it now means it
            return
        known = self.of(variable)
        if known is None or not _is_in_reach(known):
            training = getattr(call, "training", None)  # perhaps a tensor
            if training is not None and training is not False and not in_stateless_scope():
                self.take(variable)

    def keep(self, variable: Variable) -> None:
        """Notes the value now, unless it is noted already."""
        if self.of(variable) is None:
            self.take(variable)

    def take(self, variable: Variable) -> None:
        """Notes the value now."""
        # On JAX it may be that of a scope; elsewhere without autocast.
        now = variable.value if runtime.updates_are_stateless else variable._value
        self.values[id(variable)] = self.made(variable, ops.copy(ops.convert_to_tensor(now)))

    def made(self, variable: Variable, value: Tensor) -> _Note:
        """A note, which goes when the variable does."""
        key, values = id(variable), self.values
        return _Note(weakref.ref(variable, lambda _: values.pop(key, None)), value)


_notes = _Notes()
_takes_notes = False
_assign_in_keras = keras.Variable.assign


def note_assignments() -> None:
    """From now on what forward passes assign is noted. Doing it twice changes nothing."""
    global _takes_notes
    _takes_notes = True
    if not runtime.updates_are_stateless:
        install("skips")


_watcher: Callable[[Variable], None] | None = None


@contextlib.contextmanager
def watching_layers(see: Callable[[Variable], None]) -> Iterator[None]:
    """Within it `see(variable)` runs before a layer assigns a variable while it is called."""
    global _watcher
    note_assignments()
    before, _watcher = _watcher, see
    try:
        yield
    finally:
        _watcher = before


def note_before_assignment(variable: Variable) -> None:
    """Notes a variable that a loss has assigned, before the value reaches it."""
    if _takes_notes:
        _notes.take(variable)


@runtime.no_autograph
def _assign(variable: Variable, value: Any) -> Tensor:
    """Stands in for Keras' method."""
    # Not where a step is compiled with no Python left in it.
    if not variable.trainable and (_graphs is not None or runtime.is_concrete(value)):
        _notes.see(variable)
    if _watcher is not None and global_state.get_global_attribute("current_call_ctx") is not None:
        _watcher(variable)
    return _assign_in_keras(variable, value)


def assign_noted(variable: Variable, value: Any) -> None:
    """Assigns what a forward pass has made of a variable without assigning it; what it was before is noted."""
    note_before_assignment(variable)
    _assign_in_keras(variable, value)
