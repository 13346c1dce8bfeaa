"""Process the gradients of one update: stages, the reduction over replicas, and the inner optimizer.

`CrossShard` sends a `Step`, the gradients of one update, through a `Pipeline` of stages (`Stage`: one feature). It runs
`collect` of all stages, then `local` of all stages and the reduction over replicas, `commit` of all stages, and the
inner optimizer. Known algorithms in these terms:

- DDP: no stage, `AllReduce`; with `Overlapped`, during the backward pass.
- ZeRO stage 1: `ReduceScatter` and an update of slices; stage 2: also `Overlapped`, freeing gradients once sent.
- Horovod: `Accumulation`, then `AllReduce` with compression.
- Local SGD and DiLoCo: an `ExtensionStage` with a reducer that leaves each replica's gradients unreduced.
- Other ways of sending gradients, such as 8-bit codes: a `Transport`, passed to the reducer.
- TF1's `CrossShardOptimizer`: `AllReduce` with `reduction="sum"`, among the members of `Communicator.split(groups)`.

The variables of stages and transports are of these kinds:

- `Stage._replica_state`: has a different value on each replica, such as the sums of accumulated gradients.
- `Transport.carried`: holds values that a replica passes to its next reduction, such as the errors of a lossy code.
  Inside a step, `Step.own` holds this replica's values.
- `ExtensionStage.replica_state`: optimizer state that each replica updates separately, as in local SGD.
- `ExtensionStage.saved_variables`: is in optimizer files. Files omit the variables of other stages.

A new feature is a file with a `Stage`, and a row in `STAGES`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_shardopt.update.accumulation import Accumulation
from keras_shardopt.update.context import CrossShardProtocol, StageContext
from keras_shardopt.update.fused import FusedUpdate
from keras_shardopt.update.nonfinite import SkipNonFinite
from keras_shardopt.update.options import CrossShardOptions
from keras_shardopt.update.plugs import Place
from keras_shardopt.update.reducers import whole_reducer_of
from keras_shardopt.update.replica_transform import ReplicaClip, ReplicaTransform
from keras_shardopt.update.step import Stage
from keras_shardopt.update.user_stage import UserStage

STAGES: list[tuple[Place, Any]] = [
    (Place.WINDOW, Accumulation),
    (Place.LOCAL, ReplicaTransform),
    (Place.LOCAL, SkipNonFinite),
    (Place.LOCAL, UserStage),
    (Place.BEFORE_SENDING, ReplicaClip),
    (Place.UPDATE, FusedUpdate),
]
"""The built-in stages (steps of an update), in order. `UserStage` wraps the stages of the argument `stages`."""


def _rows(options: CrossShardOptions) -> list[Any]:
    """Return the built-in stage classes and the user's extensions, in the order in which they process an update."""
    rows = [*STAGES, *((extension.place, extension) for extension in options.extensions)]
    return [maker for _, maker in sorted(rows, key=lambda row: row[0])]


def watch(
    optimizer: CrossShardProtocol, stage: Stage, needed_for: str, add_variable: Callable[..., Any]
) -> tuple[Any, Callable[[], None]]:
    """Insert a temporary stage into a built `CrossShard`, unless it already has a stage of this class.

    Args:
        optimizer: the `CrossShard`.
        stage: a stage that `CrossShard(stages=...)` accepts.
        needed_for: the argument that needs the stage, as `name=value`, for errors.
        add_variable: as in `Stage.build`.

    Returns:
        The stage in use, and a function that removes the inserted stage. Recompile compiled steps after each change.

    Raises:
        ValueError: if the optimizer's options do not support the stage.
    """
    own = [each for each in optimizer._options.stages if type(each) is type(stage)]
    if own:
        return own[0], lambda: None
    pipeline = optimizer.pipeline
    if pipeline.end_watch is not None:  # an earlier training failed before it removed its temporary stage
        pipeline.end_watch()
    stage.check(optimizer)
    inserted = UserStage(stage, StageContext(optimizer))
    inserted.build(optimizer._trainable_variables, add_variable)
    before = pipeline.stages, pipeline.reducer
    inner = tuple(kind for place, kind in STAGES if place > Place.LOCAL)
    place = next((i for i, each in enumerate(pipeline.stages) if isinstance(each, inner)), len(pipeline.stages))
    pipeline.change([*pipeline.stages[:place], inserted, *pipeline.stages[place:]], whole_reducer_of(pipeline.reducer))
    optimizer.state_finder.needing.append(needed_for)

    def end() -> None:
        if pipeline.end_watch is end:
            pipeline.end_watch = None
            pipeline.change(*before)
            optimizer.state_finder.needing.remove(needed_for)

    pipeline.end_watch = end
    return stage, end


def stages_of(options: CrossShardOptions, context: StageContext) -> list[Stage]:
    """Return the stages (steps of an update) that `options` require, for a `CrossShard` under construction."""
    for stage in options.stages:
        stage.check(context.optimizer)
    return [stage for maker in _rows(options) for stage in maker.from_options(options, context)]
