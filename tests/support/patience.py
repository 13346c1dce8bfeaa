"""Limits of time that grow with how slow the machine is right now: the one place that knows it.

A limit is written for a quiet machine. Where other jobs run beside the tests, or the machine is a slow one, the same
work takes longer; `patient` measures by how much.
"""

import os
import time

_ROUNDS = 200_000  # a unit of work: as many rounds of a loop
_USUAL = 0.02  # seconds that they take on a quiet machine, generously
_MOST = 10.0
_LASTS = 5.0  # seconds until it is measured again

_measured = (-_LASTS, 1.0)


def patient(seconds):
    """A limit of that many seconds, or longer where a unit of work takes longer."""
    return seconds * slowness()


def slowness():
    """At least 1: how many times longer things take here and now, by a unit of work and by the jobs that wait."""
    global _measured
    when, found = _measured
    if time.monotonic() - when >= _LASTS:
        begin = time.perf_counter()
        for _ in range(_ROUNDS):
            pass
        work = (time.perf_counter() - begin) / _USUAL
        jobs = os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 1.0
        found = min(max(1.0, work, jobs), _MOST)
        _measured = time.monotonic(), found
    return found
