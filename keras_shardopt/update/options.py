"""The arguments of `CrossShard`, checked."""

from __future__ import annotations

from typing import Any

from keras_shardopt._typing import Groups
from keras_shardopt.backends.communicator import Communicator


def group_assignment_of(groups: Any) -> list[list[int]] | None:
    """The groups as lists of ints, or None where there are none (None or an empty list).

    Raises:
        ValueError: if they are not lists of equal length in a list, in which each of the ids 0, 1, ... stands once.
    """
    if groups is None or (isinstance(groups, (list, tuple)) and not groups):
        return None
    received = f"Received: group_assignment={groups!r}"
    if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
        raise ValueError(f"`group_assignment` must be a list of lists of replica ids. {received}")
    ids = [replica for group in groups for replica in group]
    for replica in ids:
        if not isinstance(replica, (int, float)) and not hasattr(replica, "__index__"):
            raise ValueError(
                f"`group_assignment` must hold replica ids, which are ints. {received}, with {replica!r} in it"
            )
    twice = sorted({replica for replica in ids if ids.count(replica) > 1})
    if twice:
        raise ValueError(
            f"`group_assignment` must name every replica once. {received}, in which {twice} stand more than once"
        )
    if set(ids) != set(range(len(ids))):
        raise ValueError(
            f"`group_assignment` must name every replica, from 0 to the number of replicas - 1. {received}, "
            f"which names {len(ids)} replicas, but not {sorted(set(range(len(ids))) - set(ids))}"
        )
    if len({len(group) for group in groups}) > 1:
        raise ValueError(
            f"`group_assignment` must have groups of one size. {received}, with sizes {[len(g) for g in groups]}"
        )
    return [[int(replica) for replica in group] for group in groups]


def check_groups(groups: Groups | None, replicas: Communicator) -> None:
    """Raises ValueError unless the groups are those of as many replicas as there are."""
    num_named = 0 if groups is None else sum(map(len, groups))
    if groups is not None and num_named != replicas.num_replicas:
        raise ValueError(
            "`group_assignment` must name each replica of the program once. "
            f"Received: group_assignment={[list(g) for g in groups]}, with {num_named} replicas, where there are "
            f"{replicas.num_replicas}. Leave `group_assignment` out to average over all of them."
        )
