"""The replicas and their collectives: the interface that each backend implements.

A backend states facts (`num_replicas`, `replica_id`, `gradient_state`) and moves lists of tensors between replicas. A
single replica has its own class (`SingleReplica`), so callers need no special case for it.
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
    """Whether gradients have been summed or averaged over replicas when they reach the optimizer."""

    LOCAL = "local"
    """Each replica holds the gradient of its own mean loss. An all-reduce "mean" gives the mean over replicas."""

    LOCAL_PRESCALED = "prescaled"
    """Each loss was divided by the number of replicas, so an all-reduce "sum" gives the mean over replicas."""

    SUMMED = "summed"
    """Every replica holds the sum of all replicas' gradients. Divided by the number of replicas, it is their mean."""

    GLOBAL = "global"
    """Every replica already holds the mean of all replicas' gradients."""

    @property
    def is_local(self) -> bool:
        """Whether the gradients are not reduced yet."""
        return self in (GradientState.LOCAL, GradientState.LOCAL_PRESCALED)


class Evidence(NamedTuple):
    """How reliable a detected `GradientState` is, and warnings about possible mistakes in the user's training step."""

    is_of_this_step: bool = True
    """Whether the state was detected from losses of this training step, not from losses of an earlier step."""

    doubts: Sequence[str] = ()
    """The text of each warning, with a remedy."""


class Communicator(abc.ABC):
    """The replicas that run the calling code: facts about them, and collectives on lists of tensors.

    All replicas make the same calls in the same order. Results have the order of the arguments.

    A new backend implements `num_replicas`, `replica_id`, `gradient_state`, `all_reduce` and `all_gather`. If replicas
    are processes, it sets `is_spmd` and `is_multi_process`. It overrides `split` and `members` if their defaults do not
    work for groups of replicas, and `reduce_scatter`, `all_to_all` and `broadcast` for speed.
    """

    num_replicas: int
    """The number of all replicas or, in a communicator made by `split`, of the replicas in its group."""

    replica_id: Any
    """This replica's index: an int, or a scalar tensor if one traced program serves all replicas."""

    is_spmd: bool = True
    """Whether all replicas run one traced program. A gradient that is None on one replica is then None on all."""

    is_multi_process: bool = False
    """Whether some replicas run in other processes. Those processes must make the same calls."""

    _world: Communicator | None = None
    _groups: Groups | None = None

    @property
    def world(self) -> Communicator:
        """The communicator of all replicas. `split` makes communicators of fewer replicas."""
        return self if self._world is None else self._world

    @property
    def members(self) -> Any:
        """The ids of this communicator's replicas, ascending: ints, or a tensor if `replica_id` is a tensor."""
        if self._groups is None:
            return range(self.num_replicas)
        return self._at_own_id(self._members_by_id)

    def _at_own_id(self, values: list[Any]) -> Any:
        """Return this replica's element of a list with an element for each replica of the world."""
        return values[self.world.replica_id]

    @property
    def _members_by_id(self) -> list[Sequence[int]]:
        """For each replica, the ids of the replicas in its group."""
        assert self._groups is not None
        by_id = {replica: group for group in self._groups for replica in group}
        return [by_id[replica] for replica in range(len(by_id))]

    @property
    def _positions_by_id(self) -> list[int]:
        """For each replica, its position in its group."""
        return [members.index(replica) for replica, members in enumerate(self._members_by_id)]

    def split(self, groups: Groups) -> Communicator:
        """Return the communicator of this replica's group, as `MPI_Comm_split` does.

        Its collectives reach only the replicas of the group. All replicas must make this call with the same `groups`:
        equal-length lists of replica ids, with every replica in one group.
        """
        if len(groups) == 1:
            return self
        group = copy.copy(self)
        group._world, group._groups = self, [sorted(ids) for ids in groups]
        group.num_replicas = len(groups[0])
        return group

    @abc.abstractmethod
    def gradient_state(self, grads: Gradients, variables: Sequence[Variable]) -> GradientState:
        """Return whether these gradients have already been summed or averaged over replicas."""

    @abc.abstractmethod
    def all_reduce(self, tensors: Sequence[Tensor], op: ReduceOp) -> list[Tensor]:
        """Return the sum, mean or maximum of each tensor over all replicas."""

    @abc.abstractmethod
    def all_gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return each flat tensor, concatenated over all replicas in the order of replica ids."""

    def reduce_scatter(self, tensors: Sequence[Tensor], op: ReduceOp) -> list[Tensor]:
        """Return this replica's slice of the sum or mean of each tensor over replicas.

        The number of replicas must divide each tensor's first dimension.
        """
        reduced = self.all_reduce(tensors, op)
        rows = [ops.reshape(tensor, (self.num_replicas, -1, *tensor.shape[1:])) for tensor in reduced]
        return [row[self.replica_id] for row in rows]

    def all_to_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Send slice `r` of each flat tensor to replica `r`, and concatenate the received slices by replica id.

        The number of replicas must divide the length of each tensor.
        """
        size = self.num_replicas
        joined = [ops.reshape(all_, (size, size, -1)) for all_ in self.all_gather(tensors)]
        return [ops.reshape(ops.take(parts, self.replica_id, axis=1), (-1,)) for parts in joined]

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> list[Tensor]:
        """Return the tensors of replica `root`."""
        joined = self.all_gather([ops.reshape(tensor, (-1,)) for tensor in tensors])
        return [ops.reshape(all_, (self.num_replicas, *t.shape))[root] for all_, t in zip(joined, tensors)]


class SingleReplica(Communicator):
    """The communicator without data parallelism: one replica, so each collective returns its input."""

    num_replicas = 1
    replica_id = 0

    def gradient_state(self, grads: Gradients, variables: Sequence[Variable]) -> GradientState:
        return GradientState.GLOBAL

    def all_reduce(self, tensors: Sequence[Tensor], op: ReduceOp) -> list[Tensor]:
        return list(tensors)

    def all_gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)


class GlobalView(Communicator):
    """Several replicas that one program computes together, so each gradient is already the mean over replicas.

    Collectives raise an error with `place` in the message, such as "under a `keras.distribution`".
    """

    replica_id = 0

    def __init__(self, num_replicas: int, place: str, is_multi_process: bool = False) -> None:
        self.num_replicas = num_replicas
        self.is_multi_process = is_multi_process
        self._place = place

    def gradient_state(self, grads: Gradients, variables: Sequence[Variable]) -> GradientState:
        return GradientState.GLOBAL

    def _refuse(self) -> NoReturn:
        raise ValueError(
            f"Gradients must not be reduced twice: they are already averaged over all replicas {self._place}. Use "
            "`CrossShard(..., gradients='auto')`."
        )

    def all_reduce(self, tensors: Sequence[Tensor], op: ReduceOp) -> list[Tensor]:
        self._refuse()

    def all_gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self._refuse()


_MIN_BUCKETS = 4
_MIN_BUCKET_BYTES = 2**22


def largest_bucket(num_bytes: int, bucket_bytes: float) -> float:
    """Return the maximum bytes of a bucket, a group of gradients that are sent together.

    The result is `bucket_bytes`, or if smaller, a quarter of `num_bytes` (the bytes of all gradients) but at least
    4 MiB, because buckets below this cost more time than they save. With several buckets, all except the last can be
    sent before the backward pass ends.
    """
    return min(bucket_bytes, max(num_bytes / _MIN_BUCKETS, _MIN_BUCKET_BYTES))


def in_buckets(num_bytes: Sequence[int], order: Iterable[int], bucket_bytes: float) -> Iterator[list[int]]:
    """Group tensors, in the given order, into buckets of at most `bucket_bytes`. Yield lists of their positions.

    `order` lists the positions of the tensors and must not be empty. `num_bytes` has the size of each tensor. A tensor
    above the limit has its own bucket.
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
