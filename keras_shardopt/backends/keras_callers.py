"""Finds the caller where Keras does not pass it: the only file that looks at frames of the call stack.

Each function here but `warn_user` speaks of the function that asks it. The frames are those of Keras and of the
frameworks, so what is found hangs on how they call; a test next to each use holds that.
"""

from __future__ import annotations

import sys
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any


def caller_module() -> str:
    """The name of the module whose code has called the function that asks."""
    return str(sys._getframe(2).f_globals.get("__name__", ""))


def caller_function() -> str:
    """The name of the function that has called the one that asks."""
    return sys._getframe(2).f_code.co_name


def caller_instance(further_out: int = 0, code: types.CodeType | None = None) -> Any:
    """The `self` of the method that has called the function that asks; None where it has none.

    Args:
        further_out: 0 for the caller, 1 for its caller.
        code: what that method must be; None for any.
    """
    frame = sys._getframe(2 + further_out)
    return frame.f_locals.get("self") if code is None or frame.f_code is code else None


def running_instance(
    kind: Any, method: str | None = None, condition: Callable[[Any], bool] = lambda instance: True
) -> Any:
    """The innermost instance of `kind` of which a method is running; None where there is none.

    Args:
        kind: a class, or a tuple of them.
        method: the name of the method; None for any.
        condition: what must hold of the instance.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if method is None or frame.f_code.co_name == method:
            instance = frame.f_locals.get("self")
            if isinstance(instance, kind) and condition(instance):
                return instance
        frame = frame.f_back
    return None


def is_running(function: str, module: str) -> bool:
    """Whether a function of that name, defined in that module, is running."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back
    return False


def running_local(function: str, name: str) -> Any:
    """What the local variable of that name holds in the innermost function of that name that runs; None if nothing."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get(name)


def warn_user(words: str, category: type[Warning] = UserWarning) -> None:
    """Warns, at the line of the user's program that has led here.

    Not by a `stacklevel`: Keras and the frameworks put a varying number of frames between that line and this one.
    """
    frame = _user_frame()
    where = frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", "")
    warnings.warn_explicit(words, category, *where, registry=frame.f_globals.setdefault("__warningregistry__", {}))


def _user_frame() -> types.FrameType:
    # A thread of a framework has no frame of the user. The main thread then waits in a call of the user.
    for innermost in (sys._getframe(), sys._current_frames().get(threading.main_thread().ident or 0)):
        frame = innermost
        while frame is not None:
            if frame.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES:
                return frame
            frame = frame.f_back
    return sys._getframe()


_LIBRARIES = frozenset(
    [
        *("keras_shardopt", "keras", "keras_hub", "tensorflow", "jax", "torch"),
        *("concurrent", "contextlib", "functools", "threading"),
    ]
)
"""The packages whose frames stand between the user's program and a warning."""
