"""Who the replicas are, and their collectives: what every backend provides.

A *replica* is one worker that sees its own data. A backend states facts (`num_replicas`, `replica_id`,
`gradient_state`) and moves lists of tensors between replicas; it decides nothing. A single replica is a
backend too, so that nobody else needs to ask how many there are.
"""

from __future__ import annotations

import abc
import copy
import enum
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from keras import ops

from keras_shardopt.numerics import Gradients, Groups, ReduceOp, Tensor, Variable


class GradientState(enum.Enum):
    """In which state the gradients of this replica are when they reach the optimizer.

    With `N` replicas, `g_r` the gradient of the mean loss of replica `r`:
    """

    LOCAL = "local"
    """Replica `r` holds `g_r`. The global mean is an all-reduce mean."""

    LOCAL_PRESCALED = "prescaled"
    """Replica `r` holds `g_r / N`, because its loss was divided by `N`. The global mean is an all-reduce sum."""

    SUMMED = "summed"
    """Every replica holds the sum of all `g_r`. The global mean is that divided by `N`."""

    GLOBAL = "global"
    """Every replica holds the global mean already; nothing is left to do."""


class Evidence(NamedTuple):
    """What was seen of the losses of a step."""

    is_of_this_step: bool = True
    """Whether the answer of `gradient_state` rests on something that was seen in this step."""

    doubts: Sequence[str] = ()
    """What may be wrong with it, each a sentence with what to do."""


class Communicator(abc.ABC):
    """The replicas around the caller: facts about them, and collectives on lists of tensors.

    All replicas make the same calls in the same order. Results have the order of the arguments.

    A new backend writes `num_replicas`, `replica_id`, `gradient_state`, `all_reduce` and `all_gather`; `is_spmd` and
    `is_multi_process` where replicas are processes; `split` and `members` where groups take more than the default does.
    Only speed: `reduce_scatter`, `all_to_all` and `broadcast`.
    """

    num_replicas: int
    """How many replicas these are: all that train together, or those of one group."""

    replica_id: Any
    """Which of them this is, from 0: an int, or a scalar tensor where one traced program serves all replicas."""

    is_spmd: bool = True
    """Whether one program (traced once) serves all replicas, so that a `None` gradient is `None` on all of them."""

    is_multi_process: bool = False
    """Whether some of the replicas are in other processes, which then make the same calls."""

    _world: Communicator | None = None
    _groups: Groups | None = None

    @property
    def world(self) -> Communicator:
        """The communicator of all replicas, that this one was split from; itself if it is that."""
        return self if self._world is None else self._world

    @property
    def members(self) -> Any:
        """The ids of these replicas in `world`, ascending: ints, or a tensor where `replica_id` is one."""
        if self._groups is None:
            return range(self.num_replicas)
        return self._members_by_id[self.world.replica_id]

    @property
    def _members_by_id(self) -> list[Sequence[int]]:
        """For each replica of `world` the members of its group."""
        assert self._groups is not None
        by_id = {replica: group for group in self._groups for replica in group}
        return [by_id[replica] for replica in range(len(by_id))]

    @property
    def _positions_by_id(self) -> list[int]:
        """For each replica of `world` its position in its group."""
        return [members.index(replica) for replica, members in enumerate(self._members_by_id)]

    def split(self, groups: Groups) -> Communicator:
        """The communicator of this replica's own group, as `MPI_Comm_split` makes it.

        In it `num_replicas` and `replica_id` count the members of the group, and no collective leaves it. The rest
        (`gradient_state`) stays that of all replicas.

        Args:
            groups: lists of replica ids, of one size, that together name every replica once; the same on all replicas,
                which call this together. With one group of all of them it is this communicator.
        """
        if len(groups) == 1:
            return self
        group = copy.copy(self)
        group._world, group._groups = self, [sorted(ids) for ids in groups]
        group.num_replicas = len(groups[0])
        return group

    @abc.abstractmethod
    def gradient_state(self, grads: Gradients, variables: Sequence[Variable]) -> GradientState:
        """How these gradients arrive."""

    @abc.abstractmethod
    def all_reduce(self, tensors: Sequence[Tensor], op: ReduceOp) -> list[Tensor]:
        """Every replica gets the sum, mean or maximum over all replicas."""

    @abc.abstractmethod
    def all_gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Joins the replicas' flat tensors in the order of their ids."""

    def reduce_scatter(self, tensors: Sequence[Tensor], op: ReduceOp) -> list[Tensor]:
        """Like `all_reduce` (sum or mean), but each replica gets its slice only.

        Slices lie along the first dimension, which the number of replicas divides.
        """
        reduced = self.all_reduce(tensors, op)
        rows = [ops.reshape(tensor, (self.num_replicas, -1, *tensor.shape[1:])) for tensor in reduced]
        return [row[self.replica_id] for row in rows]

    def all_to_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Every replica gets its part of each replica's flat tensors, which it joins in the order of their ids.

        The number of replicas divides each length; part `r` goes to replica `r`.
        """
        size = self.num_replicas
        joined = [ops.reshape(all_, (size, size, -1)) for all_ in self.all_gather(tensors)]
        return [ops.reshape(ops.take(parts, self.replica_id, axis=1), (-1,)) for parts in joined]

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> list[Tensor]:
        """Every replica gets the tensors of replica `root`."""
        joined = self.all_gather([ops.reshape(tensor, (-1,)) for tensor in tensors])
        return [ops.reshape(all_, (self.num_replicas, *t.shape))[root] for all_, t in zip(joined, tensors)]


class SingleReplica(Communicator):
    """The only replica: every gradient is global already, and what it gets is what it gives."""

    num_replicas = 1
    replica_id = 0

    def gradient_state(self, grads: Gradients, variables: Sequence[Variable]) -> GradientState:
        return GradientState.GLOBAL

    def all_reduce(self, tensors: Sequence[Tensor], op: ReduceOp) -> list[Tensor]:
        return list(tensors)

    def all_gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)


class GlobalView(Communicator):
    """Several replicas, seen from a place where one program speaks for all of them.

    Gradients are global there, and there is nobody to exchange them with.
    """

    replica_id = 0

    def __init__(self, num_replicas: int, place: str, is_multi_process: bool = False) -> None:
        self.num_replicas = num_replicas
        self.is_multi_process = is_multi_process
        self._place = place

    def gradient_state(self, grads: Gradients, variables: Sequence[Variable]) -> GradientState:
        return GradientState.GLOBAL

    def _refuse(self) -> NoReturn:
        raise ValueError(f"Gradients are global already {self._place}. Use `CrossShard(..., gradients='auto')`.")

    def all_reduce(self, tensors: Sequence[Tensor], op: ReduceOp) -> list[Tensor]:
        self._refuse()

    def all_gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self._refuse()


_MIN_BUCKETS = 4
"""Into how many buckets gradients are divided at least,"""

_SMALL_BYTES = 2**20
"""unless they would become smaller than this."""


def largest_bucket(num_bytes: int, bucket_bytes: float) -> float:
    """How many bytes of so many a bucket may hold. Of what is in the last one, nothing is sent early."""
    return min(bucket_bytes, max(num_bytes / _MIN_BUCKETS, _SMALL_BYTES))


def in_buckets(num_bytes: Sequence[int], order: Iterable[int], bucket_bytes: float) -> Iterator[list[int]]:
    """Positions of what travels together: neighbours in that order, at most so many bytes unless there is but one.

    Args:
        num_bytes: how many each has.
        order: positions, one or more, in the order in which they are sent.
        bucket_bytes: how many a bucket may have.
    """
    bucket: list[int] = []
    size = 0
    for i in order:
        if bucket and size + num_bytes[i] > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(i)
        size += num_bytes[i]
    yield bucket
