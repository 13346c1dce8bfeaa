"""Send the gradients of one update between replicas, unchanged or in half precision.

A `Transport` lives as long as its optimizer, a `Transfer` for one reduction. A reducer, such as `AllReduce`, decides
which replicas receive the sums. An extension subclasses `Transport` and `Transfer`, and its `Transport.carried` keeps
values for the next reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras import ops

from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.backends.compression import Compressed
from keras_shardopt.numerics import ReduceOp, Tensor, Variable
from keras_shardopt.update.plugs import plug_of
from keras_shardopt.update.reduction import Reduction
from keras_shardopt.update.step import Step

Rows = Sequence[Sequence[tuple[int, int, Tensor]]]
"""For each receiving replica, its slices: (variable's position, first element, this replica's gradient there)."""


class Transfer:
    """Runs one reduction of gradients over replicas."""

    scatters: bool = True
    """Whether this class implements `reduce_scatter`."""

    def __init__(self, comm: Communicator | Compressed) -> None:
        self.comm = comm

    def all_reduce(
        self, places: Sequence[int], tensors: Sequence[Tensor], along: Tensor | None, op: ReduceOp
    ) -> tuple[list[Tensor], Tensor | None]:
        """Return the sums or means of gradients, and of the tensor `along`, over replicas.

        Args:
            places: the positions of the gradients' variables among the optimizer's trainable variables.
            tensors: this replica's gradients.
            along: a flat tensor, such as flags, to reduce in the same collective, or None.
            op: "sum" or "mean".
        """
        if along is None:
            return self.comm.all_reduce(tensors, op), None
        *sums, last = self.comm.all_reduce([*tensors, along], op)
        return sums, last

    def reduce_scatter(
        self, rows: Rows, length: int, along: Tensor | None, op: ReduceOp, dtype: str
    ) -> tuple[Tensor, Tensor | None]:
        """Return this replica's reduced slices, concatenated in a flat tensor, and the reduced `along`.

        Args:
            rows: for each replica, the slices that it receives.
            length: int. Number of elements of the longest row. Shorter rows are padded with zeros.
            along: see `all_reduce`.
            op: "sum" or "mean".
            dtype: the dtype of the padding.
        """
        parts: list[Tensor] = []
        for row in rows:
            missing = length - sum(int(value.shape[0]) for _, _, value in row)
            parts += [value for _, _, value in row]
            parts += [ops.zeros((missing,), dtype)] if missing else []
            parts += [] if along is None else [along]
        (own,) = self.comm.reduce_scatter([ops.concatenate(parts)], op)
        return own, None if along is None else own[length:]

    def left(self, step: Step, all_decide: bool) -> Step:
        """Return the step with new compression errors in `own`, or with the old errors if the update is skipped.

        Args:
            step: the reduced step.
            all_decide: bool. Whether the replicas of all groups skip an update together.
        """
        del all_decide
        return step


class Transport:
    """Sends gradients between replicas unchanged. Subclasses can encode gradients."""

    narrow: str | None = None
    """The half-precision dtype to which gradients are cast, if the transport changes nothing else; None otherwise."""

    divides_along_axes: bool = True
    """Whether a reduction can give each replica a slice along a dimension (`Step.axes`)."""

    early_in_slices: bool = True
    """Whether slices of gradients (`shard_state=True`) can be sent during the backward pass."""

    buckets: Callable[..., Any] | None = None
    """Creates the buckets that PyTorch sends during the backward pass; None for the default buckets."""

    @property
    def carried(self) -> Mapping[str, Sequence[Variable]]:
        """The variables that keep values for the next reduction, by their name in backups.

        Values differ between replicas. For example, compression errors are added to the next gradients.
        """
        return {}

    def check(self) -> None:
        """Warn if the inner optimizers do not work well with this encoding of gradients."""

    def build(self, variables: Sequence[Variable], add_variable: Callable[..., Variable]) -> None:
        """Create the variables of the transport when the optimizer is built."""

    def reset(self) -> None:
        """Discard the values of `carried`, such as compression errors, because state was loaded."""

    def stack(self) -> None:
        """If one program runs all replicas, stack their values of `carried` along a first dimension."""

    def begin(self, comm: Communicator, reduction: Reduction) -> Transfer:
        """Return the `Transfer` for one reduction among the replicas of `comm`.

        Raises:
            ValueError: if the replicas do not support the transport.
        """
        del reduction
        return Transfer(comm)

    def keep(self, step: Step) -> Step:
        """Store `step.own`, such as compression errors, in the variables `carried`. Runs outside `shard_map`."""
        return step

    def means(self, comm: Communicator, places: Sequence[int], tensors: Sequence[Tensor], update: Any) -> list[Tensor]:
        """Return the mean over replicas of each tensor, for tensors that are not gradients, such as weights.

        Args:
            comm: the communicator of the replicas.
            places: for each tensor, the position of its variable among the optimizer's trainable variables.
            tensors: this replica's tensors.
            update: the number of updates so far.
        """
        del places, update
        return comm.all_reduce(list(tensors), "mean")


class InHalf(Transport):
    """Sums gradients in half precision ("float16" or "bfloat16")."""

    def __init__(self, dtype: str) -> None:
        self.narrow = dtype

    def begin(self, comm: Communicator, reduction: Reduction) -> Transfer:
        """Begin one reduction in half precision. Gradients are divided first, because their sum could overflow."""
        return Transfer(Compressed(comm, str(self.narrow), divides=reduction.is_whole))

    def means(self, comm: Communicator, places: Sequence[int], tensors: Sequence[Tensor], update: Any) -> list[Tensor]:
        return Compressed(comm, str(self.narrow), divides=True).all_reduce(list(tensors), "mean")


def transport_of(given: Any, context: Any) -> Transport:
    """Return the transport for the argument `compression`: None, a dtype, or an object of an extension."""
    if given is None:
        return Transport()
    if isinstance(given, str):
        return InHalf(given)
    made: Transport = plug_of("compression").transport(given, context)
    return made
