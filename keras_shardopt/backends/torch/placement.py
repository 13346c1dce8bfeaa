"""Variables on PyTorch: each rank has its own copy."""

from __future__ import annotations

import functools
import sys
import zlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import torch
import torch.distributed as dist

from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.backends.models import layers_of, models_with
from keras_shardopt.backends.placement import Placement
from keras_shardopt.backends.torch.bucket_bytes import bytes_of
from keras_shardopt.backends.torch.communicator import TorchProcessGroup, _bytes, buckets_by_dtype
from keras_shardopt.backends.torch.equal_start import broadcast_from_rank_0
from keras_shardopt.backends.torch.held import tensor_of
from keras_shardopt.backends.torch.process_group import announce, gather_objects
from keras_shardopt.backends.torch.random_numbers import seed_per_rank
from keras_shardopt.backends.torch.runtime import runtime
from keras_shardopt.numerics import Optimizer, Tensor, Variable


class TorchPlacement(Placement):
    """Places variables on PyTorch. Each replica is a process (rank) with its own copy of the variables."""

    state_sharding = "slices"

    def before_build(
        self, variables: Sequence[Variable], optimizer: Optimizer, innermost: Sequence[Any], shards_state: bool
    ) -> None:
        if dist.is_initialized():
            models = models_with(variables)
            _check_whole(variables, models)
            replicas = runtime.communicator("")
            if isinstance(replicas, TorchProcessGroup):
                seed_per_rank(replicas, models)

    def bytes_held(self, variables: Sequence[Variable]) -> int:
        return bytes_of([tensor_of(variable) for variable in variables])

    def fingerprints(self, variables: Sequence[Variable]) -> np.ndarray:
        mine = fingerprints([tensor_of(v).detach() for v in variables])
        gathered = gather_objects(mine, "compares all variables") if dist.is_initialized() else [mine]
        counts = [len(row) for row in gathered]
        if len(set(counts)) > 1:
            raise ValueError(
                f"All replicas must have the same variables. Received: {counts} variables, by rank. Build the same "
                "model and optimizer on every rank."
            )
        return np.stack(gathered)

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
            announce("takes the weights of rank 0 in a callback (`SyncReplicas`, `BackupAndRestore`)")
        return broadcast_from_rank_0(ranks, variables, optimizer_variables)


placement = TorchPlacement()


def _check_whole(variables: Sequence[Variable], models: Sequence[Any]) -> None:
    kept = "`CrossShard` averages the gradients of whole weights, so every rank must hold whole weights."
    if isinstance(keras.distribution.distribution(), keras.distribution.ModelParallel):
        raise ValueError(
            f"{kept} Received: {variables[0].path!r} under a `ModelParallel`, with gradients reduced by Keras. Train "
            "with the inner optimizer, without `CrossShard`, or use `data_parallel()` instead."
        )
    # Do not import these modules, because that is slow. If the program has not imported them, no weight is sharded.
    kinds = [("fsdp", "FSDPModule"), ("tensor", "DTensor")]
    module_kind, tensor_kind = (getattr(sys.modules.get(f"torch.distributed.{file}"), name, ()) for file, name in kinds)
    divided = [v for v in variables if isinstance(tensor_of(v), tensor_kind)]
    layers = [layer for model in models for layer in layers_of(model)]
    if divided or any(isinstance(module, module_kind) for layer in layers for module in layer.modules()):
        raise ValueError(
            f"{kept} Received: {(divided or variables)[0].path!r} under `fully_shard`. FSDP replaces the weights, but "
            "Keras layers still compute with the old weights, so nothing is trained. Remove `fully_shard`; use "
            "`CrossShard(..., shard_state=True)` to shard the optimizer state."
        )


_CHUNK = 2**16
"""The number of 32-bit words that are hashed at a time, so they stay in the CPU's cache."""

_CHUNKS_ON_DEVICE = 64
"""The number of chunks of `_CHUNK` words that an accelerator hashes at a time."""

_JOINED_BYTES = 2**20
"""The size up to which small tensors are concatenated before hashing, because hashing each tensor takes longer."""


@torch.no_grad()
def joint_fingerprint(tensors: Sequence[Tensor]) -> int:
    """Return one 32-bit hash of all these tensors of this rank, in order."""
    joined = [
        torch.cat([tensors[i].reshape(-1) for i in indices]) if len(indices) > 1 else tensors[indices[0]]
        for indices in buckets_by_dtype(tensors, range(len(tensors)), _JOINED_BYTES)
    ]
    return zlib.crc32(fingerprints(joined).tobytes(), len(tensors))


def fingerprints(tensors: Sequence[Tensor]) -> np.ndarray:
    """Return a hash of each tensor of this rank, as in `Placement.fingerprints`."""
    # A hash is the sum of all 32-bit words w_i times factors c_i, modulo 2**64. The factors are odd, so changing w_i by
    # 2**k always changes the sum. Factors have 64 bits, because swapping two words adds (c_i - c_j) * (w_j - w_i) to
    # the sum. Modulo 2**32, that would be 0 for any two floats that differ only in sign.
    found = [_on_host(tensor) if tensor.device.type == "cpu" else _on_device(tensor) for tensor in tensors]
    # Read all sums of a device at once, because each read waits for the device.
    devices = {total.device for total in found if isinstance(total, torch.Tensor)}
    by_device = {
        device: iter(torch.stack([t for t in found if isinstance(t, torch.Tensor) and t.device == device]).tolist())
        for device in devices
    }
    totals = [next(by_device[total.device]) if isinstance(total, torch.Tensor) else total for total in found]
    return np.array([total % 2**64 for total in totals], "uint64")


def _on_host(tensor: Tensor) -> int:
    # The sum of all 32-bit words, each times its own factor. Products of 64-bit integers handle two words at a time,
    # without temporary arrays: one pass (`first`) begins at word 0, and another one (`second`) at word 1.
    first, second, over_chunks = _factors()
    data = _bytes(tensor).numpy()
    total = 0
    for number, start in enumerate(range(0, len(data), 4 * _CHUNK)):
        part = data[start : start + 4 * _CHUNK]
        if len(part) % 8:
            part = np.concatenate([part, np.zeros(-len(part) % 8, "uint8")])
        pairs, across = part.view("int64"), part[4:-4].view("int64")
        sums = int(pairs.dot(first[: len(pairs)])) + int(across.dot(second[: len(across)]))
        last = int(part[-4:].view("uint32")[0]) * int(second[len(across)])
        total += (sums + last) * int(over_chunks[number % _CHUNK])
    return total


def _on_device(tensor: Tensor) -> Tensor:
    first, second, over_chunks = (torch.from_numpy(factors).to(tensor.device) for factors in _factors())
    before = torch.cat([torch.zeros_like(second[:1]), second[:-1]])
    # In `_on_host`, words 2i and 2i + 1 have the factors a_i + 2**32 * b_{i-1} and b_i + 2**32 * a_i.
    factors = torch.stack([first + (before << 32), second + (first << 32)], 1).view(-1)
    data = _bytes(tensor)
    words = torch.nn.functional.pad(data, (0, -len(data) % (4 * _CHUNK))).view(torch.int32).view(-1, _CHUNK)
    sums = [((part.to(torch.int64) & 0xFFFFFFFF) * factors).sum(1) for part in words.split(_CHUNKS_ON_DEVICE)]
    places = torch.arange(len(words), device=tensor.device) % _CHUNK
    return (torch.cat(sums) * over_chunks[places]).sum()


@functools.lru_cache(maxsize=1)
def _factors() -> list[np.ndarray]:
    """Return the random odd factors of the hash: for the first words of pairs, the second words, and chunks."""
    random = np.random.default_rng(1)
    return [
        (random.integers(0, 2**64, size, dtype="uint64") | np.uint64(1)).view("int64")
        for size in (_CHUNK // 2, _CHUNK // 2, _CHUNK)
    ]
