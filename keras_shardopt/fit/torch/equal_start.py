"""The equal start of an epoch on PyTorch: if values differ between ranks (processes), all ranks take those of rank 0.

Private names of Keras touched here (a test checks that each exists):
    `Optimizer._trainable_variables` - the variables of the optimizer's `build`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_shardopt.backends.models import optimizers_of
from keras_shardopt.backends.torch.communicator import TorchProcessGroup
from keras_shardopt.backends.torch.equal_start import broadcast_from_rank_0, model_and_seed_state
from keras_shardopt.backends.torch.placement import fingerprints, joint_fingerprint
from keras_shardopt.backends.torch.process_group import announce, gather_objects
from keras_shardopt.backends.torch.random_numbers import seed_per_rank
from keras_shardopt.fit.equal_start import warn_of_unequal_start
from keras_shardopt.fit.torch.step import TrainStep
from keras_shardopt.numerics import Tensor
from keras_shardopt.wrapping.chain import shared_variables


def start_equal(model: Any, cross_shards: Sequence[Any], ranks: TorchProcessGroup, step: TrainStep) -> None:
    """Make the model's values equal on all ranks. If some differ, all take rank 0's. Raise if models differ."""
    for cross_shard in cross_shards:
        cross_shard.peers.check(ranks)
        cross_shard.peers.check_parts()
    optimizers = optimizers_of(model)
    shared = [v for o in optimizers for v in shared_variables(o)]
    # Include weights that were frozen after the build, so all ranks have the same list. If only some ranks froze a
    # weight, the first reduction of gradients raises an error.
    built = [v for o in optimizers if o.built for v in o._trainable_variables]
    trained = list({id(v): v for v in [*built, *model.trainable_variables]}.values())
    others = model_and_seed_state([v.value for v in trained])
    differing = _differing([*trained, *shared], others)
    if differing and _stopped_alike(step):  # an earlier `fit` failed before it averaged values, so average now
        step.before_reading()
        step.settle()
        differing = _differing([*trained, *shared], others)
    elif not differing:
        step.started_equal()
    if differing:
        warn_of_unequal_start(differing)
        broadcast_from_rank_0(ranks, trained, shared)
    else:
        seed_per_rank(ranks.world, [])  # because the program may have set PyTorch's seed since the last `fit`
    for cross_shard in cross_shards:
        # Skip the comparison that a `CrossShard` makes in its first update. That comparison would come after the
        # first forward pass, and would replace each rank's moving statistics by rank 0's.
        cross_shard.peers.started = ranks


def _stopped_alike(step: TrainStep) -> bool:
    """Whether all ranks have made the same updates and have state to average. All ranks must call this together."""
    found = step.progress()
    everyones = gather_objects(found, "compares how far ranks are")
    return any(has_own for _, has_own in found) and all(each == everyones[0] for each in everyones)


def _differing(variables: Sequence[Any], others: Sequence[Tensor]) -> list[str]:
    """Return the paths of variables that differ between ranks, and a text if any tensors in `others` differ."""
    values = [*[v.value for v in variables], *others]
    shapes = zlib.crc32(repr([(tuple(value.shape), value.dtype) for value in values]).encode())
    messages = announce("begins `fit` of a prepared model", shapes, joint_fingerprint(values))
    if all(each == messages[0] for each in messages):
        return []
    mine = (len(variables), shapes, fingerprints(values))
    everyones = gather_objects(mine, "compares the values of a prepared model")
    if any(each[:2] != everyones[0][:2] for each in everyones):
        return ["other variables"]  # `broadcast_from_rank_0` raises and names them
    prints = np.stack([each[2] for each in everyones])
    differs = (prints != prints[0]).any(axis=0)
    is_other = differs[len(variables) :].any()
    names = [v.path for v, each in zip(variables, differs) if each]
    return [*names, *(["non-trainable state (statistics, seeds)"] if is_other else [])]
