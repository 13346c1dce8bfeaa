"""Measures the seconds that a training step spends in each phase, such as "input", while a `Recorder` is active."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any


class Recorder:
    """Measures the seconds that one thread spends in each phase of training, such as "input".

    The time of a nested phase does not count for the outer phase.

    Args:
        phase: the phase that runs while no other phase does.
    """

    def __init__(self, phase: str) -> None:
        self._phases = [phase]
        self._thread = threading.get_ident()
        self._seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def start(self) -> None:
        """Start measuring. Any other recorder stops."""
        global _active
        self._since, _active = time.perf_counter(), self

    def stop(self) -> dict[str, float]:
        """Stop measuring until `start`. Return the seconds of each phase since the last `stop`."""
        global _active
        if _active is self:
            self._count()
            _active = None
        found, self._seconds = self._seconds, {}
        return found

    def pause(self) -> None:
        """Stop measuring until `start`. The next `stop` also returns the seconds measured so far."""
        self._seconds = self.stop()

    def is_active(self) -> bool:
        """Return whether this recorder is measuring."""
        return _active is self

    def change(self, phase: str | None) -> None:
        """Begin a phase inside the running phase, or end the running phase (None)."""
        if threading.get_ident() == self._thread:
            self._count()
            if phase is not None:
                self._phases.append(phase)
            elif len(self._phases) > 1:
                self._phases.pop()

    def _count(self) -> None:
        now = time.perf_counter()
        self._seconds[self._phases[-1]] = self._seconds.get(self._phases[-1], 0.0) + now - self._since
        self._since = now


_active: Recorder | None = None


def change(phase: str | None) -> None:
    """Begin a phase, or end the running phase (None), if a recorder is active."""
    if _active is not None:
        _active.change(phase)


class timed(contextlib.ContextDecorator):
    """Context manager and decorator that counts the time of a block or function for a phase, such as "input"."""

    def __init__(self, phase: str) -> None:
        self._phase = phase

    def __enter__(self) -> None:
        change(self._phase)

    def __exit__(self, *error: Any) -> None:
        change(None)


def rounded(number: float, digits: int = 3) -> str:
    """Return a number with its first digits, for reports, without an exponent below a million: "0.0123", "1340"."""
    return f"{float(f'{number:.{digits}g}'):g}"
