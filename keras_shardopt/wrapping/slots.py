"""The state of an optimizer by variable and slot name, with the interface of TensorFlow 1.

A slot is state of one trainable variable, such as a momentum. Keras has no map from variables to slots, so this module
finds slots by name: `add_variable_from_reference` derives the name from the variable's path.

Private names of Keras touched here (test_private_names.py checks that each exists):
    `Optimizer._trainable_variables`, `_var_key` - the variables of the optimizer's build.
    `Optimizer.add_variable_from_reference` - names a slot of a variable by its path, an underscore and a suffix.
    `keras.src.backend.common.global_state` - holds "name_scope_stack", the start of variable paths.
    `keras.src.utils.naming.to_snake_case` - converts a layer's class to its default name; Keras then adds a number.
And of TensorFlow (tests/unit/wrapping/test_tensorflow_checkpoint.py checks that it exists):
    `checkpoint.util.serialize_slot_variables` - searches for `get_slot_names` in the `dir` of an object.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import keras
from keras.src.backend.common import global_state
from keras.src.utils.naming import to_snake_case

from keras_shardopt.backends.keras_callers import is_running
from keras_shardopt.numerics import Optimizer, Variable

_STORES_SLOTS = ("serialize_slot_variables", "tensorflow.python.checkpoint.util")


class SlotAccess:
    """A mixin with `get_name`, `get_slot_names` and `get_slot` for a `keras.optimizers.Optimizer`."""

    name: str
    _var_key: Any

    def __dir__(self) -> list[str]:
        # Hide `get_slot_names` from TensorFlow's checkpoints. They would use it to store the slots twice, and fail.
        hidden = {"get_slot_names"} if is_running(*_STORES_SLOTS) else set()
        return [name for name in super().__dir__() if name not in hidden]

    def _optimizers_with_slots(self) -> Sequence[Any]:
        """Return the optimizers that hold the slots: this optimizer, or for a wrapper, the optimizers inside it."""
        return [self]

    def get_name(self) -> str:
        """The name of the optimizer."""
        return self.name

    def get_slot_names(self) -> list[str]:
        """Return the sorted slot names, for Adam `["momentum", "velocity"]`. The list is empty before `build`."""
        return sorted({name for _, name, _ in self._slots()})

    def get_slot(self, variable: Variable, name: str) -> Variable | None:
        """Return the slot with this name of a trainable variable. A wrapper returns the inner optimizer's slot.

        Args:
            variable: one of the trainable variables of the optimizer's build.
            name: one of `get_slot_names()`.

        Returns:
            A `keras.Variable`; None, as in TensorFlow 1, if no such state exists.
        """
        keys = self._slot_keys(variable)
        return next((slot for key, n, slot in self._slots() if key in keys and n == name), None)

    def _slot_keys(self, variable: Variable) -> list[Any]:
        """Return the keys under which `_slots` yields the slots of this variable."""
        return [self._var_key(variable)]

    def _slots(self) -> Iterator[tuple[Any, str, Variable]]:
        """For each slot, yield the key of its variable, the name of the slot, and the slot."""
        for optimizer in self._optimizers_with_slots():
            variables = getattr(optimizer, "_trainable_variables", [])
            for position, name, slot in slots_of(optimizer, variables):
                yield optimizer._var_key(variables[position]), name, slot


def slots_of(optimizer: Optimizer, variables: Sequence[Variable]) -> Iterator[tuple[int, str, Variable]]:
    """For each slot of an optimizer, yield the position of its variable, the name of the slot, and the slot."""
    # If variables share a path, their slots share a name, and are in the order of the variables. If several prefixes
    # match, use the longest: "a_b_momentum" belongs to "a/b" even if a variable "a" exists.
    prefixes: dict[str, list[int]] = {}
    for position, variable in enumerate(variables):
        prefixes.setdefault(slot_prefix(variable), []).append(position)
    num_seen: dict[str, int] = {}
    for slot in optimizer.variables:
        matching = [prefix for prefix in prefixes if slot.name.startswith(prefix)]
        if matching:
            prefix = max(matching, key=len)
            sharing, occurrence = prefixes[prefix], num_seen.get(slot.name, 0)
            num_seen[slot.name] = occurrence + 1
            yield sharing[min(occurrence, len(sharing) - 1)], slot.name[len(prefix) :], slot


def full_name(variable: Variable) -> str:
    """Return the path of a variable, or the name if it is not a variable of Keras."""
    return str(getattr(variable, "path", variable.name))


def slot_prefix(variable: Variable) -> str:
    """Return the prefix of the names of a variable's slots."""
    name = getattr(variable, "path", None) or str(variable.name).replace(":", "_")
    return name.replace("/", "_") + "_"


def without_counters(paths: Sequence[str]) -> list[str]:
    """Return paths without the numbers of Keras' automatic names: "dense_7/kernel" becomes "dense/kernel".

    These numbers depend on the other layers of a program, and on whether a layer comes from a file. Numbers in users'
    names remain: "block_1" keeps its number unless a layer class `Block` exists.
    """
    counted = re.compile(rf"(?<![A-Za-z0-9])({'|'.join(_automatic_names())})_\d+(?=_|$)")
    return ["/".join(counted.sub(r"\1", part) for part in path.split("/")) for path in paths]


def without_numbers(paths: Sequence[str]) -> list[str]:
    """Return paths without the number at the end of each name: "block_1/kernel" becomes "block/kernel"."""
    return ["/".join(re.sub(r"_\d+$", "", part) for part in path.split("/")) for path in paths]


def without_digits(paths: Sequence[str]) -> list[str]:
    """Return paths without digits at the end of each name: both "block1" and "block_1" become "block"."""
    return ["/".join(re.sub(r"_?\d+$", "", part) for part in path.split("/")) for path in paths]


def _automatic_names() -> list[str]:
    """Return the automatic names of layers and variables, without numbers, longest first."""
    kinds: list[type] = [keras.layers.Layer, keras.Variable]
    for kind in kinds:
        kinds.extend(type.__subclasses__(kind))
    return sorted({re.escape(to_snake_case(kind.__name__)) for kind in kinds} - {""}, key=len, reverse=True)


@contextlib.contextmanager
def empty_name_scope() -> Iterator[None]:
    """Make the paths of new variables independent of the current name scope."""
    stack = global_state.get_global_attribute("name_scope_stack")
    global_state.set_global_attribute("name_scope_stack", [])
    try:
        yield
    finally:
        global_state.set_global_attribute("name_scope_stack", stack)


def named_like(variable: Variable, **arguments: Any) -> Variable:
    """Return a new variable with the path and the name of `variable`."""
    *scopes, name = full_name(variable).split("/")
    with contextlib.ExitStack() as stack:
        stack.enter_context(empty_name_scope())
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        return keras.Variable(name=name, **arguments)
