"""The processes of a program, as the host sees them."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import weakref
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class World:
    """Which replicas and processes this program consists of."""

    num_replicas: int = 1
    """How many replicas train together."""

    replica_id: int = 0
    """The first (on torch the only) replica that this process runs."""

    is_chief: bool = True
    """Whether this process is the one that prints and writes files."""

    num_processes: int = 1
    """How many processes feed data. Where there are several, each feeds its own rows."""

    process_id: int = 0
    """Which of these processes this is."""


class Processes:
    """The control plane of a program, on the host. The defaults are those of one process with one replica."""

    def __init__(self) -> None:
        self._watches: list[weakref.WeakSet[Any]] = []

    @contextlib.contextmanager
    def track(self) -> Iterator[weakref.WeakSet[Any]]:
        """Collects the optimizers noticed during the block (those still alive) that count on other replicas."""
        noticed: weakref.WeakSet[Any] = weakref.WeakSet()
        self._watches.append(noticed)
        try:
            yield noticed
        finally:
            # `remove` compares what is in them, which may be the same in two.
            self._watches = [other for other in self._watches if other is not noticed]

    def register(self, optimizer: Any) -> None:
        """Tells whoever watches that this optimizer was made."""
        for noticed in self._watches:
            noticed.add(optimizer)

    needs_initial_broadcast: bool = False
    """Whether each of several processes makes weights of its own, which `broadcast_state` then makes equal."""

    def creates_variables_collectively(self) -> bool:
        """Whether processes make each variable together here, and so must agree before an optimizer makes its own."""
        return False

    def num_replicas_of_scope(self) -> int:
        """How many replicas have copies of a variable that is made here; 1 where that takes no scope."""
        return 1

    def forget_scope(self) -> None:
        """Called when a scope is closed for good, and not only left: what comes next may be for one device."""

    def num_replicas_of_steps(self) -> int:
        """How many replicas a program made here by `compiled` would run on."""
        return 1

    def barrier(self, purpose: str, seconds: float, advice: str) -> None:
        """Waits until all processes have come for this purpose.

        Raises:
            RuntimeError: if some have not come after so many seconds, with the advice. Nothing else happens then.
        """
        del purpose, seconds, advice

    def versions(self) -> dict[str, str]:
        """The version of the framework, by its name."""
        return {}

    def process(self) -> tuple[int, int]:
        """How many processes feed data, and which of them this is, also outside `world()`."""
        return 1, 0

    persists_after_scope: bool = False
    """Whether `model.fit` needs what `world()` sets up even when it is called after the `with` block."""

    @contextlib.contextmanager
    def open(self, num_replicas: int | None, timeout: datetime.timedelta | None = None) -> Iterator[World]:
        """Sets up replicas and takes them down again. See `keras_shardopt.data_parallel`."""
        if num_replicas not in (None, 1):
            raise ValueError(
                "This Keras backend runs one replica only. "
                f"Received: num_replicas={num_replicas}. Use the tensorflow, jax or torch backend."
            )
        yield World()

    def rng_state(self) -> Any:
        """The state of the framework's own global random numbers here, as JSON has it; None if there are none."""
        return None

    def set_rng_state(self, state: Any) -> None:
        """Takes back what `rng_state` returned."""
        del state

    def gather_objects(self, value: Any) -> list[Any]:
        """The values of all processes, which may be of different lengths, in the order of the processes.

        All processes must call it together. It may be called while a step is being traced.
        """
        return [value]
