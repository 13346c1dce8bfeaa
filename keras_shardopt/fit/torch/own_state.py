"""The state of a model that differs between ranks within an epoch, and its average.

Each rank computes moving statistics from its rows. They are averaged over ranks at the end of an epoch. With local SGD,
weights also differ between ranks until they are averaged. If an error ends `fit`, these differences remain.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import keras
import torch

from keras_shardopt.backends.models import buffers_of, ids_of_states
from keras_shardopt.backends.torch.communicator import TorchProcessGroup


def statistics_of(model: Any, apart_from: Collection[int] = ()) -> list[Any]:
    """Return moving statistics, frozen weights and module buffers, except variables whose `id` is in `apart_from`."""
    others = {*apart_from, *ids_of_states(model)}
    variables = [v for v in model.non_trainable_variables if id(v) not in others]
    return [v for v in variables if keras.backend.is_float_dtype(v.dtype)] + buffers_of(model)


@torch.no_grad()
def average(variables: Sequence[Any], ranks: TorchProcessGroup) -> None:
    """Replace floating-point values by their mean over ranks, and other values by rank 0's, as PyTorch's DDP does."""
    mine = [v.value for v in variables]
    roots = ranks.broadcast(mine)
    are_float = [tensor.is_floating_point() for tensor in mine]
    # Average differences from rank 0, because equal values (frozen weights, infinite masks) then keep all their bits.
    pairs = [(tensor, root) for tensor, root, is_float in zip(mine, roots, are_float) if is_float]
    differences = [torch.where(tensor == root, 0, tensor - root) for tensor, root in pairs]
    for (_, root), difference in zip(pairs, ranks.all_reduce(differences, "mean")):
        root.add_(difference)
    for tensor, root in zip(mine, roots):
        tensor.copy_(root)
