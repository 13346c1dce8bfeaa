"""The owners of slices of variables, in plain integers without a framework."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Piece:
    """A slice of one variable, flattened in row-major order, for elements from `start` to before `stop`."""

    variable: int
    """The position of the variable."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.stop - self.start


def divide(sizes: Sequence[int], may_split: Sequence[bool], num_replicas: int) -> list[list[Piece]]:
    """Divide variables among replicas as evenly as possible.

    Variables that must stay whole go first, from large to small, each to the replica with the fewest elements. The
    others, joined to one long vector, then fill the replicas up to an equal level. So with enough splittable variables,
    no replica has more than an equal share, rounded up to an element. No replica has more than one piece of a variable.

    Args:
        sizes: the number of elements of each variable.
        may_split: whether each variable may be split.
        num_replicas: int >= 1.

    Returns:
        For each replica its pieces, in the order of the variables. They cover each element exactly once.
    """
    owned: list[list[Piece]] = [[] for _ in range(num_replicas)]
    loads = [0] * num_replicas
    whole = [i for i, splittable in enumerate(may_split) if not splittable]
    for i in sorted(whole, key=lambda i: -sizes[i]):
        replica = loads.index(min(loads))
        owned[replica].append(Piece(i, 0, sizes[i]))
        loads[replica] += sizes[i]
    capacities = _capacities(loads, sum(size for size, splittable in zip(sizes, may_split) if splittable))
    replica = 0
    for i, (size, splittable) in enumerate(zip(sizes, may_split)):
        start = 0
        while splittable and start < size:
            while not capacities[replica]:
                replica += 1
            stop = min(size, start + capacities[replica])
            owned[replica].append(Piece(i, start, stop))
            capacities[replica] -= stop - start
            start = stop
    return [sorted(pieces, key=lambda piece: piece.variable) for pieces in owned]


def _capacities(loads: Sequence[int], amount: int) -> list[int]:
    """Divide `amount` among replicas so their total loads are as equal as possible. Return each replica's part."""
    low, high = min(loads), max(loads) + amount
    while low < high:  # find the lowest level with enough room
        level = (low + high) // 2
        if sum(max(0, level - load) for load in loads) >= amount:
            high = level
        else:
            low = level + 1
    return [max(0, low - load) for load in loads]
