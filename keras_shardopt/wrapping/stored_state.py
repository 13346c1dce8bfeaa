"""The state of a wrapper and of the optimizers inside it, in Keras' files.

A file stores the state of the innermost optimizer in the same layout as without wrappers. So files can be exchanged
between `Adam()` and a wrapper around it. The wrappers' own state is in a separate group.

Private names of Keras touched here (a test checks that each exists):
    `H5IOStore._h5_entry_group` - the group of an HDF5 file that contains an optimizer's arrays.
    `keras.src.saving.keras_saveable.KerasSaveable`, `_obj_type` - an object that the saver stores in a separate group.
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
from keras_shardopt.backends import for_backend, stored_parts
from keras_shardopt.backends.active import placement, processes, runtime
from keras_shardopt.backends.models import has_built_in_step, model_compiled_with
from keras_shardopt.backends.stored_parts import OwnParts
from keras_shardopt.backends.user_warnings import warn
from keras_shardopt.numerics import Optimizer, Variable
from keras_shardopt.wrapping.chain import kind_of
from keras_shardopt.wrapping.slots import full_name, without_counters, without_digits, without_numbers

# JAX only (otherwise None): reads an array that is divided among processes.
_parts = for_backend({"jax": "keras_shardopt.backends.jax.placement"})


class StoredState:
    """The state of optimizers in files. Each process has whole variables; subclasses are for divided ones."""

    def stored_shape(self, variable: Variable) -> tuple[int, ...] | None:
        """Return the undivided shape of a state variable; None if only another replica holds its values."""
        return tuple(variable.shape)

    def stored(self, variable: Variable) -> np.ndarray:
        """Return the undivided value of a state variable. All replicas must call this together."""
        return keras.ops.convert_to_numpy(variable) if _parts is None else _parts.full_value(variable)

    def own_parts(self, variable: Variable, process: tuple[int, int]) -> OwnParts:
        """Return the parts of a state variable that this process saves in a sharded checkpoint."""
        return stored_parts.own_parts(variable, process)

    def assign_stored(self, variable: Variable, array: Any) -> None:
        """Assign this replica's part of an undivided array to a state variable."""
        stored_parts.assign_stored(variable, array)


class StoredOptimizer(Optimizer, Protocol):
    """The type of an `OptimizerWrapper`, with the members that this module uses."""

    _inner_state: list[Variable]
    _loaded: Any
    _loaded_wrapper_state: Any
    _saved_wrapper_state: WrapperState
    _stored_state: StoredState
    _load_inner: Callable[[Any], None]
    _slot_keys: Callable[[Variable], list[Any]]
    _slots: Callable[[], Any]
    _wrappers: list[Any]


def load(optimizer: StoredOptimizer, store: Any) -> None:
    """Load the arrays in `store` into a wrapper. If the wrapper is not built, keep the arrays until `build`."""
    if not list(store.keys()):
        warn(f"The file holds no optimizer state, so {optimizer!r} keeps its state.")
        return
    state = optimizer._inner_state
    if not optimizer.built:
        arrays = _LoadedArrays(store)
        # A file saved by an unbuilt optimizer has only a counter of 0 and the learning rate, so assign both now. Keep
        # the arrays of any other file until the build.
        fresh = len(arrays) == len(state) and not np.any(arrays.get("0", 0))
        if not fresh:
            optimizer._loaded = arrays
            build_for_its_model(optimizer, arrays.metadata)
            return
    elif len(state) > 2 and _was_never_built(store):
        return  # nothing to load: `load_model` has created this optimizer with the stored learning rate
    _check_fits(optimizer, store, state)
    _check_metadata(_own_metadata(optimizer), _metadata_in(store))
    optimizer._load_inner(store)


def load_deferred(optimizer: StoredOptimizer) -> None:
    """Assign the arrays that were loaded before the optimizer was built."""
    loaded = ((optimizer._loaded, optimizer), (optimizer._loaded_wrapper_state, optimizer._saved_wrapper_state))
    optimizer._loaded = optimizer._loaded_wrapper_state = None
    for arrays, target in loaded:
        if arrays is not None:
            with runtime.init_scope():
                target.load_own_variables(arrays)


def build_for_its_model(optimizer: StoredOptimizer, metadata: _Metadata | None = None) -> None:
    """Build an optimizer for the model compiled with it, so its counters are readable before training.

    Does nothing if `metadata`, from a file, describes other variables or another class of optimizer. Training then
    builds the optimizer.
    """
    model = model_compiled_with(optimizer)
    if model is None or not model.built:
        return
    variables = model.trainable_variables
    if metadata is not None and not (metadata.kind in (None, kind_of(optimizer)) and _may_be_for(metadata, model)):
        return
    with placement.colocate_with(variables[0]) if variables else contextlib.nullcontext():
        if variables and not processes.creates_variables_collectively():  # perhaps this process loads alone
            optimizer.build(variables)


def assign_all(optimizer: StoredOptimizer, store: Any, variables: Sequence[Variable]) -> None:
    """Assign each variable its array in `store`, after a check of all shapes."""
    _check_fits(optimizer, store, variables)
    state = optimizer._stored_state
    for i, variable in enumerate(variables):
        state.assign_stored(variable, _lazily(store, str(i)))


def _lazily(store: Any, key: str) -> Any:
    """Return an array of a store. An array of a sharded checkpoint is read later, at its first use."""
    return store.stored(key) if hasattr(store, "stored") else store[key]


def save_all(optimizer: StoredOptimizer, store: Any, variables: Sequence[Variable]) -> None:
    """Write the value of each variable to `store`. Replicas with divided state must call this together."""
    for i, variable in enumerate(variables):
        store[str(i)] = _stored_value(optimizer, variable, store)


def _stored_value(optimizer: StoredOptimizer, variable: Variable, store: Any) -> np.ndarray | OwnParts:
    """Return the value of a variable for a file. For a sharded checkpoint, return the parts that this process saves."""
    state = optimizer._stored_state
    process_for: Callable[[Variable], tuple[int, int]] | None = getattr(store, "process_for", None)
    return state.stored(variable) if process_for is None else state.own_parts(variable, process_for(variable))


def named_store(optimizer: StoredOptimizer, store: Any) -> Any:
    """Return a wrapper of `store` that stores a name, such as "momentum", with each array that `optimizer` saves."""
    return store if isinstance(store, _AnnotatedStore) else _AnnotatedStore(store, _own_metadata(optimizer))


def _own_metadata(optimizer: StoredOptimizer) -> _Metadata:
    """Return the metadata of the optimizer's state, to detect files of other variables or optimizers."""
    if not optimizer.built:
        return _Metadata({}, None, None)
    variables = optimizer._trainable_variables
    path_of = {key: _layer_and_name(v) for v in variables for key in optimizer._slot_keys(v)}
    names = {id(slot): f"{path_of[key]} {name}" for key, name, slot in optimizer._slots() if key in path_of}
    state = enumerate(optimizer._inner_state)
    slots = {str(i): names[id(variable)] for i, variable in state if id(variable) in names}
    return _Metadata(slots, kind_of(optimizer), len(variables))


def _may_be_for(metadata: _Metadata, model: Any) -> bool:
    """Whether a file with this metadata may belong to an optimizer of this model's trainable variables."""
    mine = collections.Counter(without_digits([*{_layer_and_name(v) for v in model.trainable_variables}]))
    stored = collections.Counter(without_digits([*{slot.rpartition(" ")[0] for slot in metadata.slots.values()}]))
    if metadata.num_variables is not None:  # newer files; they may lack some variables' state, so use `<=`
        return metadata.num_variables == len(model.trainable_variables) and stored <= mine
    return stored == mine if stored else has_built_in_step(model)


def _layer_and_name(variable: Variable) -> str:
    """Return the last two names in a variable's path, such as "dense/kernel"."""
    return "/".join(full_name(variable).split("/")[-2:])


def _check_fits(optimizer: StoredOptimizer, store: Any, variables: Sequence[Variable]) -> None:
    # Raise, because Keras only warns and trains with a fresh optimizer: the loss jumps without an obvious cause.
    if len(store.keys()) != len(variables):
        raise ValueError(
            f"The stored state must have {len(variables)} arrays, one for each of {[v.path for v in variables]}. "
            f"Received: {len(store.keys())} arrays. Was the file saved with another optimizer or other trainable "
            "variables?"
        )
    state = optimizer._stored_state
    for i, variable in enumerate(variables):
        shape, expected = tuple(np.shape(_lazily(store, str(i)))), state.stored_shape(variable)
        if expected is not None and shape != expected:
            raise ValueError(
                f"The stored array of `{variable.path}` must have shape {expected}. Received: shape {shape}. Was the "
                "file saved with other trainable variables?"
            )


def check_groups(own: Any, stored: Any) -> None:
    """Raise ValueError unless two groups of an HDF5 file describe the same variables and the same optimizer."""
    _check_metadata(_metadata_in(own), _metadata_in(stored))


def _check_metadata(own: _Metadata, metadata: _Metadata) -> None:
    """Raise ValueError if arrays of the right shapes belong to other variables or another optimizer."""
    mine, kind = own.slots, own.kind
    # Files without the optimizer's class are old, and the numbers in their names can differ. For these, ignore numbers.
    comparable = without_counters if metadata.kind else without_numbers
    keys = [key for key in mine if key in metadata.slots]
    found, wanted = ([_comparable_slot(names[key], comparable) for key in keys] for names in (metadata.slots, mine))
    differing = [key for key, one, other in zip(keys, found, wanted) if one != other]
    # A program may number its layers, so names may differ in digits. But the same names in another order are an error.
    counted = [[_comparable_slot(slot, without_digits) for slot in slots] for slots in (found, wanted)]
    if counted[0] == counted[1] and sorted(found) != sorted(wanted):
        differing = []
    received = [f"the file has `{metadata.slots[key]}`, but this optimizer has `{mine[key]}`" for key in differing]
    if kind is not None and metadata.kind not in (None, kind):
        received = [f"the file has the state of `{metadata.kind}`, but this optimizer is `{kind}`", *received]
    if received:
        raise ValueError(
            "The stored state must belong to the same variables and the same kind of optimizer. Received: "
            f"{listed(received)}. Was the file saved with another optimizer, or were layers renamed? "
            "`model.load_weights(..., skip_mismatch=True)` loads everything else in the file."
        )


def _was_never_built(store: Any) -> bool:
    """Whether the arrays are those of an optimizer before its build: a counter of 0 and a learning rate."""
    return len(store.keys()) == 2 and not np.any(store["0"]) and all(np.ndim(store[key]) == 0 for key in ("0", "1"))


class _Metadata(NamedTuple):
    """Attributes of a file that describe an optimizer's arrays."""

    slots: dict[str, str]
    """Maps the key of each state array to its name: layer, variable and slot, such as "dense/kernel momentum"."""

    kind: str | None
    """The class of the innermost optimizer."""

    num_variables: int | None
    """The number of variables that the optimizer updates; None in older files."""


class _AnnotatedStore:
    """A store that adds attributes with metadata to arrays in an HDF5 file. Other readers ignore these attributes."""

    def __init__(self, store: Any, metadata: _Metadata) -> None:
        self._store = store
        self._metadata = metadata
        self.process_for = getattr(store, "process_for", None)

    def __setitem__(self, key: str, value: Any) -> None:
        self._store[key] = value
        group = getattr(self._store, "_h5_entry_group", {})
        attributes: dict[str, Any] = {"slot": self._metadata.slots.get(key)}
        if key == "0":
            attributes |= {"optimizer": self._metadata.kind, "variables": self._metadata.num_variables}
        for name, attribute in attributes.items() if key in group else ():
            if attribute is not None:
                with contextlib.suppress(OSError):  # a full disk raises again when the file is closed
                    group[key].attrs[name] = attribute


class _LoadedArrays(dict[str, Any]):
    """The arrays of a store, with the metadata of its file."""

    def __init__(self, store: Any) -> None:
        super().__init__({key: np.array(store[key]) for key in list(store.keys())})
        self.metadata = _metadata_in(store)


def _metadata_in(store: Any) -> _Metadata:
    """Return the metadata of a store, or of the arrays loaded from one."""
    if isinstance(store, _LoadedArrays):
        return store.metadata
    group = getattr(store, "_h5_entry_group", {})
    attributes = {key: getattr(group[key], "attrs", {}) for key in list(group)}
    kinds = [str(found["optimizer"]) for found in attributes.values() if "optimizer" in found]
    counts = [int(found["variables"]) for found in attributes.values() if "variables" in found]
    slots = {key: str(found["slot"]) for key, found in attributes.items() if "slot" in found}
    return _Metadata(slots, kinds[0] if kinds else None, counts[0] if counts else None)


def _comparable_slot(slot: str, comparable: Callable[[Sequence[str]], list[str]]) -> str:
    """Return a name such as "dense/kernel momentum", with `comparable` applied to its first part, the path."""
    path, _, name = slot.rpartition(" ")
    return f"{comparable([path])[0]} {name}"


class WrapperState(KerasSaveable):
    """The variables of nested wrappers, as an object for which Keras' saver creates a group in files."""

    def __init__(self, optimizer: StoredOptimizer) -> None:
        self._optimizer = optimizer

    def _obj_type(self) -> str:
        return "Optimizer"

    def __dir__(self) -> list[str]:
        return []  # so the saver finds no members to store

    def save_own_variables(self, store: Any) -> None:
        """Write the wrappers' variables to `store`."""
        # Write nothing before `build`, because some variables do not exist, and the rest have their initial values.
        save_all(self._optimizer, store, self.variables if self._optimizer.built else [])

    def load_own_variables(self, store: Any) -> None:
        """Read the wrappers' variables. A file of an optimizer without wrappers has none, and changes nothing."""
        optimizer = self._optimizer
        keys = list(store.keys())
        if keys and not optimizer.built:
            optimizer._loaded_wrapper_state = {key: np.array(store[key]) for key in keys}
        elif keys:
            assign_all(optimizer, store, self.variables)

    @property
    def variables(self) -> list[Variable]:
        """The wrappers' variables that files contain, from the innermost wrapper to the outermost."""
        return [v for wrapper in self._optimizer._wrappers for v in wrapper._saved_state]
