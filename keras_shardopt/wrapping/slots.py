"""The state of an optimizer by variable and name, as TensorFlow 1's optimizers gave it.

Hides that a slot is found by its name only: `add_variable_from_reference` makes it of the variable's path.

Private names of Keras touched here (test_private_names.py holds them):
    `Optimizer._trainable_variables`, `_var_key` - what the optimizer was built on.
    `Optimizer.add_variable_from_reference` - names a slot of a variable by its path, an underscore and a suffix.
    `keras.src.backend.common.global_state` - holds "name_scope_stack", of which variable paths are made.
    `keras.src.utils.naming.to_snake_case` - makes the name of a layer of its class; Keras then adds a number.
And of TensorFlow (tests/unit/wrapping/test_tensorflow_checkpoint.py holds it):
    `checkpoint.util.serialize_slot_variables` - looks for `get_slot_names` in the `dir` of an object.
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
    """`get_name`, `get_slot_names` and `get_slot` for a `keras.optimizers.Optimizer`, which it is mixed into."""

    name: str
    _var_key: Any

    def __dir__(self) -> list[str]:
        # TensorFlow's checkpoints would store the slots of what has this method a second time, and refuse to.
        hidden = {"get_slot_names"} if is_running(*_STORES_SLOTS) else set()
        return [name for name in super().__dir__() if name not in hidden]

    def _optimizers_with_slots(self) -> Sequence[Any]:
        """The optimizers whose state this is: a wrapper has that of others."""
        return [self]

    def get_name(self) -> str:
        """The name of the optimizer."""
        return self.name

    def get_slot_names(self) -> list[str]:
        """The names of the state that is kept for each variable, sorted: for Adam `["momentum", "velocity"]`.

        Empty before the optimizer is built.
        """
        return sorted({name for _, name, _ in self._slots()})

    def get_slot(self, variable: Variable, name: str) -> Variable | None:
        """The state of that name for a trainable variable; of a wrapper, the inner optimizer's.

        Args:
            variable: one of the variables that the optimizer was built on.
            name: one of `get_slot_names()`.

        Returns:
            A `keras.Variable`; None, as in TensorFlow 1, if there is no such state (yet).
        """
        keys = self._slot_keys(variable)
        return next((slot for key, n, slot in self._slots() if key in keys and n == name), None)

    def _slot_keys(self, variable: Variable) -> list[Any]:
        """The keys under which state may be kept for a variable."""
        return [self._var_key(variable)]

    def _slots(self) -> Iterator[tuple[Any, str, Variable]]:
        """Key of the variable, name and state, for all state that was made like a trainable variable."""
        for optimizer in self._optimizers_with_slots():
            variables = getattr(optimizer, "_trainable_variables", [])
            for position, name, slot in slots_of(optimizer, variables):
                yield optimizer._var_key(variables[position]), name, slot


def slots_of(optimizer: Optimizer, variables: Sequence[Variable]) -> Iterator[tuple[int, str, Variable]]:
    """The state of an optimizer that belongs to a variable: its position, the state's name and the state itself."""
    # Variables may share a path; their slots are made in their order. The longest prefix is the right one:
    # "a_b_momentum" belongs to "a/b", also where there is an "a".
    prefixes: dict[str, list[int]] = {}
    for position, variable in enumerate(variables):
        prefixes.setdefault(slot_prefix(variable), []).append(position)
    num_seen: dict[str, int] = {}
    for slot in optimizer.variables:
        matching = [prefix for prefix in prefixes if slot.name.startswith(prefix)]
        if matching:
            prefix = max(matching, key=len)
            sharing, place = prefixes[prefix], num_seen.get(slot.name, 0)
            num_seen[slot.name] = place + 1
            yield sharing[min(place, len(sharing) - 1)], slot.name[len(prefix) :], slot


def slot_prefix(variable: Variable) -> str:
    """What the names of a variable's slots start with."""
    name = getattr(variable, "path", None) or str(variable.name).replace(":", "_")
    return name.replace("/", "_") + "_"


def without_counters(paths: Sequence[str]) -> list[str]:
    """Paths without the numbers that Keras adds to the names it makes itself: "dense_7/kernel" is "dense/kernel".

    Those depend on what else a program has made, and on whether a layer was made by it or from a file. A name made by
    Keras is that of a layer's class, and may stand within a longer one ("forward_lstm_1"). Numbers that a user has
    given stay: "block_1" has one, unless there is a layer class `Block`.
    """
    counted = re.compile(rf"(?<![A-Za-z0-9])({'|'.join(_automatic_names())})_\d+(?=_|$)")
    return ["/".join(counted.sub(r"\1", part) for part in path.split("/")) for path in paths]


def without_numbers(paths: Sequence[str]) -> list[str]:
    """Paths in which no name ends in a number, whoever has given it."""
    return ["/".join(re.sub(r"_\d+$", "", part) for part in path.split("/")) for path in paths]


def without_digits(paths: Sequence[str]) -> list[str]:
    """Paths in which no name ends in digits, with an underscore before them or without."""
    return ["/".join(re.sub(r"_?\d+$", "", part) for part in path.split("/")) for path in paths]


def _automatic_names() -> list[str]:
    """The names that Keras gives to layers and variables, without numbers, the longest first."""
    kinds: list[type] = [keras.layers.Layer, keras.Variable]
    for kind in kinds:
        kinds.extend(type.__subclasses__(kind))
    return sorted({re.escape(to_snake_case(kind.__name__)) for kind in kinds} - {""}, key=len, reverse=True)


@contextlib.contextmanager
def empty_name_scope() -> Iterator[None]:
    """A scope in which the paths of variables do not depend on where they are made."""
    stack = global_state.get_global_attribute("name_scope_stack")
    global_state.set_global_attribute("name_scope_stack", [])
    try:
        yield
    finally:
        global_state.set_global_attribute("name_scope_stack", stack)


def named_like(variable: Variable, **arguments: Any) -> Variable:
    """A new variable with the path and the name of another one."""
    *scopes, name = str(getattr(variable, "path", variable.name)).split("/")
    with contextlib.ExitStack() as stack:
        stack.enter_context(empty_name_scope())
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        return keras.Variable(name=name, **arguments)
