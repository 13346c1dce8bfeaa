"""Communicators for parts of a batch that one program processes sequentially, or in separate branches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from keras_shardopt.backends.communicator import Communicator, GradientState
from keras_shardopt.numerics import Gradients, ReduceOp, Tensor, Variable


class PartOfBatch(Communicator):
    """The communicator that losses and stages use while one part of a batch is processed, as if it were a replica.

    Losses that divide by the sum of a mask, or of sample weights, need this sum over all parts. For such losses, a
    trainer runs all parts with `CountingPart`, and passes the recorded sums as `counted`. If each replica has exactly
    one part, the trainer skips this run and passes `others`.

    Args:
        replica_id: the index of this part.
        num_replicas: the number of parts.
        counted: the sums over all parts, in the order in which losses request them.
        others: the communicator of the replicas, if each has exactly one part.
    """

    def __init__(
        self,
        replica_id: Any,
        num_replicas: int,
        counted: Sequence[Tensor] = (),
        others: Communicator | None = None,
    ) -> None:
        self.replica_id = replica_id
        self.num_replicas = num_replicas
        self._counted = list(counted)
        self._others = others

    def gradient_state(self, grads: Gradients, variables: Sequence[Variable]) -> GradientState:
        return GradientState.LOCAL

    def _raise_not_counted(self) -> NoReturn:
        raise NotCountedError(
            "If the batch size is not a multiple of the number of replicas, a custom loss or layer cannot communicate "
            "with other replicas. Received: a loss or layer that communicates. Use a batch size that is such a "
            "multiple, or remove the communication (for example, use a loss of Keras)."
        )

    def all_reduce(self, tensors: Sequence[Tensor], op: ReduceOp) -> list[Tensor]:
        """Return sums over all parts of a batch, from `others` or `counted`. Raise an error if both are missing."""
        if op == "sum" and self._others is not None:
            return self._others.all_reduce(tensors, op)
        if op != "sum" or len(self._counted) < len(tensors):
            self._raise_not_counted()
        found, self._counted = self._counted[: len(tensors)], self._counted[len(tensors) :]
        return found

    def all_gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Raise ValueError, because the parts of a batch are not computed together."""
        self._raise_not_counted()


class NotCountedError(ValueError):
    """Raised if a loss or layer needs a sum over all parts of a batch, but no earlier run has computed this sum."""


class CountingPart(PartOfBatch):
    """The communicator in a run that only records the values that losses sum over all parts of the batch."""

    def __init__(self, replica_id: Any, num_replicas: int) -> None:
        super().__init__(replica_id, num_replicas)
        self.counts: list[Tensor] = []
        """The tensors of this part of the batch that losses sum over all parts, in the order of the calls."""

    def all_reduce(self, tensors: Sequence[Tensor], op: ReduceOp) -> list[Tensor]:
        """Record the tensors, and return them unchanged."""
        if op != "sum":
            self._raise_not_counted()
        self.counts += tensors
        return list(tensors)
