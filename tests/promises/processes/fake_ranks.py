"""Rank 0 of N ranks that do not exist: counts what it would send in a `fit`, in each mode.

python fake_ranks.py RESULT.json N [N ...]
"""

import collections
import json
import sys

import keras
import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import keras_shardopt as ks

NUM_STEPS = 4
MODES = {
    "plain": {},
    "no overlap": {"overlap": False},
    "shard_state": {"shard_state": True},
    "accumulation": {"gradient_accumulation_steps": 2},
    "accumulation, shard_state": {"gradient_accumulation_steps": 2, "shard_state": True},
    "on_nonfinite": {"on_nonfinite": "skip"},
    "bfloat16": {"compression": "bfloat16"},
    "Int8": {"compression": ks.compression.Int8()},
    "replica_clipnorm": {"replica_clipnorm": 1.0},
    "sync_every": {"sync_every": 2},
}


class Counting(TorchDispatchMode):
    """Counts the operations of process groups, and the bytes of their largest argument."""

    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()
        self.bytes = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            name = function._schema.name.split("::")[1].strip("_")
            self.calls[name] += 1
            self.bytes[name] += max(map(size, args[:2]))
        return function(*args, **(kwargs or {}))


def size(value):
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(size, value)) if isinstance(value, (list, tuple)) else 0


def counted(num_ranks, options):
    keras.utils.set_random_seed(0)
    with ks.data_parallel():
        model = keras.Sequential([keras.Input((64,)), *(keras.layers.Dense(64) for _ in range(3))])
        model.compile(ks.CrossShard(keras.optimizers.Adam(), **options), "mse")
    x = np.ones((2 * num_ranks * NUM_STEPS, 64), "float32")
    model.fit(x, x, batch_size=2 * num_ranks, verbose=0)
    with Counting() as counting:
        model.fit(x, x, batch_size=2 * num_ranks, verbose=0)
    weights = sum(size(v.value.data) for v in model.trainable_variables)
    return {"calls": dict(counting.calls), "bytes": dict(counting.bytes), "weights": weights}


def main(result, *numbers):
    found = {}
    for num_ranks in map(int, numbers):
        dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
        found[num_ranks] = {name: counted(num_ranks, options) for name, options in MODES.items()}
        dist.destroy_process_group()
    with open(result, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
