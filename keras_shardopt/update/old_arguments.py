"""Arguments of `CrossShard` that are objects now. Their old spellings work for one more release."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keras_shardopt.backends.user_warnings import warn
from keras_shardopt.update.extension import Extension, Settings
from keras_shardopt.update.plugs import extensions as registered
from keras_shardopt.update.torch_speed import TorchSpeed


def kinds() -> list[type[Settings]]:
    """Return all classes that replace old arguments."""
    return [TorchSpeed, *registered]


def with_objects(
    extensions: Sequence[Extension], torch: TorchSpeed | None, old: Mapping[str, Any], warns: bool = True
) -> dict[str, Any]:
    """Return the arguments `extensions` and `torch` of a `CrossShard`, with objects for old arguments.

    Args:
        extensions: the argument of this name.
        torch: the argument of this name.
        old: other keyword arguments.
        warns: whether a `DeprecationWarning` shows the new spelling.

    Raises:
        TypeError: if an argument has an unknown name, as Python raises it.
        ValueError: if an old argument and the object that replaces it are both given.
    """
    known = {name for kind in kinds() for name in kind.old_arguments}
    for name in old:
        if name not in known:
            raise TypeError(f"CrossShard.__init__() got an unexpected keyword argument {name!r}")
    found: dict[str, Any] = {"extensions": extensions, "torch": torch}
    for kind in kinds():
        given = {name: old[name] for name in kind.old_arguments if name in old}
        given = {name: value for name, value in given.items() if _differs(value, kind.old_arguments[name])}
        if not given:
            continue
        settings = kind.from_old(given)
        names = " and ".join(f"`{name}`" for name in given)
        if (torch is not None) if kind is TorchSpeed else any(type(each) is kind for each in extensions):
            raise ValueError(f"{names} and a `{kind.__name__}` are both given. Received: {settings!r}. Leave one out.")
        if warns:
            line = f"CrossShard(..., {kind.spelling.format(repr(settings))})"
            warn(f"{names} of `CrossShard` will go in the next release. Use `{line}`.", DeprecationWarning)
        if kind is TorchSpeed:
            found["torch"] = settings
        else:
            found["extensions"] = [*found["extensions"], settings]
    return found


def _differs(value: Any, default: Any) -> bool:
    return type(value) is not type(default) or value != default


def old_attributes(settings: Sequence[Settings]) -> dict[str, Any]:
    """Return the values of all old arguments, for an optimizer with these objects."""
    found = {name: default for kind in kinds() for name, default in kind.old_arguments.items()}
    for each in settings:
        found |= each.to_old() if type(each) in kinds() else {}
    return found
