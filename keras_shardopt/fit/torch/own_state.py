"""What each rank of a prepared model has of its own for some time.

Moving statistics are of a rank's rows until they are averaged, at the end of an epoch; and where ranks train apart, so
are weights until the end of a round. A `fit` that an error has ended leaves them so.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import keras
import torch

from keras_shardopt.backends.models import buffers_of, ids_of_states
from keras_shardopt.backends.torch.communicator import TorchProcessGroup


def statistics_of(model: Any, apart_from: Collection[int] = ()) -> list[Any]:
    """Moving statistics, frozen weights and buffers of modules, without variables of some `id`."""
    others = {*apart_from, *ids_of_states(model)}
    variables = [v for v in model.non_trainable_variables if id(v) not in others]
    return [v for v in variables if keras.backend.is_float_dtype(v.dtype)] + buffers_of(model)


@torch.no_grad()
def average(variables: Sequence[Any], ranks: TorchProcessGroup) -> None:
    """Makes them the mean of all ranks', and rank 0's where they are no floating-point numbers, as DDP does."""
    mine = [v.value for v in variables]
    roots = ranks.broadcast(mine)
    are_float = [tensor.is_floating_point() for tensor in mine]
    # By the mean of differences: what is equal, as frozen weights and masks of infinities, keeps every bit.
    pairs = [(tensor, root) for tensor, root, is_float in zip(mine, roots, are_float) if is_float]
    differences = [torch.where(tensor == root, 0, tensor - root) for tensor, root in pairs]
    for (_, root), difference in zip(pairs, ranks.all_reduce(differences, "mean")):
        root.add_(difference)
    for tensor, root in zip(mine, roots):
        tensor.copy_(root)
