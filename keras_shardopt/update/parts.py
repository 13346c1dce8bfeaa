"""Communicators for parts of a batch that a program goes through one by one, or in branches of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from keras_shardopt.backends.communicator import Communicator, GradientState
from keras_shardopt.numerics import Gradients, ReduceOp, Tensor, Variable


class PartOfBatch(Communicator):
    """The communicator of losses and stages that get one part of a batch. It exchanges nothing.

    Losses that divide by a mask, or by a sum of weights, ask for what all parts have of it. So a trainer goes through
    the parts once before (`CountingPart`), adds up what they count, and says it to each part; except where each replica
    has one part, and they can wait for one another.

    Args:
        replica_id: which part of the batch this is.
        num_replicas: how many parts there are.
        is_first: whether it is the first one on its replica.
        is_last: whether it is the last one.
        counted: what all parts have together, in the order in which losses ask for it.
        others: adds up what all parts count, where each replica has one part.
    """

    _refusal = (
        "If a batch does not divide by the number of replicas, each replica's loss is computed apart. Received: a loss "
        "or layer of the model's own that waits for the other replicas. Use batches that divide, or losses of Keras."
    )

    def __init__(
        self,
        replica_id: Any,
        num_replicas: int,
        is_first: bool,
        is_last: bool,
        counted: Sequence[Tensor] = (),
        others: Communicator | None = None,
    ) -> None:
        self.replica_id = replica_id
        self.num_replicas = num_replicas
        self.is_first = is_first
        self.is_last = is_last
        self._counted = list(counted)
        self._others = others

    def gradient_state(self, grads: Gradients, variables: Sequence[Variable]) -> GradientState:
        """Its own."""
        return GradientState.LOCAL

    def _refuse(self) -> NoReturn:
        raise NotCountedError(self._refusal)

    def all_reduce(self, tensors: Sequence[Tensor], op: ReduceOp) -> list[Tensor]:
        """What all parts have of these, if it was counted before or can be now; else raises ValueError."""
        if op == "sum" and self._others is not None:
            return self._others.all_reduce(tensors, op)
        if op != "sum" or len(self._counted) < len(tensors):
            self._refuse()
        found, self._counted = self._counted[: len(tensors)], self._counted[len(tensors) :]
        return found

    def all_gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Raises ValueError."""
        self._refuse()


class NotCountedError(ValueError):
    """Raised where a loss asks for what all parts have of something that was not counted before."""


class CountingPart(PartOfBatch):
    """A part that is gone through for what its losses count, and for nothing else."""

    def __init__(self, replica_id: Any, num_replicas: int, is_first: bool, is_last: bool) -> None:
        super().__init__(replica_id, num_replicas, is_first, is_last)
        self.counts: list[Tensor] = []
        """What was to be added up, in its order."""

    def all_reduce(self, tensors: Sequence[Tensor], op: ReduceOp) -> list[Tensor]:
        """Notes them, and returns them as they are."""
        if op != "sum":
            self._refuse()
        self.counts += tensors
        return list(tensors)
