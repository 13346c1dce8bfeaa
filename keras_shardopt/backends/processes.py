"""The processes of a program, as the host sees them."""

from __future__ import annotations

import dataclasses


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
