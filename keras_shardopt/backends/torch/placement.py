"""Where variables live on PyTorch: each rank has its own."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.backends.models import models_with
from keras_shardopt.backends.placement import Placement
from keras_shardopt.backends.torch.communicator import TorchProcessGroup, _tensor
from keras_shardopt.backends.torch.process_group import gather_objects, tell
from keras_shardopt.backends.torch.random_numbers import draw_apart
from keras_shardopt.backends.torch.runtime import runtime
from keras_shardopt.numerics import Tensor, Variable


class TorchPlacement(Placement):
    """`torch.distributed`: one process per replica, each with its own data."""

    state_sharding = "slices"

    def before_build(
        self, variables: Sequence[Variable], optimizer: Any, innermost: Sequence[Any], shards_state: bool
    ) -> None:
        if dist.is_available() and dist.is_initialized():
            replicas = runtime.communicator("")
            if isinstance(replicas, TorchProcessGroup):
                draw_apart(replicas, models_with(variables))

    def fingerprints(self, variables: Sequence[Variable]) -> np.ndarray:
        mine = fingerprints([_tensor(v).detach() for v in variables])
        is_open = dist.is_available() and dist.is_initialized()
        everyones = gather_objects(mine, "compares all variables") if is_open else [mine]
        counts = [len(row) for row in everyones]
        if len(set(counts)) > 1:
            raise ValueError(
                f"All replicas must have the same variables. Received: by rank, {counts} of them. "
                "Build the same model and optimizer on every rank."
            )
        return np.stack(everyones)

    def broadcast_state(
        self,
        variables: Sequence[Variable],
        optimizer_variables: Sequence[Variable],
        replicas: Communicator | None = None,
    ) -> float:
        ranks = runtime.communicator("") if replicas is None else replicas
        if not isinstance(ranks, TorchProcessGroup):
            return 1.0
        if replicas is None:
            tell("takes the weights of rank 0 in a callback (`SyncReplicas`, `BackupAndRestore`)")
        return ranks.broadcast_from_rank_0(variables, optimizer_variables)


placement = TorchPlacement()
_CHUNK = 2**16
"""How many words of a fingerprint are computed at a time, so that what is in between stays in the CPU's cache."""


def fingerprints(tensors: Sequence[Tensor]) -> np.ndarray:
    """A number for each tensor of this rank, as `Placement.fingerprints` says."""
    # The sum of all 32-bit words w_i times factors c_i, modulo 2**64. The factors are odd, so a change of w_i by
    # 2**k is never lost. They are 64 bits long although the words are not: two words that change places add
    # (c_i - c_j) * (w_j - w_i), which would be 0 for any two floats of opposite sign if 32 bits were all.
    with torch.no_grad():
        sums = [_fingerprint(tensor) for tensor in tensors]
        # Together, because each number that is read would wait for the device.
        devices = {total.device for total in sums}
        by_device = {device: torch.stack([s for s in sums if s.device == device]).cpu() for device in devices}
    rows = {device: iter(values.tolist()) for device, values in by_device.items()}
    return np.array([next(rows[total.device]) for total in sums], "int64").view("uint64")


def _fingerprint(tensor: Tensor) -> Tensor:
    words = _words(tensor)
    chunk = _CHUNK if words.device.type == "cpu" else 2**22
    factors = _odd_factors(chunk, words.device)
    sums = [part.to(torch.int64).mul_(factors[: part.numel()]).sum() for part in words.split(chunk)]
    if len(sums) == 1:
        return sums[0]
    # Each chunk by an odd factor of its own: the product of two odd factors is one.
    over_chunks = _odd_factors(1 << len(sums).bit_length(), words.device, seed=2)
    return torch.stack(sums).mul_(over_chunks[: len(sums)]).sum()


def _words(tensor: Tensor) -> Tensor:
    """The bits of a tensor in signed integers of at most 32 bits."""
    flat = tensor.contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    size = flat.element_size()
    return flat.view({1: torch.int8, 2: torch.int16}.get(size, torch.int32))


@functools.lru_cache(maxsize=32)
def _odd_factors(num_factors: int, device: Any, seed: int = 1) -> Tensor:
    factors = np.random.default_rng(seed).integers(0, 2**64, num_factors, dtype="uint64") | np.uint64(1)
    return torch.from_numpy(factors.view("int64")).to(device)
