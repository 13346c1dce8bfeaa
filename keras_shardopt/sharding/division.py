"""The slices of variables that each process updates, and the buckets in which processes send these slices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from keras_shardopt.backends.communicator import in_buckets, largest_bucket
from keras_shardopt.numerics import Optimizer, Variable, dtype_of, overwrites_variable
from keras_shardopt.sharding import partition
from keras_shardopt.sharding.costs import update_costs
from keras_shardopt.sharding.partition import Piece
from keras_shardopt.sharding.report import item_size, size_of

_MAX_IMBALANCE = 1.25
"""If the largest share exceeds this multiple of the mean share, replicas do not send chunks of equal length."""


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Variables of one dtype that are sent together."""

    dtype: str
    pieces: list[list[Piece]]
    """For each replica, its slices of the variables."""

    variables: list[int]
    """The positions of the variables."""

    chunk: int
    """The number of elements in the largest share of a replica. Other shares are padded with zeros to be sent."""

    is_uneven: bool
    """Whether more than a fifth of the bytes would be padding if all chunks had equal length (`_MAX_IMBALANCE`)."""

    def places(self, replica: int) -> Iterator[tuple[Piece, int, int]]:
        """Yield each slice of a replica, with its start and stop in the replica's chunk."""
        start = 0
        for piece in self.pieces[replica]:
            yield piece, start, start + piece.size
            start += piece.size


class Division:
    """Assigns elements of variables to replicas.

    Args:
        buckets: the buckets of all divided variables. Variables that are empty, or have `overwrite_with_gradient`, are
            not divided.
        may_split: whether each variable may be split. Other divided variables have one owner.
        replica_id: the number of this replica.
    """

    def __init__(self, buckets: list[Bucket], may_split: list[bool], replica_id: int) -> None:
        self.buckets = buckets
        self.may_split = may_split
        self.owners: dict[int, list[tuple[int, Piece]]] = {}
        """For the position of each divided variable, its slices with the replica that updates them."""
        for bucket in buckets:
            for replica, pieces in enumerate(bucket.pieces):
                for piece in pieces:
                    self.owners.setdefault(piece.variable, []).append((replica, piece))
        self.own = {i: piece for i, owners in self.owners.items() for replica, piece in owners if replica == replica_id}
        """This replica's slices, by the position of the variable. A replica has at most one slice of a variable."""


def buckets_of(
    leaf: Optimizer, variables: Sequence[Variable], may_split: Sequence[bool], num_replicas: int, bucket_bytes: float
) -> list[Bucket]:
    """Divide variables among replicas, and put their slices into buckets.

    Args:
        leaf: the optimizer with the update rule, before its build.
        variables: the trainable variables.
        may_split: whether each variable may be split.
        num_replicas: int >= 1.
        bucket_bytes: the largest size of a bucket.
    """
    by_dtype: dict[str, list[int]] = {}
    divided = [i for i, variable in enumerate(variables) if not overwrites_variable(variable) and size_of(variable)]
    for i in divided:
        by_dtype.setdefault(dtype_of(variables[i]), []).append(i)
    all_split = all(may_split[i] for i in divided)
    costs = {} if all_split else dict(zip(divided, update_costs(leaf, [variables[i] for i in divided])))
    made = []
    for dtype, same_dtype in by_dtype.items():
        num_bytes = [size_of(variables[i]) * item_size(variables[i]) for i in same_dtype]
        members: Iterable[Sequence[int]] = [range(len(same_dtype))]
        # If some variables stay whole, only one bucket with all variables can be divided evenly.
        if all(may_split[i] for i in same_dtype):
            # Backward passes compute the last gradients first, so fill buckets in this order.
            limit = largest_bucket(sum(num_bytes), bucket_bytes)
            members = in_buckets(num_bytes, reversed(range(len(same_dtype))), limit)
        for each in members:
            indices = [same_dtype[k] for k in each]
            sizes = [size_of(variables[i]) for i in indices]
            own_costs = [costs[i] for i in indices if costs]
            owned = partition.divide(sizes, [may_split[i] for i in indices], own_costs, num_replicas)
            pieces = [[Piece(indices[p.variable], p.start, p.stop) for p in mine] for mine in owned]
            shares = [sum(piece.size for piece in mine) for mine in pieces]
            is_uneven = max(shares) * num_replicas > _MAX_IMBALANCE * sum(sizes) + num_replicas
            made.append(Bucket(dtype, pieces, indices, max(shares), is_uneven))
    return made
