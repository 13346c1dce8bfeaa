"""Assigns slices of variables to replicas. Uses plain integers, and no framework."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Piece:
    """Elements `start` to `stop` (exclusive) of one variable, flattened in row-major order."""

    variable: int
    """The position of the variable in the list of variables."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.stop - self.start


_SMALL = 0.01
"""Variables up to this fraction of an equal share are small: dividing them saves no memory."""

_SMOOTHNESS = 10
"""`_owners` minimizes the sum of the replicas' loads, each to this power. The largest load dominates this sum."""


def divide(
    sizes: Sequence[int], may_split: Sequence[bool], costs: Sequence[tuple[float, int]], num_replicas: int
) -> list[list[Piece]]:
    """Divide variables among replicas, to balance the cost of their updates and the memory of their state.

    If some variables must stay whole, small ones stay whole too. Whole variables go first, from expensive to cheap,
    each to the replica with the lowest cost. The other variables, joined to one long vector, then fill the replicas up
    to an equal number of elements. No replica has more than one piece of a variable.

    Args:
        sizes: the number of elements of each variable.
        may_split: whether each variable may be split.
        costs: the cost of each variable's update, from `update_costs`. Used if a variable must stay whole.
        num_replicas: int >= 1.

    Returns:
        For each replica its pieces, in the order of the variables. The pieces cover each element exactly once.
    """
    owned: list[list[Piece]] = [[] for _ in range(num_replicas)]
    loads = [0] * num_replicas
    small = 0.0 if all(may_split) else _SMALL * sum(sizes) / num_replicas
    may_split = [splittable and size >= small for size, splittable in zip(sizes, may_split)]
    whole = [i for i, splittable in enumerate(may_split) if not splittable]
    for i, replica in zip(whole, _owners([costs[i] for i in whole], num_replicas)):
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


def _owners(costs: Sequence[tuple[float, int]], num_replicas: int) -> list[int]:
    """Choose a replica per variable. Balance both numbers of `costs` (work, operations): either can limit the speed."""
    totals = [sum(column) for column in zip(*costs)]
    shares = [[cost / (total or 1) for cost, total in zip(pair, totals)] for pair in costs]
    loads = [[0.0] * len(totals) for _ in range(num_replicas)]
    owners = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: shares[i], reverse=True):
        after = [[a + b for a, b in zip(load, shares[i])] for load in loads]
        growth = [sum(b**_SMOOTHNESS - a**_SMOOTHNESS for a, b in zip(*pair)) for pair in zip(loads, after)]
        owners[i] = growth.index(min(growth))
        loads[owners[i]] = after[owners[i]]
    return owners


def _capacities(loads: Sequence[int], amount: int) -> list[int]:
    """Divide `amount` among replicas that already have `loads`. Totals are as equal as possible. Return the shares."""
    low, high = min(loads), max(loads) + amount
    while low < high:  # find the lowest total per replica that leaves room for `amount`
        level = (low + high) // 2
        if sum(max(0, level - load) for load in loads) >= amount:
            high = level
        else:
            low = level + 1
    return [max(0, low - load) for load in loads]
