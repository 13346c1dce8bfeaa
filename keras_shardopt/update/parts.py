"""Communicators for parts of a batch that one program processes sequentially, or in separate branches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from keras_shardopt.backends.communicator import Communicator, GradientState
from keras_shardopt.numerics import Gradients, ReduceOp, Tensor, Variable


class PartOfBatch(Communicator):
    """The communicator of losses and stages while they process one part of a batch.

    Losses that divide by the sum of a mask, or of sample weights, need this sum over all parts. So a trainer first runs
    all parts with `CountingPart`, sums their counts, and passes the sums as `counted`. If each replica has exactly one
    part, it passes `others` instead, and the losses of the parts communicate.

    Args:
        replica_id: the index of this part.
        num_replicas: the number of parts.
        is_first: whether it is the first part on its replica.
        is_last: whether it is the last part on its replica.
        counted: the sums over all parts, in the order in which losses reduce them.
        others: the replicas, if each has one part.
    """

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
        return GradientState.LOCAL

    def _raise_not_counted(self) -> NoReturn:
        raise NotCountedError(
            "If the batch size is not a multiple of the number of replicas, a custom loss or layer cannot communicate "
            "with other replicas. Received: one that does. Use a batch size that is a multiple, or remove the "
            "communication (for example, use a loss of Keras)."
        )

    def all_reduce(self, tensors: Sequence[Tensor], op: ReduceOp) -> list[Tensor]:
        """Return the sums over all parts: those in `counted`, or those over `others`. Raise ValueError otherwise."""
        if op == "sum" and self._others is not None:
            return self._others.all_reduce(tensors, op)
        if op != "sum" or len(self._counted) < len(tensors):
            self._raise_not_counted()
        found, self._counted = self._counted[: len(tensors)], self._counted[len(tensors) :]
        return found

    def all_gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Raise ValueError: parts cannot be gathered."""
        self._raise_not_counted()


class NotCountedError(ValueError):
    """The error for a reduction over all parts whose sum is not in `counted`."""


class CountingPart(PartOfBatch):
    """The communicator of a first run that only records the sums that losses reduce."""

    def __init__(self, replica_id: Any, num_replicas: int, is_first: bool, is_last: bool) -> None:
        super().__init__(replica_id, num_replicas, is_first, is_last)
        self.counts: list[Tensor] = []
        """This part's terms of the sums, in the order of the calls."""

    def all_reduce(self, tensors: Sequence[Tensor], op: ReduceOp) -> list[Tensor]:
        """Record the tensors, and return them unchanged."""
        if op != "sum":
            self._raise_not_counted()
        self.counts += tensors
        return list(tensors)
