"""The registry of extensions, by the name of the argument that they implement."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Plug:
    """The implementation of an argument by an extension."""

    made: Callable[[Any], Any]
    """Converts the user's value to a serializable object, or raises ValueError."""

    transport: Callable[[Any, Any], Any]
    """`(object, context)` -> the `Transport` of an optimizer."""


_plugs: dict[str, Plug] = {}


def register(argument: str, plug: Plug) -> None:
    """Register the plug of an argument."""
    _plugs[argument] = plug


def plug_of(argument: str) -> Plug:
    """Return the plug of an argument."""
    return _plugs[argument]
