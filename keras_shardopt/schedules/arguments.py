"""What the constructors of schedules accept: plain finite numbers in their range, and nothing that turns up later.

Each function returns the argument as a Python number, which is what configs hold, or raises with the rule, the
value and what to do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

Number = int | float


def number(name: str, value: Any, at_least: float | None = None, above: float | None = None, fix: str = "") -> float:
    """A finite float, `at_least` or `above` a bound."""
    _check_type(name, value, fix)
    rule = f"`{name}` must be a finite number"
    if at_least is not None:
        rule += f", at least {at_least:g}"
    if above is not None:
        rule += f", greater than {above:g}"
    # Written so that a NaN fails every comparison.
    in_range = (at_least is None or value >= at_least) and (above is None or value > above)
    if not (math.isfinite(value) and in_range):
        raise ValueError(_message(rule, name, value, fix))
    return float(value)


def count(name: str, value: Any, at_least: int, fix: str = "") -> int:
    """An int of at least `at_least`. Whole floats such as 5e3 are taken as ints."""
    _check_type(name, value, fix)
    if not (math.isfinite(value) and value == int(value) and value >= at_least):
        raise ValueError(_message(f"`{name}` must be a whole number, at least {at_least}", name, value, fix))
    return int(value)


def duration(name: str, value: Any) -> Number:
    """A number of updates that may have a fraction: at least 1, an int if it is whole."""
    length = number(name, value, at_least=1, fix="Give the number of updates that the decay takes.")
    return int(value) if length == int(length) else length


def counts(name: str, values: Any, fix: str = "", at_least: int = 1) -> list[int]:
    """A list of `at_least` so many ints of at least 0 that do not decrease."""
    whole = [count(name, value, 0, fix) for value in sequence(name, values, at_least)]
    if whole != sorted(whole):
        raise ValueError(_message(f"`{name}` must not decrease", name, values, fix or "Sort them."))
    return whole


def sequence(name: str, values: Any, at_least: int = 1) -> list[Any]:
    """A list of `at_least` so many items."""
    if isinstance(values, (str, bytes)) or not (isinstance(values, Sequence) or hasattr(values, "tolist")):
        raise TypeError(_message(f"`{name}` must be a list", name, values))
    items = list(values)
    if len(items) < at_least:
        raise ValueError(_message(f"`{name}` must not be empty", name, values))
    return items


def _check_type(name: str, value: Any, fix: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(_message(f"`{name}` must be a number of Python or NumPy", name, value, fix))


def _message(rule: str, name: str, value: Any, fix: str = "") -> str:
    return f"{rule}. Received: {name}={value!r}{'. ' + fix if fix else ''}"
