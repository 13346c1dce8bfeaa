"""Errors of a group of ranks, for the ranks of other groups.

These ranks run other code and join no collective, so errors reach them through the job's key-value store.
"""

from __future__ import annotations

import contextlib

import torch

from keras_shardopt.backends.torch.process_group import job_store

_KEY = "keras_shardopt/failure"


class GroupFailures:
    """The last error that a group has reported, and the errors that this rank has raised already."""

    def __init__(self) -> None:
        self._num_reported = 0
        self._raised: set[str] = set()

    @torch.compiler.disable
    def report(self, words: str, first_member: int) -> None:
        """Report an error of this rank's group. `first_member` is the first rank of the group."""
        # All ranks of this group write the same id, because they have counted the same failures.
        self._num_reported += 1
        number = f"{first_member}/{self._num_reported}"
        self._raised.add(number)
        with contextlib.suppress(RuntimeError):
            store = job_store()
            store.set(_KEY, f"{number} {words}")
            store.check([_KEY])  # `set` alone does not wait until the key exists

    @torch.compiler.disable
    def has_new(self) -> bool:
        """Return whether a group has reported an error that this rank has not raised yet."""
        number, _ = _last()
        return number not in {"", *self._raised}

    @torch.compiler.disable
    def read(self) -> str:
        """Return the message of the last error, which this rank raises now. "" if there is none."""
        number, words = _last()
        self._raised.add(number)
        return words


def _last() -> tuple[str, str]:
    """Return the id and message of the last reported error. Both are "" without an error."""
    found = ""
    with contextlib.suppress(RuntimeError):
        store = job_store()
        found = store.get(_KEY).decode() if store.check([_KEY]) else ""
    number, _, words = found.partition(" ")
    return number, words
