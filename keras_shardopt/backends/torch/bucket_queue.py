"""Sends buckets one after another, in the same order on all ranks, and receives them in this order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from keras_shardopt.backends.torch.bucket import Bucket
from keras_shardopt.backends.torch.process_group import UPDATE, naming_missing_ranks, wait_for
from keras_shardopt.numerics import Tensor


class BucketQueue:
    """The buckets of all gradients, and how many of them this rank has sent and received in the current reduction.

    Args:
        buckets: the buckets, in the order in which a backward pass fills them. The last one also sends flags.
        begin_transfer: a function that creates the encoder of each reduction (`update/transport.py`), or None.
    """

    def __init__(self, buckets: Sequence[Bucket], begin_transfer: Callable[[], Any] | None) -> None:
        self._buckets = buckets
        self._begin_transfer = begin_transfer
        self.transfer: Any = None
        """The object that encodes the gradients of this reduction, until `release`. None if sent unencoded."""
        self._number_of = {i: number for number, bucket in enumerate(buckets) for i in bucket.places}
        self._num_missing: list[int] = []  # for each bucket, how many gradients the backward pass has not yet computed
        self._under_way: list[Any] = []  # for each sent bucket, the handle of its last collective
        self._num_sent = self._num_received = 0
        self._adds = False

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets)

    @property
    def flags(self) -> Tensor:
        """This rank's flags. After `complete`, the sums of all ranks' flags."""
        return self._buckets[-1].flags

    @property
    def is_partly_sent(self) -> bool:
        """Whether a reduction was interrupted. Other ranks then wait for its remaining buckets."""
        return 0 < self._num_sent < len(self._buckets)

    def start(self, adds: bool = False) -> None:
        """Begin a reduction. With `adds`, its sums are added to those of the previous reduction."""
        self._adds = adds
        self._num_sent = self._num_received = 0
        self._num_missing = [len(bucket.places) for bucket in self._buckets]
        self._under_way.clear()
        if self._begin_transfer is not None:
            self.transfer = self._begin_transfer()
        for bucket in self._buckets[:2]:
            bucket.open()

    def put(self, i: int, grad: Tensor | None, weight: float = 1.0) -> None:
        """Put the gradient of variable `i` times `weight` into its bucket. None stands for zeros."""
        self._buckets[self._number_of[i]].put(i, grad, weight)

    def put_early(self, i: int, grad: Tensor | None) -> None:
        """Put a gradient during the backward pass. Send full buckets, except for the last one, which sends flags."""
        number = self._number_of[i]
        self._buckets[number].put(i, grad, 1.0)
        self._num_missing[number] -= 1
        while self._num_sent < len(self._buckets) - 1 and not self._num_missing[self._num_sent]:
            self._send()

    def unsent_places(self) -> list[int]:
        """Return the positions of the variables whose buckets are not yet sent."""
        return [i for bucket in self._buckets[self._num_sent :] for i in bucket.places]

    def complete(self) -> None:
        """Send the remaining buckets, and receive all of them."""
        while self._num_sent < len(self._buckets):
            self._send()
        while self._num_received < len(self._buckets):
            self._receive_next()
        for number, bucket in enumerate(self._buckets):
            while bucket.has_more:
                self._receive(number)
        self._under_way.clear()

    def result(self, i: int) -> Tensor:
        """Return the reduced gradient of variable `i`."""
        return self._buckets[self._number_of[i]].results[i]

    def release(self) -> None:
        """Free memory of the last reduction that the next reduction does not need."""
        self.transfer = None
        for bucket in self._buckets:
            bucket.release()

    def _send(self) -> None:
        bucket = self._buckets[self._num_sent]
        while self._num_sent - self._num_received >= bucket.max_under_way:
            self._receive_next()
        bucket.encode(self.transfer)
        with naming_missing_ranks(self._under_way, UPDATE):
            self._under_way.append(bucket.send())
        self._num_sent += 1

    def _receive_next(self) -> None:
        self._receive(self._num_received)
        self._num_received += 1
        for bucket in self._buckets[self._num_received + 1 :][:1]:
            bucket.open()

    def _receive(self, number: int) -> None:
        bucket = self._buckets[number]
        with naming_missing_ranks(self._under_way, UPDATE):
            wait_for(self._under_way[number], call=UPDATE)
        bucket.receive(self._adds)
        if bucket.has_more:
            with naming_missing_ranks(self._under_way, UPDATE):
                self._under_way[number] = bucket.send()
