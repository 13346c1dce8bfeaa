"""Finds the calling function or object if Keras does not pass it. Only this file inspects frames of the call stack.

In these docstrings, "your function" is the function that calls the helper. Results depend on the call structure of
Keras and the frameworks, so each use of a helper has a test.
"""

from __future__ import annotations

import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any


def caller_module() -> str:
    """Your function calls this helper. Return the name of the module that called your function."""
    return str(sys._getframe(2).f_globals.get("__name__", ""))


def caller_function() -> str:
    """Your function calls this helper. Return the name of the function that called your function."""
    return sys._getframe(2).f_code.co_name


def caller_instance(further_out: int = 0, code: types.CodeType | None = None) -> Any:
    """Your function calls this helper. Return the `self` of the method that called your function, or None.

    `further_out` chooses a method that many calls further out instead. With `code`, return None if the method runs
    other code.
    """
    frame = sys._getframe(2 + further_out)
    return frame.f_locals.get("self") if code is None or frame.f_code is code else None


def running_instance(
    kind: Any, method: str | None = None, condition: Callable[[Any], bool] = lambda instance: True
) -> Any:
    """Return the object of class `kind` whose method is running, or None. Of several, return the last called one.

    `method` is the method's name (None for any), and `condition` a test of the object.
    """
    for frame in _frames(sys._getframe(1)):
        if method is None or frame.f_code.co_name == method:
            instance = frame.f_locals.get("self")
            if isinstance(instance, kind) and condition(instance):
                return instance
    return None


def is_running(function: str, module: str) -> bool:
    """Return whether a function of this name, defined in this module, is running."""
    running = ((frame.f_code.co_name, frame.f_globals.get("__name__")) for frame in _frames(sys._getframe(1)))
    return (function, module) in running


def running_local(function: str, name: str) -> Any:
    """Return a local variable of the running function of this name, or None. Of several, use the last called one."""
    return next((f.f_locals.get(name) for f in _frames(sys._getframe(1)) if f.f_code.co_name == function), None)


def warn_user(words: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that points at the line of the user's program that is running."""
    # Do not use `stacklevel`, because Keras and the frameworks add a varying number of frames.
    frame = _user_frame()
    where = frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", "")
    warnings.warn_explicit(words, category, *where, registry=frame.f_globals.setdefault("__warningregistry__", {}))


def _user_frame() -> types.FrameType:
    # Search this thread, then the main thread. If a framework runs this code in another thread, the user's program
    # waits in the main thread.
    for innermost in (sys._getframe(), sys._current_frames().get(threading.main_thread().ident or 0)):
        for frame in _frames(innermost):
            if frame.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES:
                return frame
    return sys._getframe()


def _frames(innermost: types.FrameType | None) -> Iterator[types.FrameType]:
    """Yield this frame, then its callers."""
    frame = innermost
    while frame is not None:
        yield frame
        frame = frame.f_back


_LIBRARIES = frozenset(
    [
        *("keras_shardopt", "keras", "keras_hub", "tensorflow", "jax", "torch"),
        *("concurrent", "contextlib", "functools", "threading"),
    ]
)
"""Packages whose frames are skipped to find the line of the user's program for a warning."""
