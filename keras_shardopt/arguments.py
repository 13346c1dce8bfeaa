"""Checks of constructor arguments: numbers in a range, flags, choices, lists.

Each function returns the argument as a JSON-serializable Python value, for `get_config`. If the argument is invalid,
the function raises an error that contains a rule, the value, and advice (`fix`).
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Sequence
from numbers import Real
from typing import Any

Number = int | float


def number(name: str, value: Any, at_least: float | None = None, above: float | None = None, fix: str = "") -> float:
    """Returns a finite float that is >= `at_least` and > `above`. `fix` is advice for the error message."""
    _check_type(name, value, fix)
    rule = f"`{name}` must be a finite number"
    if at_least is not None:
        rule += f", at least {at_least:g}"
    if above is not None:
        rule += f", greater than {above:g}"
    # NaN is out of any range, because every comparison with NaN is False.
    in_range = (at_least is None or value >= at_least) and (above is None or value > above)
    if not (is_finite(value) and in_range):
        raise ValueError(_message(rule, name, value, fix))
    return float(value)


def count(name: str, value: Any, at_least: int, fix: str = "") -> int:
    """Returns an int >= `at_least`. Accepts whole floats such as 5e3. `fix` is advice for the error message."""
    _check_type(name, value, fix)
    if not (is_finite(value) and value == int(value) and value >= at_least):
        raise ValueError(_message(f"`{name}` must be a whole number, at least {at_least}", name, value, fix))
    return int(value)


def duration(name: str, value: Any) -> Number:
    """Returns a number of updates, at least 1. A whole number is returned as an int, other numbers as a float."""
    length = number(name, value, at_least=1, fix="Give the number of updates that the decay takes.")
    return int(value) if length == int(length) else length


def counts(name: str, values: Any, fix: str = "", at_least: int = 1) -> list[int]:
    """Returns a list of ints >= 0 that do not decrease, with at least `at_least` items. `fix` is advice for errors."""
    whole = [count(name, value, 0, fix) for value in sequence(name, values, at_least)]
    if whole != sorted(whole):
        raise ValueError(_message(f"`{name}` must not decrease", name, values, fix or "Sort the list."))
    return whole


def sequence(name: str, values: Any, at_least: int = 1) -> list[Any]:
    """Returns a list of at least `at_least` items."""
    listed = isinstance(values, Sequence) or (hasattr(values, "tolist") and len(getattr(values, "shape", ())) > 0)
    if isinstance(values, (str, bytes)) or not listed:
        raise TypeError(_message(f"`{name}` must be a list", name, values))
    items = list(values)
    if len(items) < at_least:
        raise ValueError(_message(f"`{name}` must not be empty", name, values))
    return items


def real(
    name: str,
    value: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    finite: bool = True,
    fix: str = "",
) -> float:
    """Returns a float >= `at_least`, > `above` and < `below`, and `finite` if set. `fix` is advice for errors."""
    if isinstance(value, bool) or not isinstance(value, Real):
        kind = f" (of type {type(value).__name__})"
        raise TypeError(_message(f"`{name}` must be a float", name, value, fix, kind))
    number: Any = value
    in_range = (
        (at_least is None or number >= at_least)
        and (above is None or number > above)
        and (below is None or number < below)
        and number == number
    )
    is_infinite = not finite and value in (math.inf, -math.inf)
    if not in_range or not (is_finite(value) or is_infinite):
        bounds = [
            f"{sign} {bound:g}" for sign, bound in ((">=", at_least), (">", above), ("<", below)) if bound is not None
        ]
        rule = " and ".join([*bounds, *(["finite"] if finite else [])]) or "a number"
        raise ValueError(_message(f"`{name}` must be {rule}", name, value, fix))
    return float(value)


def local_path(name: str, value: Any, kind: str = "file or directory") -> str:
    """Return a path as a str. Raise TypeError or ValueError unless it is a non-empty local path of this kind."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"`{name}` must be a path. Received: {name}={value!r}")
    path = os.fspath(value)
    if not isinstance(path, str) or not path or "://" in path or "\0" in path:
        raise ValueError(f"`{name}` must be the path of a local {kind}. Received: {name}={value!r}")
    return path


def integer(name: str, value: Any, at_least: int = 1, fix: str = "") -> int:
    """Returns an int >= `at_least` and below 2**63. Rejects whole floats and bools. `fix` is advice for errors."""
    try:
        if isinstance(value, bool):
            raise TypeError
        whole = operator.index(value)
    except TypeError:
        raise TypeError(_message(f"`{name}` must be an int", name, value, fix)) from None
    if not at_least <= whole < 2**63:
        raise ValueError(_message(f"`{name}` must be at least {at_least}", name, value, fix))
    return whole


def flag(name: str, value: Any) -> bool:
    """Returns the value unchanged if it is a bool."""
    if not isinstance(value, bool):
        raise TypeError(_message(f"`{name}` must be a bool", name, value))
    return value


def one_of(name: str, value: Any, words: Sequence[str]) -> str:
    """Returns the value unchanged if it is one of `words`."""
    if not isinstance(value, str) or value not in words:
        raise ValueError(
            _message(f"`{name}` must be {' or '.join(f'{chr(34)}{word}{chr(34)}' for word in words)}", name, value)
        )
    return value


def with_article(name: Any) -> str:
    """Returns a name with its article, for messages: "a float", "an int". For an object, uses the name of its type."""
    word = name if isinstance(name, str) else type(name).__name__
    vowel = word.lower().startswith(("a", "e", "i", "o", "u")) and not word.lower().startswith(("uint", "uni", "use"))
    return f"{'an' if vowel else 'a'} {word}"


def listed(names: Sequence[str], separator: str = "; ", most: int = 8) -> str:
    """Returns a text with the first `most` names, and the number of the other names, for messages."""
    return separator.join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def is_finite(value: Any) -> bool:
    """Whether the value as a float is neither infinite nor NaN, and does not overflow."""
    try:
        return math.isfinite(value)
    except OverflowError:  # an int above the largest float
        return False


def _check_type(name: str, value: Any, fix: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(_message(f"`{name}` must be a Python or NumPy number", name, value, fix))


def _message(rule: str, name: str, value: Any, fix: str = "", kind: str = "") -> str:
    try:
        received = repr(value)
    except Exception:  # the user's `__repr__` may fail, and an int may have too many digits
        received = with_article(value)
    return f"{rule}. Received: {name}={received}{kind}{'. ' + fix if fix else ''}"
