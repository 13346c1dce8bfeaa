"""The state of a wrapper and of what is inside it, as files have it.

State is stored once, as the innermost optimizer would store it without wrappers, so that files move between `Adam()`
and wrappers around it. What the wrappers keep themselves is in a group of its own.

Private names of Keras touched here (a test holds each of them):
    `H5IOStore._h5_entry_group` - the group of an HDF5 file in which an optimizer's arrays are.
    `keras.src.saving.keras_saveable.KerasSaveable`, `_obj_type` - what the saver stores in a group of its own.
    `keras.src.backend.torch.optimizers` - the module named in files that Keras' torch optimizers write.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import keras
import numpy as np
from keras.src.saving.keras_saveable import KerasSaveable

from keras_shardopt.arguments import listed
from keras_shardopt.backends import for_backend
from keras_shardopt.backends.active import placement, processes, runtime
from keras_shardopt.backends.models import has_built_in_step, model_compiled_with
from keras_shardopt.backends.user_warnings import warn
from keras_shardopt.numerics import Optimizer, Variable
from keras_shardopt.wrapping.chain import kind_of
from keras_shardopt.wrapping.slots import without_counters, without_digits, without_numbers

# Where processes can hold parts of one array.
_parts = for_backend({"jax": "keras_shardopt.backends.jax.placement"})

_TORCH_MODULE = "keras.src.backend.torch.optimizers."


class DividedState(Protocol):
    """State of which each replica holds a part."""

    def stored_shape(self, variable: Variable) -> tuple[int, ...] | None:
        """The shape of the whole; None where only another replica knows it."""

    def stored(self, variable: Variable) -> np.ndarray:
        """The whole, which all replicas call for together."""

    def assign_stored(self, variable: Variable, array: Any) -> None:
        """Takes this replica's part of the whole."""


class StoredOptimizer(Optimizer, Protocol):
    """An `OptimizerWrapper`: the members that its files use."""

    _inner_state: list[Variable]
    _loaded: Any
    _loaded_own: Any
    _saved_apart: WrapperState
    _divided_state: DividedState | None
    _load_inner: Callable[[Any], None]
    _slot_keys: Callable[[Variable], list[Any]]
    _slots: Callable[[], Any]
    _wrappers: list[Any]


def load(optimizer: StoredOptimizer, store: Any) -> None:
    """Lets a wrapper read a state, or keep it until it is built; see `OptimizerWrapper.load_own_variables`."""
    if not list(store.keys()):
        warn(f"The file holds no optimizer state; that of {optimizer!r} stays as it is.")
        return
    state = optimizer._inner_state
    if not optimizer.built:
        arrays = _Loaded(store)
        # An optimizer that was never built stores its rate and a counter at 0, and fits at once.
        fresh = len(arrays) == len(state) and not np.any(arrays.get("0", 0))
        if not fresh:
            optimizer._loaded = arrays
            build_for_its_model(optimizer, arrays.notes)
            return
    elif len(state) > 2 and _was_never_built(store):
        return  # `load_model` has built this one, and made it with the same rate
    _check_fits(optimizer, store, state)
    _check_names(optimizer, store)
    optimizer._load_inner(store)


def load_what_came_before(optimizer: StoredOptimizer) -> None:
    """Assigns what was loaded before the optimizer was built."""
    came = ((optimizer._loaded, optimizer), (optimizer._loaded_own, optimizer._saved_apart))
    optimizer._loaded = optimizer._loaded_own = None
    for arrays, target in came:
        if arrays is not None:
            with runtime.init_scope():
                target.load_own_variables(arrays)


def build_for_its_model(optimizer: StoredOptimizer, notes: _Notes | None = None) -> None:
    """Builds an optimizer for the model that is compiled with it, unless `notes` name other variables or another kind.

    Counters, rates and scales can be read then before training starts. Otherwise training builds it: a layer may yet be
    frozen, and a `train_step` may update some variables only.
    """
    model = model_compiled_with(optimizer)
    if model is None or not model.built:
        return
    variables = model.trainable_variables
    if notes is not None and not (notes.kind in (None, kind_of(optimizer)) and _may_be_for(notes, model)):
        return
    with placement.colocate_with(variables[0]) if variables else contextlib.nullcontext():
        if variables and not processes.creates_variables_collectively():  # perhaps one process loads for all
            optimizer.build(variables)


def assign_all(optimizer: StoredOptimizer, store: Any, variables: Sequence[Variable]) -> None:
    """Assigns each variable its array, if all of them fit."""
    _check_fits(optimizer, store, variables)
    divided = optimizer._divided_state
    for i, variable in enumerate(variables):
        variable.assign(store[str(i)]) if divided is None else divided.assign_stored(variable, store[str(i)])


def stored_value(optimizer: StoredOptimizer, variable: Variable) -> np.ndarray:
    """What a file has for a variable of the state. Where replicas hold parts of it, all of them call this together."""
    divided: DividedState | None = optimizer._divided_state
    return whole_value(variable) if divided is None else divided.stored(variable)


def whole_value(variable: Variable) -> np.ndarray:
    """All of a variable. Processes that hold parts of it call this together."""
    return keras.ops.convert_to_numpy(variable) if _parts is None else _parts.full_value(variable)


def named_store(optimizer: StoredOptimizer, store: Any) -> Any:
    """The store, so that it also notes what the arrays are that `optimizer` writes to it."""
    if isinstance(store, _Named):
        return store
    if not optimizer.built:
        return _Named(store, _Notes({}, None, None))
    return _Named(store, _Notes(_slots_in_state(optimizer), kind_of(optimizer), len(optimizer._trainable_variables)))


def _slots_in_state(optimizer: StoredOptimizer) -> dict[str, str]:
    """Under the key of an array in files what it is: the variable in its layer, and the name of the slot."""
    if not optimizer.built:
        return {}
    variables = optimizer._trainable_variables
    path_of = {key: _place(v) for v in variables for key in optimizer._slot_keys(v)}
    names = {id(slot): f"{path_of[key]} {name}" for key, name, slot in optimizer._slots() if key in path_of}
    state = enumerate(optimizer._inner_state)
    return {str(i): names[id(variable)] for i, variable in state if id(variable) in names}


def _may_be_for(notes: _Notes, model: Any) -> bool:
    """Whether a state may be that of an optimizer which updates what is trainable now, all of it."""
    mine = collections.Counter(without_digits([*{_place(v) for v in model.trainable_variables}]))
    stored = collections.Counter(without_digits([*{slot.rpartition(" ")[0] for slot in notes.slots.values()}]))
    if notes.num_variables is not None:  # some of them may have no slots
        return notes.num_variables == len(model.trainable_variables) and stored <= mine
    return stored == mine if stored else has_built_in_step(model)


def _place(variable: Variable) -> str:
    """Layer and variable: models of the same layers may have other names."""
    return "/".join(str(getattr(variable, "path", variable.name)).split("/")[-2:])


def _check_fits(optimizer: StoredOptimizer, store: Any, variables: Sequence[Variable]) -> None:
    # Keras itself warns and goes on with a fresh optimizer, which nobody notices until the loss jumps.
    if len(store.keys()) != len(variables):
        raise ValueError(
            f"The stored state must have {len(variables)} arrays, one for each of "
            f"{[v.path for v in variables]}. Received: {len(store.keys())} arrays. "
            "Was it saved with another optimizer or other trainable variables?"
        )
    divided = optimizer._divided_state
    for i, variable in enumerate(variables):
        shape = tuple(np.shape(store[str(i)]))
        expected = tuple(variable.shape) if divided is None else divided.stored_shape(variable)
        if expected is not None and shape != expected:
            raise ValueError(
                f"The stored array of `{variable.path}` must have shape {expected}. "
                f"Received: shape {shape}. Was it saved with other trainable variables?"
            )


def _check_names(optimizer: StoredOptimizer, store: Any) -> None:
    """Refuses what names distinguish, where numbers and shapes agree."""
    notes = _notes_in(store)
    mine, kind = _slots_in_state(optimizer), kind_of(optimizer)
    # Files from before the class was noted have numbers of their own in names, also in those given by users.
    comparable = without_counters if notes.kind else without_numbers
    keys = [key for key in mine if key in notes.slots]
    found, wanted = ([_comparable_slot(names[key], comparable) for key in keys] for names in (notes.slots, mine))
    differing = [key for key, one, other in zip(keys, found, wanted) if one != other]
    # A program may count up names itself. The same names in another order are another architecture.
    counted = [[_comparable_slot(slot, without_digits) for slot in slots] for slots in (found, wanted)]
    if counted[0] == counted[1] and sorted(found) != sorted(wanted):
        differing = []
    received = [f"`{notes.slots[key]}` where this optimizer has `{mine[key]}`" for key in differing]
    if optimizer.built and notes.kind not in (None, kind):
        received = [f"state of `{notes.kind}` where this optimizer is `{kind}`", *received]
    if received:
        raise ValueError(
            "The stored state must be that of the same variables and the same kind of optimizer. "
            f"Received: {listed(received)}. Was it saved with another optimizer, or were layers renamed? "
            "`model.load_weights(..., skip_mismatch=True)` loads the rest."
        )


def _was_never_built(store: Any) -> bool:
    """Whether the arrays are those of an optimizer before it is built: a counter at 0 and a rate."""
    return len(store.keys()) == 2 and not np.any(store["0"]) and all(np.ndim(store[key]) == 0 for key in ("0", "1"))


def portable(config: Any) -> Any:
    """Names torch's private optimizer classes by their public names, so that every backend can load the config."""
    if isinstance(config, dict):
        if str(config.get("module", "")).startswith(_TORCH_MODULE):
            config = {**config, "module": "keras.optimizers", "registered_name": None}
        return {key: portable(value) for key, value in config.items()}
    if isinstance(config, list):
        return [portable(value) for value in config]
    return config


class _Notes(NamedTuple):
    """What a file says about the arrays of an optimizer's state."""

    slots: dict[str, str]
    """By key, for some of them: the variable in its layer, and the name of the slot."""

    kind: str | None
    """The class of the innermost optimizer."""

    num_variables: int | None
    """How many variables it updates; None in files from before this was noted."""


class _Named:
    """A store that notes next to arrays what they are, in an HDF5 file, as attributes that others ignore."""

    def __init__(self, store: Any, notes: _Notes) -> None:
        self._store = store
        self._notes = notes

    def __setitem__(self, key: str, value: Any) -> None:
        self._store[key] = value
        group = getattr(self._store, "_h5_entry_group", {})
        notes: dict[str, Any] = {"slot": self._notes.slots.get(key)}
        if key == "0":
            notes |= {"optimizer": self._notes.kind, "variables": self._notes.num_variables}
        for name, note in notes.items() if key in group else ():
            if note is not None:
                with contextlib.suppress(OSError):  # a disk that is full says so again when the file is closed
                    group[key].attrs[name] = note


class _Loaded(dict[str, Any]):
    """The arrays of a store, and what the file says about them."""

    def __init__(self, store: Any) -> None:
        super().__init__({key: np.array(store[key]) for key in list(store.keys())})
        self.notes = _notes_in(store)


def _notes_in(store: Any) -> _Notes:
    """What a store, or what was loaded from one, says about its arrays."""
    if isinstance(store, _Loaded):
        return store.notes
    group = getattr(store, "_h5_entry_group", {})
    attributes = {key: getattr(group[key], "attrs", {}) for key in list(group)}
    kinds = [str(found["optimizer"]) for found in attributes.values() if "optimizer" in found]
    counts = [int(found["variables"]) for found in attributes.values() if "variables" in found]
    slots = {key: str(found["slot"]) for key, found in attributes.items() if "slot" in found}
    return _Notes(slots, kinds[0] if kinds else None, counts[0] if counts else None)


def _comparable_slot(slot: str, comparable: Callable[[Sequence[str]], list[str]]) -> str:
    """The name of a slot and its variable without what may differ in files of the same model."""
    path, _, name = slot.rpartition(" ")
    return f"{comparable([path])[0]} {name}"


class WrapperState(KerasSaveable):
    """The variables that the wrappers of a chain keep themselves, as the saver wants them: an object with a group."""

    def __init__(self, optimizer: StoredOptimizer) -> None:
        self._optimizer = optimizer

    def _obj_type(self) -> str:
        return "Optimizer"

    def __dir__(self) -> list[str]:
        return []  # nothing further inside for the saver

    def save_own_variables(self, store: Any) -> None:
        """Writes them."""
        # Not before it is built, as some variables are made only then; until then all have their start values.
        for i, variable in enumerate(self.variables if self._optimizer.built else []):
            store[str(i)] = stored_value(self._optimizer, variable)

    def load_own_variables(self, store: Any) -> None:
        """Reads them. A file of the plain inner optimizer has none, and changes nothing here."""
        optimizer = self._optimizer
        arrays = {key: np.array(store[key]) for key in list(store.keys())}
        if not arrays:
            return
        if not optimizer.built:
            optimizer._loaded_own = arrays
            return
        assign_all(optimizer, arrays, self.variables)

    @property
    def variables(self) -> list[Variable]:
        """What files have of the wrappers' state, from the inside out."""
        return [v for wrapper in self._optimizer._wrappers for v in wrapper._lasting_state]
