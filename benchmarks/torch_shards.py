"""Divided optimizer state on PyTorch ranks: `CrossShard(shard_state=True)` against `ZeroRedundancyOptimizer`.

    torchrun --nproc-per-node 2 benchmarks/torch_shards.py [--write]

Six layers `Dense(1024)`, 64 rows per rank, Adam. The custom training loop is the one of PyTorch's tutorial. Prints the
time of a step, and the largest number of bytes of optimizer state on a rank.
`--quick` runs in seconds with small sizes; its times are meaningless.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

os.environ["KERAS_BACKEND"] = "torch"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import keras
import timing
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch_training import RATE, Training, largest, parser

import keras_shardopt as ks


def bytes_held(tensors: list[torch.Tensor]) -> int:
    """Returns the largest number of bytes of optimizer state on a rank."""
    return int(*largest(sum(tensor.nbytes for tensor in tensors)))


def main() -> None:
    arguments = parser(__doc__).parse_args()
    with ks.data_parallel(auto_shard=False) as replicas:
        training = Training(arguments, replicas)
        state: dict[str, Callable[[], list[torch.Tensor]]] = {}

        def fit(name: str, **given: object) -> Callable[[], object]:
            optimizer = ks.CrossShard(keras.optimizers.Adam(RATE), **given)
            state[name] = lambda: [v.value for v in optimizer.variables]
            return training.fit(optimizer)

        def by_hand(name: str, **given: object) -> Callable[[], object]:
            def make(parameters: Iterator[torch.nn.Parameter]) -> ZeroRedundancyOptimizer:
                made = ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=RATE, **given)
                state[name] = lambda: [t for s in made.optim.state.values() for t in s.values() if torch.is_tensor(t)]
                return made

            return training.by_hand(make)

        plain, fused = "DDP + ZeroRedundancyOptimizer(Adam)", "DDP + ZeroRedundancyOptimizer(Adam, fused=True)"
        ours, whole = "fit, CrossShard(Adam, shard_state=True)", "fit, CrossShard(Adam)"
        runs = {
            plain: by_hand(plain),
            fused: by_hand(fused, fused=True),
            ours: fit(ours, shard_state=True),
            whole: fit(whole),
        }
        seconds = training.seconds(runs)
        held = {name: bytes_held(tensors()) for name, tensors in state.items()}
        lines = [f"- {name}: {size:,} bytes of state on the fullest rank" for name, size in held.items()]
        text = "\n".join([timing.table(seconds, [plain, fused], arguments.steps), "", *lines])
        training.report("Divided state", "torch_shards.py", text)
    replicas.close()


if __name__ == "__main__":
    main()
