"""Choose the reducer: all-reduce or reduce-scatter, at the end of the backward pass or during it.

A reducer decides when gradients are sent, and which replica receives the sums. Its transport decides how gradients are
encoded.
"""

from __future__ import annotations

from collections.abc import Sequence

from keras_shardopt.update.all_reduce import AllReduce, GradientSlicer, ReduceScatter
from keras_shardopt.update.context import StageContext
from keras_shardopt.update.options import CrossShardOptions
from keras_shardopt.update.overlapped import OVERLAPS, Overlapped
from keras_shardopt.update.step import Stage
from keras_shardopt.update.transport import Transport, transport_of

Reducer = AllReduce | Overlapped


def reducer_of(
    context: StageContext,
    options: CrossShardOptions,
    stages: Sequence[Stage],
    transport: Transport | None = None,
    shards: GradientSlicer | None = None,
) -> Reducer:
    """Return the object that reduces gradients, as the options require. With `shards`, each replica gets its slices."""
    if transport is None:
        transport = transport_of(options.compression, context)
        transport.check()
    if shards is None:
        at_the_end, can_overlap = AllReduce(context, options, transport), True
    else:
        at_the_end = ReduceScatter(context, options, transport, shards)
        can_overlap = shards.gradient_slices is not None and transport.early_in_slices
    allows_overlap = options.group_assignment is None and all(stage._allows_overlap for stage in stages)
    if OVERLAPS and options.speed.overlap == "auto" and allows_overlap and can_overlap:
        return Overlapped(at_the_end, context, options, shards)
    return at_the_end


def whole_reducer_of(reducer: Reducer) -> AllReduce:
    """Return the reducer that sends after the backward pass: `reducer`, or the one inside an `Overlapped`."""
    return reducer._at_the_end if isinstance(reducer, Overlapped) else reducer
