"""Local SGD: gradients are not averaged, so each replica updates with its own gradients."""

from __future__ import annotations

from typing import Any

from keras import ops

from keras_shardopt.backends.communicator import Communicator, GradientState
from keras_shardopt.backends.traffic import recording
from keras_shardopt.numerics import UNKNOWN, filled_like, map_values
from keras_shardopt.update.all_reduce import AllReduce
from keras_shardopt.update.context import StageContext
from keras_shardopt.update.nonfinite import check_reduced
from keras_shardopt.update.options import CrossShardOptions
from keras_shardopt.update.row_weights import zero_without_rows
from keras_shardopt.update.step import Step
from keras_shardopt.update.transport import Transport


class OwnGradients(AllReduce):
    """Returns each replica's own gradients. In the warm-up of local SGD, returns the mean over replicas."""

    def __init__(self, context: StageContext, options: CrossShardOptions, stage: Any) -> None:
        transport = stage.sync.transport
        # Send gradients of the warm-up without the codec, because its stored errors belong to weights, not gradients.
        super().__init__(context, options, Transport() if transport.narrow is None else transport)
        self._stage = stage

    def reduce(self, step: Step, comm: Communicator) -> Step:
        """Return the gradients of this replica's mean loss, multiplied by its share of the rows."""
        if self._stage.is_warmup or not step.is_local:
            with recording() as self._stage.sent_in_warmup:
                return super().reduce(step, comm)
        step = zero_without_rows(step)
        grads = list(step.grads)
        if step.gradient_state is GradientState.LOCAL_PRESCALED:
            number = comm.num_replicas
            grads = [None if g is None else map_values(lambda value: ops.multiply(value, number), g) for g in grads]
        own = step.found_inf
        step = step.replace(grads=grads)
        if not self._checks_finite:
            return step
        found = check_reduced(grads, step.variables, self._context.positions(step.variables))
        if own is not None and not isinstance(own, tuple):  # found before clipping, which spreads NaN to all gradients
            found = ops.where(own > 0, ops.stack([own, filled_like(own, UNKNOWN), own - 1]), found)
        who = ops.where(found[0] > 0, ops.cast(comm.replica_id, "int32"), found[1])
        return step.replace(found_inf=ops.stack([found[0], who, found[2]]))

    def finish(self, comm: Communicator) -> None:
        """When training ends, assign the mean over replicas to the weights."""
        self._stage.before_reading()
