"""The interface of buckets: groups of gradients that ranks send together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_shardopt.backends.communicator import largest_bucket
from keras_shardopt.backends.torch.communicator import buckets_by_dtype
from keras_shardopt.backends.traffic import Kind
from keras_shardopt.numerics import Tensor


class Bucket:
    """A group of gradients. In each reduction, a `BucketQueue` calls `open`, `put`, `encode`, `send` and `receive`."""

    can_resend = True
    """Whether gradients still exist after sending, and can be sent again."""

    max_under_way = 1
    """The maximum number of buckets in transfer at a time."""

    failure = ""
    """A description of an error on this rank before sending, or ""."""

    places: list[int]
    """The positions of the bucket's variables."""

    flags: Tensor
    """This rank's flags, such as whether it still trains. After the reduction, the sums of all ranks' flags."""

    results: dict[int, Tensor]
    """The reduced gradients, by position of the variable."""

    @property
    def sent(self) -> Sequence[tuple[Kind, Sequence[Tensor]]]:
        """The collectives that send this bucket, with their tensors, to count bytes."""
        raise NotImplementedError

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """The tensors that hold the sent gradients and the results, and stay for the next reduction."""
        raise NotImplementedError

    @property
    def has_more(self) -> bool:
        """Whether this bucket needs another collective after `receive`, or waits for its result."""
        return False

    def open(self) -> None:
        """Take memory for this reduction. Called when at most one earlier bucket is not yet received."""

    def put(self, i: int, grad: Tensor | None, weight: float) -> None:
        """Store a gradient times `weight`. None stands for zeros."""
        raise NotImplementedError

    def encode(self, transfer: Any) -> None:
        """Encode the gradients. Separate from `send`, so an encoding error is not reported as a failed collective."""

    def send(self) -> Any:
        """Start the next collective of this bucket. Return its handle, a `torch.distributed.Work`."""
        raise NotImplementedError

    def receive(self, adds: bool) -> None:
        """Use the result of the finished collective. With `adds`, slices are added to those of an earlier reduction."""
        raise NotImplementedError

    def release(self) -> None:
        """Free tensors that the next reduction does not need."""

    def is_finite(self) -> Tensor:
        """Return a scalar bool tensor: whether the sum of squares of the results is finite."""
        raise NotImplementedError


def places_in_order(tensors: Sequence[Tensor], bucket_bytes: float) -> list[list[int]]:
    """Group the positions of tensors into buckets of about `bucket_bytes`, in the order in which ranks send them.

    A backward pass fills the buckets in this order: last variables first.
    """
    limit = largest_bucket(sum(tensor.nbytes for tensor in tensors), bucket_bytes)
    return sorted(buckets_by_dtype(tensors, reversed(range(len(tensors))), limit), key=min, reverse=True)
