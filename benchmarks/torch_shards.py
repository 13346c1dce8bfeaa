"""Divided optimizer state on ranks of PyTorch: `CrossShard(shard_state=True)` against `ZeroRedundancyOptimizer`.

    torchrun --nproc-per-node 2 benchmarks/torch_shards.py [--write]

Six layers `Dense(1024)`, 64 rows on each rank, Adam; the loop by hand is the one of PyTorch's own tutorial. Prints the
time of a step and the bytes of optimizer state that the fullest rank holds.
`--quick` runs in seconds, on sizes that say nothing.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

os.environ["KERAS_BACKEND"] = "torch"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import keras
import numpy as np
import timing
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch_fit import NUM_CLASSES, RATE, make_model

import keras_shardopt as ks


def bytes_held(tensors: list[torch.Tensor]) -> int:
    """By the fullest rank."""
    held = torch.tensor(float(sum(tensor.nbytes for tensor in tensors)))
    dist.all_reduce(held, dist.ReduceOp.MAX)
    return int(held)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the result to benchmarks/results/")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    width, num_layers, rows, rounds = (32, 2, 8, 2) if arguments.quick else (1024, 6, 64, arguments.rounds)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with ks.data_parallel() as replicas:
        random = np.random.default_rng(replicas.replica_id)
        x = random.normal(size=(arguments.steps * rows, width)).astype("float32")
        y = random.integers(0, NUM_CLASSES, len(x))
        inputs, targets = torch.from_numpy(x), torch.from_numpy(y)
        state: dict[str, Callable[[], list[torch.Tensor]]] = {}

        def fit(name: str, **given: object) -> Callable[[], object]:
            model = make_model(width, num_layers)
            optimizer = ks.CrossShard(keras.optimizers.Adam(RATE), **given)
            model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            state[name] = lambda: [v.value for v in optimizer.variables]
            return lambda: model.fit(x, y, batch_size=rows, verbose=0, shuffle=False)

        def by_hand(name: str, **given: object) -> Callable[[], object]:
            model = make_model(width, num_layers)
            ddp = torch.nn.parallel.DistributedDataParallel(model)
            optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=RATE, **given)
            loss = torch.nn.CrossEntropyLoss()
            state[name] = lambda: [t for s in optimizer.optim.state.values() for t in s.values() if torch.is_tensor(t)]

            def run() -> None:
                for start in range(0, len(inputs), rows):
                    outputs = ddp(inputs[start : start + rows])
                    optimizer.zero_grad()
                    loss(outputs, targets[start : start + rows]).backward()
                    optimizer.step()

            return run

        plain, fused = "DDP + ZeroRedundancyOptimizer(Adam)", "DDP + ZeroRedundancyOptimizer(Adam, fused=True)"
        ours = "fit, CrossShard(Adam, shard_state=True)"
        whole = "fit, CrossShard(Adam)"
        runs = {
            plain: by_hand(plain),
            fused: by_hand(fused, fused=True),
            ours: fit(ours, shard_state=True),
            whole: fit(whole),
        }
        seconds = timing.in_turns(runs, rounds, dist.barrier)
        held = {name: bytes_held(tensors()) for name, tensors in state.items()}
        if replicas.is_chief:
            number = replicas.num_replicas
            lines = [f"- {name}: {size:,} bytes of state on the fullest rank" for name, size in held.items()]
            timing.report(
                f"Divided state on {number} ranks of PyTorch, {num_layers} x Dense({width}), {rows} rows",
                f"torchrun --nproc-per-node {number} benchmarks/torch_shards.py",
                "\n".join([timing.table(seconds, [plain, fused], arguments.steps), "", *lines]),
                {"Keras": keras.__version__, "PyTorch": f"{torch.__version__}, 1 thread on each rank, gloo"},
                arguments.write,
            )
    replicas.close()


if __name__ == "__main__":
    main()
