"""Sums gradients over all ranks in buckets. Flags in the last bucket show whether the ranks agree about the update.

A gradient can change on a rank after it was sent. A flag then makes all ranks repeat the reduction. If ranks still have
their gradients (`can_resend`), they send all of them again. Otherwise they keep the first sums, and a second reduction
adds what arrived late; a rank with nothing late sends zeros. No third one is needed, because gradients do not change
after the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from keras_shardopt.backends.side_channel import NUM_FLAGS, ReceivedFlags, SideChannel
from keras_shardopt.backends.torch.bucket import Bucket
from keras_shardopt.backends.torch.bucket_queue import BucketQueue
from keras_shardopt.backends.torch.flat_bucket import flat_buckets
from keras_shardopt.backends.torch.nonfinite_source import nonfinite_source
from keras_shardopt.backends.torch.sliced_bucket import Slices, sliced_buckets
from keras_shardopt.numerics import Gradients, ReduceOp, Tensor, Variable


class RankSums:
    """The sums, or means, of all ranks' gradients. All ranks must make the same calls.

    Args:
        ranks: the ranks of the default process group (`TorchProcessGroup`).
        variables: all trainable variables that can have gradients.
        takes_mean: whether sums are divided by the number of ranks.
        bucket_bytes: the size limit of a bucket. A larger gradient has its own bucket.
        compression: None, "float16" or "bfloat16", the dtype of float32 and float64 when sent and summed.
        checks_finite: whether to find non-finite gradients.
        slices: with sharded state, the slices of each rank. Otherwise None.
        made: with compression by a codec, a function that creates the buckets, and a function that creates the encoder
            of each reduction (`update/transport.py`). Otherwise (None, None).
    """

    def __init__(
        self,
        ranks: Any,
        variables: Sequence[Variable],
        takes_mean: bool,
        bucket_bytes: float,
        compression: str | None,
        checks_finite: bool,
        slices: Slices | None,
        made: tuple[Any, Any],
    ) -> None:
        self.ranks = ranks
        self.variables = list(variables)
        self._checks_finite = checks_finite
        self.found_inf: tuple[int, int, int] | None = None
        """(1 if the last sums are not finite, rank, position of the variable). None without `checks_finite`."""
        self.num_updates = 0
        """The number of updates with these sums. If it differs between ranks, a rank has skipped an update."""
        tensors = [variable.value for variable in self.variables]
        num_flags = len(tensors) + NUM_FLAGS + (3 if slices is None else 4)
        op: ReduceOp = "mean" if takes_mean else "sum"
        make, begin_transfer = made
        buckets: Sequence[Bucket]
        if make is not None:
            buckets = make(ranks, tensors, bucket_bytes, op, num_flags)
        elif slices is None:
            buckets = flat_buckets(tensors, bucket_bytes, op, ranks.num_replicas, compression, num_flags)
        else:
            buckets = sliced_buckets(tensors, slices, op, ranks.replica_id, compression, num_flags, checks_finite)
        self.queue = BucketQueue(buckets, begin_transfer)
        self.can_resend = buckets[0].can_resend
        """Whether gradients still exist after sending. Otherwise, `.grad` must be freed, and NaN afterwards."""

    def begin(self) -> None:
        """Prepare the next update.

        Raises:
            RuntimeError: if gradients of an earlier update could not be encoded on this rank.
            ValueError: on all ranks, if an earlier backward pass has failed on a rank, and its gradients are freed.
        """
        failure = next((bucket.failure for bucket in self.queue if bucket.failure), "")
        if failure:
            raise RuntimeError(
                "Training cannot continue, because the gradients of an earlier step were not sent to all ranks: "
                f"{failure}. Restart the job."
            )
        if self.queue.is_partly_sent:
            # This rank's previous backward pass failed, and other ranks still wait for its remaining buckets. Send
            # them. If gradients can be sent again, the other ranks then repeat the step together with this rank.
            present = [False] * len(self.variables)
            self.complete(present, lambda: [], None, is_late=True, has_lost=not self.can_resend)

    def sum_now(
        self,
        own: Gradients,
        trained: Sequence[bool] | None,
        weight: float = 1.0,
        trains: bool = True,
        present: list[bool] | None = None,
        adds: bool = False,
    ) -> list[Tensor | None]:
        """Send all gradients times `weight`, and again if one has changed on a rank. Return the sums.

        With `adds`, add to the sums of the previous reduction. The other arguments are those of `complete`. `present`
        can be None if `own` shows which gradients this rank has.
        """
        has = [grad is not None for grad in own] if present is None else present
        self.queue.start(adds)
        for i, grad in enumerate(own):
            if grad is not None or not adds:
                self.queue.put(i, grad, weight)
        found = self.complete(has, lambda: own, trained, trains)
        if found is not None:
            return found
        if not self.can_resend:
            own, adds = [None] * len(own), True
        return self.sum_now(own, trained, weight, trains, has, adds)

    def complete(
        self,
        present: list[bool],
        own: Callable[[], Gradients],
        trained: Sequence[bool] | None,
        trains: bool = True,
        is_late: bool = False,
        has_lost: bool = False,
    ) -> list[Tensor | None] | None:
        """Send the remaining buckets and wait. Return the sums, or None if ranks must send all gradients again.

        Args:
            present: for each variable, whether this rank has a gradient.
            own: returns this rank's gradients, to find a non-finite one.
            trained: for each variable, whether this rank trains it. None means all.
            trains: false if this rank has ended training.
            is_late: whether a gradient has changed on this rank after it was sent.
            has_lost: whether this rank has freed a gradient that was not sent.
        """
        is_odd = self.num_updates % 2 == 1
        more = [is_late, trains and is_odd, trains and not is_odd]
        more += [] if self.can_resend else [has_lost]
        channel = SideChannel(self.ranks, self.variables, present, trained, trains, more)
        # Do not block: a blocking copy to an accelerator would wait for the backward pass.
        self.queue.flags.copy_(torch.from_numpy(channel.flags_on_host()), non_blocking=True)
        self.queue.complete()
        received, _ = channel.unpack(self.queue.flags, "sum", must_read=is_late)
        if received is not None:
            if self._must_repeat(received):
                return None
            received.check_same_variables()
            present = received.present
        found = [self.queue.result(i) if is_there else None for i, is_there in enumerate(present)]
        if self._checks_finite:
            self.found_inf = nonfinite_source(self.ranks, self.queue, found, own)
        return found

    def _must_repeat(self, received: ReceivedFlags) -> bool:
        """Return whether any rank needs all gradients sent again. Raise an error if ranks make different calls."""
        received.check_all_train()
        num_late, num_odd, num_even, *lost = received.more
        num_ranks = self.ranks.num_replicas
        if any(number > 0 for number in lost):
            raise ValueError(
                "With `shard_state=True`, the memory of sent gradients is freed, so training cannot continue after a "
                "failed backward pass. Received: a failed backward pass on at least one rank. To continue after "
                "errors, use `CrossShard(..., torch=TorchSpeed(overlap=False))`."
            )
        if num_odd > 0 and num_even > 0:
            raise ValueError(
                "All ranks must make the same updates, in the same order. Received: gradients of different updates on "
                "different ranks. Do not skip an update on some ranks only. A program that catches an exception of an "
                "update must catch it on all ranks."
            )
        # On a GPU, ranks with unchanged gradients do not read the flags, so they would not send these gradients again.
        if 0 < num_late < num_ranks and not received.all_read:
            raise RuntimeError(
                "On a GPU, sent gradients must not change, unless they change on all ranks. Received: a changed "
                f"gradient, a second gradient of a weight, or a failed backward pass, on {round(num_late)} of "
                f"{num_ranks} ranks. To send later, use `CrossShard(..., torch=TorchSpeed(overlap=False))`."
            )
        return bool(num_late > 0)
