"""Former arguments of `CrossShard`, now replaced by objects such as `LocalSGD`. They work for one more release."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from keras_shardopt.backends.user_warnings import warn
from keras_shardopt.update.extension import Extension, Settings
from keras_shardopt.update.torch_speed import TorchSpeed

KINDS: list[type[Settings]] = []
"""The classes of objects that replace old arguments, such as `TorchSpeed`."""


def with_objects(
    extensions: Sequence[Extension], torch: TorchSpeed | None, old: Mapping[str, Any], warns: bool = True
) -> dict[str, Any]:
    """Return the arguments `extensions` and `torch` of a `CrossShard`, with old arguments converted to objects.

    Args:
        extensions: the constructor's argument `extensions`.
        torch: the constructor's argument `torch`.
        old: the constructor's other keyword arguments.
        warns: whether a `DeprecationWarning` shows the new spelling.

    Raises:
        TypeError: if an argument is unknown, with Python's message.
        ValueError: if an old argument and its replacement are both given.
    """
    for name in old:
        if name not in old_attributes():
            raise TypeError(f"CrossShard.__init__() got an unexpected keyword argument {name!r}")
    found: dict[str, Any] = {"extensions": extensions, "torch": torch}
    if not isinstance(extensions, (list, tuple)):
        return found  # not a list, so `CrossShardOptions` will raise an error
    for kind in KINDS:
        passed = [name for name in kind.old_arguments if name in old]
        given = {name: old[name] for name in passed if _differs(old[name], kind.old_arguments[name])}
        defaults = [name for name in passed if name not in given]
        if warns and defaults:
            names = " and ".join(f"`{name}={old[name]!r}`" for name in defaults)
            warn(f"{names} of `CrossShard` will be removed in the next release. Omit defaults.", DeprecationWarning)
        if not given:
            continue
        names = " and ".join(f"`{name}`" for name in given)
        try:
            settings = kind.from_old(given)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{names} must be valid for a `{kind.__name__}`. {error}") from None
        if (torch is not None) if kind is TorchSpeed else any(isinstance(each, kind) for each in extensions):
            raise ValueError(
                f"{names} cannot be combined with a `{kind.__name__}`, the object that replaces {names}. Received: "
                f"both. Omit {names}, and use for example `{settings!r}`."
            )
        if warns:
            line = f"CrossShard(..., {kind.spelling.format(repr(settings))})"
            warn(f"{names} of `CrossShard` will be removed in the next release. Use `{line}`.", DeprecationWarning)
        if kind is TorchSpeed:
            found["torch"] = settings
        else:
            found["extensions"] = [*found["extensions"], settings]
    return found


def _differs(value: Any, default: Any) -> bool:
    return type(value) is not type(default) or value != default


def old_attributes(settings: Sequence[Settings] = ()) -> dict[str, Any]:
    """Return the values of all old arguments: those of the objects in `settings`, and defaults for the rest."""
    found = {name: default for kind in KINDS for name, default in kind.old_arguments.items()}
    for each in settings:
        found |= each.to_old()
    return found


def in_spelling_of(optimizer: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments as the class `optimizer` takes them. A subclass of `CrossShard` may still have old arguments."""
    names = inspect.signature(optimizer).parameters.keys()
    found = {**arguments, "extensions": list(arguments["extensions"])}
    for kind in KINDS:
        if not names & kind.old_arguments.keys():
            continue
        for each in [*found["extensions"], found["torch"]]:
            if isinstance(each, kind):
                old = each.to_old()
                found |= {n: v for n, v in old.items() if n in names or _differs(v, kind.old_arguments[n])}
                found["extensions"] = [other for other in found["extensions"] if other is not each]
                found["torch"] = None if found["torch"] is each else found["torch"]
    return found
