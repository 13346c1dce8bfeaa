"""The registry of extensions: transports by argument, stages by place, steps by package."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

from keras_shardopt.backends import for_backend


@dataclasses.dataclass(frozen=True)
class Plug:
    """The implementation of an argument by an extension."""

    made: Callable[[Any], Any]
    """Converts the user's value to a serializable object, or raises ValueError."""

    transport: Callable[[Any, Any], Any]
    """`(object, context)` -> the `Transport` of an optimizer."""


class Place(enum.IntEnum):
    """The places of stages, outermost first. Extensions come after the core's stages of the same place."""

    OUTERMOST = 0
    WINDOW = 1  # gradient accumulation, local SGD
    LOCAL = 2  # transforms and checks of local gradients, users' stages
    BEFORE_SENDING = 3  # clipping, after the checks
    UPDATE = 4


_plugs: dict[str, Plug] = {}
_packages_of_steps: list[str] = []
stages: list[tuple[Place, Any]] = []
"""The stage classes of extensions, and their places."""


def register_stage(place: Place, kind: Any) -> None:
    """Register a class with `from_options(options, context)` that returns stages."""
    stages.append((place, kind))


def register(argument: str, plug: Plug) -> None:
    """Register the plug of an argument."""
    _plugs[argument] = plug


def register_steps(package: str) -> None:
    """Register a package with a module per backend, which registers steps when a trainer first asks for one."""
    _packages_of_steps.append(package)


def import_steps() -> None:
    """Import the modules of `register_steps` for the running backend."""
    while _packages_of_steps:
        package = _packages_of_steps.pop(0)
        for_backend({name: f"{package}.{name}" for name in ("tensorflow", "torch", "jax")})


def plug_of(argument: str) -> Plug:
    """Return the plug of an argument."""
    return _plugs[argument]
