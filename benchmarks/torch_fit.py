"""What a step of `fit` costs on two ranks, against a loop by hand with `DistributedDataParallel`, on PyTorch.

    torchrun --nproc-per-node 2 benchmarks/torch_fit.py [--write]

Six layers `Dense(1024)`, 64 rows on each rank, Adam. Targets: `fit` with `CrossShard(Adam())` within 0.9 times the loop
with `torch.optim.Adam`, and within 1.02 times the loop with `Adam(fused=True)`.
`--quick` runs in seconds, on sizes that say nothing.
"""

from __future__ import annotations

import argparse
import os

os.environ["KERAS_BACKEND"] = "torch"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import keras
import numpy as np
import timing
import torch
import torch.distributed as dist

import keras_shardopt as ks

RATE = 1e-3
NUM_CLASSES = 10


def make_model(width: int, num_layers: int) -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(width, activation="relu") for _ in range(num_layers)]
    return keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(NUM_CLASSES)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the result to benchmarks/results/")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--mib", type=float, nargs="*", default=[], help="further sizes of buckets to measure")
    arguments = parser.parse_args()
    width, num_layers, rows, rounds = (32, 2, 8, 2) if arguments.quick else (1024, 6, 64, arguments.rounds)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with ks.data_parallel() as replicas:
        random = np.random.default_rng(replicas.replica_id)
        x = random.normal(size=(arguments.steps * rows, width)).astype("float32")
        y = random.integers(0, NUM_CLASSES, len(x))
        inputs, targets = torch.from_numpy(x), torch.from_numpy(y)

        def fit(**given: object) -> object:
            model = make_model(width, num_layers)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(ks.CrossShard(keras.optimizers.Adam(RATE), **given), loss)
            return lambda: model.fit(x, y, batch_size=rows, verbose=0, shuffle=False)

        def by_hand(**given: object) -> object:
            model = make_model(width, num_layers)
            ddp = torch.nn.parallel.DistributedDataParallel(model)
            optimizer = torch.optim.Adam(ddp.parameters(), RATE, **given)
            loss = torch.nn.CrossEntropyLoss()

            def run() -> None:
                for start in range(0, len(inputs), rows):
                    outputs = ddp(inputs[start : start + rows])
                    optimizer.zero_grad()
                    loss(outputs, targets[start : start + rows]).backward()
                    optimizer.step()

            return run

        plain, fused = "DDP + torch.optim.Adam", "DDP + torch.optim.Adam(fused=True)"
        runs = {plain: by_hand(), fused: by_hand(fused=True)}
        runs["fit, CrossShard(Adam)"] = fit()
        runs["fit, CrossShard(Adam, overlap=False)"] = fit(overlap=False)
        runs["fit, CrossShard(Adam, fused=False)"] = fit(fused=False)
        runs["fit, CrossShard(Adam, overlap=False, fused=False)"] = fit(overlap=False, fused=False)
        for mib in arguments.mib:
            runs[f"fit, CrossShard(Adam, bucket_mib={mib:g})"] = fit(bucket_mib=mib)
        seconds = timing.in_turns(runs, rounds, dist.barrier)
        if replicas.is_chief:
            number = replicas.num_replicas
            timing.report(
                f"A step of fit on {number} ranks of PyTorch, {num_layers} x Dense({width}), {rows} rows",
                f"torchrun --nproc-per-node {number} benchmarks/torch_fit.py",
                timing.table(seconds, [plain, fused], arguments.steps),
                {"Keras": keras.__version__, "PyTorch": f"{torch.__version__}, 1 thread on each rank, gloo"},
                arguments.write,
            )
    replicas.close()


if __name__ == "__main__":
    main()
