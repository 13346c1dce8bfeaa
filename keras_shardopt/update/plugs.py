"""The registry of extensions. When imported, an extension registers its code for an argument or a training step."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

from keras_shardopt.backends import for_backend


@dataclasses.dataclass(frozen=True)
class Plug:
    """The code with which an extension implements an argument of `CrossShard`, such as `compression`."""

    made: Callable[[Any], Any]
    """Converts the user's value to a serializable object, or raises ValueError."""

    transport: Callable[[Any, Any], Any]
    """Returns the `Transport`, which sends gradients, for the object and the `StageContext` of an optimizer."""


class Place(enum.IntEnum):
    """The order in which stages (parts of `CrossShard`) process an update. At the same place, extensions come last."""

    OUTERMOST = 0
    WINDOW = 1  # stages that collect several batches: gradient accumulation, local SGD
    LOCAL = 2  # transforms and checks of local gradients, users' stages
    BEFORE_SENDING = 3  # clipping, after the checks
    UPDATE = 4


_plugs: dict[str, Plug] = {}
_steps: list[tuple[Callable[[Sequence[Any]], Any], str, str]] = []


def register(argument: str, plug: Plug) -> None:
    """Register `plug` as the implementation of the `CrossShard` argument with this name."""
    _plugs[argument] = plug


def register_step(applies: Callable[[Sequence[Any]], Any], package: str, name: str) -> None:
    """Register a class that replaces `TrainStep`, the usual training step, for some models. It is imported when needed.

    Args:
        applies: returns whether a model with these `CrossShard` optimizers needs the class.
        package: the package with a module per backend.
        name: the class in that module.
    """
    _steps.append((applies, package, name))


def step_class(cross_shards: Sequence[Any], plain: Any) -> Any:
    """Return the registered training step for a model with these `CrossShard`, or `plain` if none applies."""
    for applies, package, name in _steps:
        if applies(cross_shards):
            module = for_backend({backend: f"{package}.{backend}" for backend in ("tensorflow", "torch", "jax")})
            return getattr(module, name)
    return plain


def plug_of(argument: str) -> Plug:
    """Return the registered implementation of an argument of `CrossShard`."""
    return _plugs[argument]
