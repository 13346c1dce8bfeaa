"""The reducer that sends gradients during the backward pass, on PyTorch."""

from __future__ import annotations

from typing import Any

from keras import ops

from keras_shardopt.backends import for_backend
from keras_shardopt.backends.active import runtime
from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.backends.traffic import note
from keras_shardopt.numerics import ALL_FINITE, Tensor, overwrites_variable
from keras_shardopt.update.all_reduce import AllReduce, GradientSlicer
from keras_shardopt.update.context import StageContext
from keras_shardopt.update.options import CrossShardOptions
from keras_shardopt.update.reduction import Reduction
from keras_shardopt.update.step import Step
from keras_shardopt.update.transport import Transfer

# PyTorch only: reduces gradients during the backward pass.
_overlap: Any = for_backend({"torch": "keras_shardopt.backends.torch.overlap"})

# PyTorch only: predicts the memory of the buckets in which gradients are sent.
_bytes: Any = for_backend({"torch": "keras_shardopt.backends.torch.bucket_bytes"})

OVERLAPS = _overlap is not None
"""Whether this backend can send gradients during the backward pass."""


class Overlapped:
    """Sends gradients during the backward pass on PyTorch. If that is impossible, `at_the_end` sends them later."""

    def __init__(
        self,
        at_the_end: AllReduce,
        context: StageContext,
        options: CrossShardOptions,
        shards: GradientSlicer | None,
    ) -> None:
        self._context = context
        self._options = options
        self._at_the_end = at_the_end
        self._shards = shards
        self.transport = at_the_end.transport
        self.reduce, self.own_part, self.members = at_the_end.reduce, at_the_end.own_part, at_the_end.members
        self.dividing_axes = at_the_end.dividing_axes
        self.buckets: Any = None
        """The buckets: groups of gradients that are sent together. None if gradients are not sent early."""
        self._among: Communicator | None = None

    def watch(self, loss: Tensor, row_share: Any) -> None:
        """Prepare to send gradients during the backward pass of this loss, if Keras' trainer runs the step."""
        if self.buckets is None or not runtime.is_concrete(loss):
            return
        optimizer, counts = self._context.optimizer, bool(row_share)
        if optimizer.accumulation is None:
            self.buckets.follow(loss, optimizer, counts)
        elif (mean := optimizer.accumulation.sums.mean_with_last(counts)) is not None:
            self.buckets.follow(loss, optimizer, True, mean)

    def reduced_early(self, step: Step, comm: Communicator) -> Step | None:
        buckets = self.buckets_among(comm)
        if buckets is None:
            return None
        grads = buckets.reduce(step.grads, step.variables, bool(step.row_share), step.weight)
        for kind, tensors in buckets.sent:
            note(kind, tensors, comm.num_replicas)
        found_inf = buckets.found_inf
        if found_inf not in (None, ALL_FINITE):
            found_inf = ops.convert_to_tensor(found_inf, "int32")
        step = step.replace(grads=grads, found_inf=found_inf)
        if buckets.transfer is not None:
            step = buckets.transfer.left(step, all_decide=False)
        buckets.release()
        return step

    def predicted_bytes(self) -> tuple[int, int | None]:
        if self._among is not None and self.buckets is None:
            return 0, 0
        num_ranks = self._context.communicator().num_replicas
        if num_ranks == 1 or self.transport.buckets is not None:
            return 0, 0 if num_ranks == 1 else None
        slices = None if self._shards is None else self._shards.gradient_slices
        predicted: tuple[int, int] = _bytes.predicted(num_ranks, self._context.trainable, self.transport.narrow, slices)
        return predicted

    @property
    def has_finished(self) -> bool:
        return self.buckets is not None and bool(self.buckets.has_finished)

    def finish(self, comm: Communicator) -> None:
        """Send zeros as gradients, because this rank has ended training. Send them in buckets if other ranks do."""
        buckets = self.buckets_among(comm)
        if buckets is None:
            self._at_the_end.finish(comm)
        else:
            buckets.join_uneven_inputs()

    def buckets_among(self, comm: Communicator) -> Any:
        """Return the buckets in which the replicas of `comm` send gradients early; None if they send all at the end."""
        if self._among is not comm:
            if self._context.started is not comm or not self._context.state_finder.may_be_local:
                return None
            self.buckets, self._among = None, comm
            variables = self._context.trainable
            if not any(map(overwrites_variable, variables)):
                takes_mean, num_bytes = self._options.reduction == "mean", self._options.speed.bucket_mib * 2**20
                slices = None if self._shards is None else self._shards.gradient_slices
                checks, transport = self._options.on_nonfinite != "ignore", self.transport

                def begin() -> Transfer:
                    return transport.begin(comm, Reduction.of_nothing(variables))

                made = (transport.buckets, None if transport.buckets is None else begin)
                arguments = (takes_mean, num_bytes, transport.narrow, checks, slices, made)
                self.buckets = _overlap.buckets_among(comm, variables, *arguments)
        return self.buckets
