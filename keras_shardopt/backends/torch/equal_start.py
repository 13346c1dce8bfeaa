"""Copies weights and state from the first rank, so all ranks start equal.

Private names of Keras touched here (a test checks that each exists):
    `keras.src.backend.common.global_state` - holds "global_seed_generator", for layers without a seed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from keras.src.backend.common import global_state

from keras_shardopt.backends.models import buffers_of, ids_of_states, living_models
from keras_shardopt.backends.torch.communicator import TorchProcessGroup, _bytes
from keras_shardopt.backends.torch.held import tensor_of
from keras_shardopt.backends.torch.process_group import gather_objects, naming_missing_ranks
from keras_shardopt.backends.torch.random_numbers import seed_per_rank
from keras_shardopt.numerics import Tensor, Variable


@torch.compiler.disable
def broadcast_from_rank_0(
    ranks: TorchProcessGroup, variables: Sequence[Variable], optimizer_variables: Sequence[Variable]
) -> float:
    """Copy weights and state from the group's first rank. Return the factor for this rank's first gradients."""
    weights = [tensor_of(v) for v in variables]
    state = [tensor_of(v) for v in optimizer_variables]
    others = model_and_seed_state(weights)
    mine = (_signature(weights), _signature(state), _signature(others))
    theirs = gather_objects(mine, "takes the weights of rank 0")
    for what, position in (("trainable variables", 0), ("optimizer variables", 1)):
        for rank, signature in enumerate(theirs):
            if signature[position] != theirs[0][position]:
                raise ValueError(
                    f"All replicas must have the same {what}. Received on rank 0: {theirs[0][position]}, "
                    f"on rank {rank}: {signature[position]}. Build the same model and optimizer on every rank."
                )
    equal = _take_from_root(ranks, weights)
    _take_from_root(ranks, state)
    # Copy non-trainable state only if shapes and dtypes are equal, because ranks can have found different models.
    if all(signature[2] == theirs[0][2] for signature in theirs):
        _take_from_root(ranks, others)
    seed_per_rank(ranks.world, [])  # repeated, because the program can have seeded PyTorch after the first call
    num_equal = torch.tensor(float(equal), device=weights[0].device)
    with naming_missing_ranks():
        dist.all_reduce(num_equal, group=ranks._process_group)
    return ranks.num_replicas / float(num_equal) if equal else 0.0


@torch.no_grad()
def _take_from_root(ranks: TorchProcessGroup, tensors: Sequence[Tensor]) -> bool:
    """Assign the first rank's values to `tensors`. Return whether all values were bitwise equal before."""
    equal = True
    for mine, roots in zip(tensors, ranks.broadcast(tensors)):
        if not torch.equal(_bytes(mine), _bytes(roots)):
            equal = False
            mine.copy_(roots)
    return equal


def model_and_seed_state(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return the non-trainable state of the model with these weights, and Keras' global seed."""
    seed = global_state.get_global_attribute("global_seed_generator")
    state = [] if seed is None else [tensor_of(seed.state)]
    trained = {id(w) for w in weights}
    models = [
        model
        for model in living_models
        if getattr(model, "built", False) and any(id(tensor_of(v)) in trained for v in model.trainable_variables)
    ]
    if models:
        outermost = max(models, key=lambda model: len(model.variables))
        own = ids_of_states(outermost)
        others = [*[v for v in outermost.variables if id(v) not in own], *buffers_of(outermost)]
        state += [tensor_of(v) for v in others if id(tensor_of(v)) not in trained]
    return state


def _signature(tensors: Sequence[Tensor]) -> list[tuple[tuple[int, ...], str]]:
    return [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]
