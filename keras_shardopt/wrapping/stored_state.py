"""The state of a wrapper and of what is inside it, as files have it.

Private names of Keras touched here (a test holds each of them):
    `H5IOStore._h5_entry_group` - the group of an HDF5 file in which an optimizer's arrays are.
    `keras.src.saving.keras_saveable.KerasSaveable`, `_obj_type` - what the saver stores in a group of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from keras.src.saving.keras_saveable import KerasSaveable

MOST_NAMES = 4


class _Notes(NamedTuple):
    """What a file says about the arrays of an optimizer's state."""

    slots: dict[str, str]
    """By key, for some of them: the variable in its layer, and the name of the slot."""

    kind: str | None
    """The class of the innermost optimizer."""


class Named:
    """A store that notes beside arrays what they are, in an HDF5 file, as attributes that others ignore."""

    def __init__(self, store: Any, slots: dict[str, str], kind: str | None) -> None:
        self._store = store
        self._slots = slots
        self._kind = kind

    def __setitem__(self, key: str, value: Any) -> None:
        self._store[key] = value
        group = getattr(self._store, "_h5_entry_group", {})
        notes = {"slot": self._slots.get(key), "optimizer": self._kind if key == "0" else None}
        for name, note in notes.items() if key in group else ():
            if note is not None:
                with contextlib.suppress(OSError):  # a disk that is full says so again when the file is closed
                    group[key].attrs[name] = note


class Loaded(dict[str, Any]):
    """The arrays of a store, and what the file says about them."""

    def __init__(self, store: Any) -> None:
        super().__init__({key: np.array(store[key]) for key in list(store.keys())})
        self.notes = notes_in(store)


def notes_in(store: Any) -> _Notes:
    """What a store, or what was loaded from one, says about its arrays."""
    if isinstance(store, Loaded):
        return store.notes
    group = getattr(store, "_h5_entry_group", {})
    attributes = {key: getattr(group[key], "attrs", {}) for key in list(group)}
    kinds = [str(found["optimizer"]) for found in attributes.values() if "optimizer" in found]
    slots = {key: str(found["slot"]) for key, found in attributes.items() if "slot" in found}
    return _Notes(slots, kinds[0] if kinds else None)


def comparable_slot(slot: str, comparable: Callable[[Sequence[str]], list[str]]) -> str:
    """The name of a slot and its variable without what may differ in files of the same model."""
    path, _, name = slot.rpartition(" ")
    return f"{comparable([path])[0]} {name}"


class WrapperState(KerasSaveable):
    """The variables that the wrappers of a chain keep themselves, as the saver wants them: an object with a group."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def _obj_type(self) -> str:
        return "Optimizer"

    def __dir__(self) -> list[str]:
        return []  # nothing further inside for the saver

    def save_own_variables(self, store: Any) -> None:
        """Writes them."""
        # Not before it is built, as some variables are made only then; until then all have their start values.
        for i, variable in enumerate(self._optimizer._stored_wrapper_state if self._optimizer.built else []):
            store[str(i)] = self._optimizer._stored_value(variable)

    def load_own_variables(self, store: Any) -> None:
        """Reads them. A file of the inner optimizer alone has none, and changes nothing here."""
        optimizer = self._optimizer
        arrays = {key: np.array(store[key]) for key in list(store.keys())}
        if not arrays:
            return
        if not optimizer.built:
            optimizer.__dict__["_loaded_own"] = arrays
            return
        variables = optimizer._stored_wrapper_state
        optimizer._check_fits(arrays, variables)
        for i, variable in enumerate(variables):
            optimizer._assign_stored(variable, arrays[str(i)])


def was_never_built(store: Any) -> bool:
    """Whether the arrays are those of an optimizer before it is built: a counter at 0 and a rate."""
    return len(store.keys()) == 2 and not np.any(store["0"]) and all(np.ndim(store[key]) == 0 for key in ("0", "1"))
