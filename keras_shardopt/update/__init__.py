"""What the gradients of one update go through.

`CrossShard` sends a `Step` through a `Pipeline`: `collect` of all stages, `local` of all stages and a reduction on each
replica, `commit` of all stages, the inner optimizer. Known algorithms in these terms:

- DDP: no stage, `AllReduce`; with `Overlapped` while the backward pass runs.
- ZeRO stage 1: `ReduceScatter`, and an update of slices; stage 2 with `Overlapped`, which lets go of gradients.
- Horovod: `Accumulation`, then `AllReduce` with compression.
- Local SGD and DiLoCo: an `Extension` with a reducer that leaves each replica its own gradients.
- What sends gradients in other ways is a `Transport`, which the reducer is handed.
- TF1's `CrossShardOptimizer`: `AllReduce` with `reduction="sum"`, among the members of `Communicator.split(groups)`.

A new feature is a file with a `Stage`, and a row in `STAGES`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_shardopt.update.accumulation import Accumulation
from keras_shardopt.update.context import StageContext
from keras_shardopt.update.fused import FusedUpdate
from keras_shardopt.update.gradient_noise import GradientNoise
from keras_shardopt.update.nonfinite import SkipNonFinite
from keras_shardopt.update.options import CrossShardOptions
from keras_shardopt.update.plugs import Place
from keras_shardopt.update.plugs import stages as extended
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
"""The core's kinds of stages. `UserStage` are those of the argument `stages`."""


def kinds_of_stages() -> list[Any]:
    """Return all kinds of stages, extensions included, from the outside in."""
    return [kind for _, kind in sorted([*STAGES, *extended], key=lambda row: row[0])]


def watch_noise(optimizer: Any, add_variable: Callable[..., Any]) -> tuple[GradientNoise, Callable[[], None]]:
    """Lets a `CrossShard` that is built measure the noise of its gradients for some time.

    Args:
        optimizer: the `CrossShard`.
        add_variable: as in `Stage.build`.

    Returns:
        The stage that measures, which may be one that the optimizer has; and a function that ends it. A compiled step
        must be compiled anew, before and after.

    Raises:
        ValueError: if nothing can be compared.
    """
    own = [stage for stage in optimizer.stages if isinstance(stage, GradientNoise)]
    if own:
        return own[0], lambda: None
    pipeline, noise = optimizer.pipeline, GradientNoise()
    if pipeline.end_watch is not None:  # of a training that has ended with an error
        pipeline.end_watch()
    noise.check(optimizer)
    stage = UserStage(noise, StageContext(optimizer))
    stage.build(optimizer._trainable_variables, add_variable)
    before = pipeline.stages, pipeline.reducer
    kinds = kinds_of_stages()
    place = sum(isinstance(each, tuple(kinds[: kinds.index(UserStage) + 1])) for each in pipeline.stages)
    pipeline.change([*pipeline.stages[:place], stage, *pipeline.stages[place:]], whole_reducer_of(pipeline.reducer))
    optimizer.state_finder.needing.append('summaries=["gradient_noise_scale"]')

    def end() -> None:
        if pipeline.end_watch is end:
            pipeline.end_watch = None
            pipeline.change(*before)
            optimizer.state_finder.needing.remove('summaries=["gradient_noise_scale"]')

    pipeline.end_watch = end
    return noise, end


def stages_of(options: CrossShardOptions, context: StageContext) -> list[Stage]:
    """The stages that these options ask for, for this `CrossShard`, which is just being made."""
    for stage in options.stages:
        stage.check(context.optimizer)
    return [stage for kind in kinds_of_stages() for stage in kind.from_options(options, context)]
