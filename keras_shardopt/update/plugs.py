"""The registry that each extension enters when imported, with its implementation of an argument or training step."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

from keras_shardopt.backends import for_backend


@dataclasses.dataclass(frozen=True)
class Plug:
    """An extension's implementation of an argument of `CrossShard`."""

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
_steps: list[tuple[Callable[[Sequence[Any]], Any], str, str]] = []


def register(argument: str, plug: Plug) -> None:
    """Register the implementation of the `CrossShard` argument with this name."""
    _plugs[argument] = plug


def register_step(applies: Callable[[Sequence[Any]], Any], package: str, name: str) -> None:
    """Register a class that replaces the `TrainStep` of trainers. Its module is imported when it first applies.

    Args:
        applies: returns whether a model with these `CrossShard` optimizers needs the class.
        package: the package with a module per backend.
        name: the class in that module.
    """
    _steps.append((applies, package, name))


def step_class(reducers: Sequence[Any], plain: Any) -> Any:
    """Return the class of the training step for these `CrossShard` optimizers; `plain` if no extension replaces it."""
    for applies, package, name in _steps:
        if applies(reducers):
            module = for_backend({backend: f"{package}.{backend}" for backend in ("tensorflow", "torch", "jax")})
            return getattr(module, name)
    return plain


def plug_of(argument: str) -> Plug:
    """Return the implementation of an argument."""
    return _plugs[argument]
