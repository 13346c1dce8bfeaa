"""Who owns which slice of which variable. Plain integers, no framework.

Two ways of dividing: `cut` gives each replica slices of flattened variables, or whole ones, of sizes that are as equal
as can be; `dividing_axis` finds the dimension along which a mesh can divide an array without padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Piece:
    """A slice of one variable, flattened in row-major order."""

    variable: int
    """The position of the variable."""

    start: int
    """Its first element."""

    stop: int
    """The one after its last element."""

    @property
    def size(self) -> int:
        """How many elements it has."""
        return self.stop - self.start


def cut(sizes: Sequence[int], may_cut: Sequence[bool], num_replicas: int) -> list[list[Piece]]:
    """Divides variables among replicas.

    Those that must stay whole go, largest first, to the replica that has least. Then the others, one after another as
    if they were one long vector, fill the replicas up to one level. So where enough may be cut, no replica has more
    than an equal share, rounded up to the element; and no replica has more than one piece of a variable.

    Args:
        sizes: how many elements each variable has.
        may_cut: whether it may be cut.
        num_replicas: int >= 1.

    Returns:
        For each replica its pieces, in the order of the variables. Together they are all variables, each element once.
    """
    owned: list[list[Piece]] = [[] for _ in range(num_replicas)]
    loads = [0] * num_replicas
    whole = [i for i, cuttable in enumerate(may_cut) if not cuttable]
    for i in sorted(whole, key=lambda i: -sizes[i]):
        replica = loads.index(min(loads))
        owned[replica].append(Piece(i, 0, sizes[i]))
        loads[replica] += sizes[i]
    rooms = _rooms(loads, sum(size for size, cuttable in zip(sizes, may_cut) if cuttable))
    replica = 0
    for i, (size, cuttable) in enumerate(zip(sizes, may_cut)):
        start = 0
        while cuttable and start < size:
            while not rooms[replica]:
                replica += 1
            stop = min(size, start + rooms[replica])
            owned[replica].append(Piece(i, start, stop))
            rooms[replica] -= stop - start
            start = stop
    return [sorted(pieces, key=lambda piece: piece.variable) for pieces in owned]


def _rooms(loads: Sequence[int], amount: int) -> list[int]:
    """How much of `amount` each replica takes, so that loads end as equal as can be."""
    low, high = min(loads), max(loads) + amount
    while low < high:  # the lowest level at which there is room for all
        level = (low + high) // 2
        if sum(max(0, level - load) for load in loads) >= amount:
            high = level
        else:
            low = level + 1
    return [max(0, low - load) for load in loads]
