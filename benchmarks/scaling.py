"""How the cost of a step grows with parameters, variables and ranks, next to `DistributedDataParallel`, on PyTorch.

    torchrun --nproc-per-node 2 benchmarks/scaling.py [--write] [--parameters 1e4 1e6 1e8] [--variables 10 3000]

The model is nothing but weights, so that a step is what training adds: gradients, their reduction, Adam. Target:
nothing grows faster than with DDP and `torch.optim.Adam(fused=True)`. More ranks than cores take turns, which is slow
for both. `--quick` runs in seconds, on sizes that say nothing.
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
from keras import ops

import keras_shardopt as ks

MANY = 10**6
"""The number of parameters while that of variables grows."""


class Weights(keras.layers.Layer):
    """So many parameters in so many variables; each row is multiplied with the sum of their means."""

    def __init__(self, num_parameters: int, num_variables: int) -> None:
        super().__init__()
        self._sizes = (max(1, num_parameters // num_variables), num_variables)

    def build(self, shape: tuple) -> None:
        size, number = self._sizes
        self.arrays = [self.add_weight(shape=(size,), initializer="ones", name=f"w{i}") for i in range(number)]

    def call(self, x: torch.Tensor) -> torch.Tensor:
        return x * ops.sum(ops.stack([ops.mean(array) for array in self.arrays]))


def runs_of(num_parameters: int, num_variables: int, num_steps: int) -> dict[str, Callable[[], object]]:
    """`num_steps` steps of `fit` and of a custom training loop with DDP."""
    x = np.linspace(0, 1, num_steps, dtype="float32")[:, None]

    def model() -> keras.Model:
        return keras.Sequential([keras.Input((1,)), Weights(num_parameters, num_variables)])

    ours = model()
    ours.compile(ks.CrossShard(keras.optimizers.Adam()), "mse")
    ddp = torch.nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.Adam(ddp.parameters(), fused=True)
    inputs = torch.from_numpy(x)

    def by_hand() -> None:
        for row in inputs:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(ddp(row[None]), row[None]).backward()
            optimizer.step()

    return {"DDP": by_hand, "fit": lambda: ours.fit(x, x, batch_size=1, verbose=0, shuffle=False)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, nargs="*", default=[1e4, 1e5, 1e6, 1e7, 1e8])
    parser.add_argument("--variables", type=int, nargs="*", default=[10, 100, 1000, 3000])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--gib", type=float, default=8.0, help="leave out what takes more memory on all ranks together")
    parser.add_argument("--write", action="store_true", help="write the result to benchmarks/results/")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    if given.quick:
        given.parameters, given.variables, given.rounds, given.steps = [1e3], [10, 20], 2, 2
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with ks.data_parallel(auto_shard=False) as replicas:
        if not dist.is_initialized():  # a single rank needs no group, except in DDP
            dist.init_process_group("gloo")
        ranks, left_out = replicas.num_replicas, []
        sizes = [(int(number), 10) for number in given.parameters]
        sizes += [(MANY, number) for number in given.variables if (MANY, number) not in sizes]
        lines = ["| parameters | variables | ms, DDP | ms, fit | ratio |", "|---|---|---|---|---|"]
        for parameters, variables in sizes:
            if 2 * 20 * parameters * ranks > given.gib * 2**30:  # weights, gradients, a bucket, two slots; two models
                left_out.append(f"Left out: {parameters:,} parameters, which take more than {given.gib:g} GiB here.")
                continue
            seconds = timing.in_turns(runs_of(parameters, variables, given.steps), given.rounds, dist.barrier)
            ddp, fit = (1000 * float(np.median(seconds[name])) / given.steps for name in ("DDP", "fit"))
            middle, low, high = timing.ratios(seconds, "fit", "DDP")
            cells = f"{parameters:,} | {variables} | {ddp:.2f} | {fit:.2f} | {middle:.2f} ({low:.2f} to {high:.2f})"
            lines.append(f"| {cells} |")
    if replicas.is_chief:
        timing.report(
            f"How a step grows on {ranks} ranks of PyTorch",
            f"torchrun --nproc-per-node {ranks} benchmarks/scaling.py",
            "\n".join([*lines, *[f"\n{line}" for line in left_out]]),
            {"Keras": keras.__version__, "PyTorch": f"{torch.__version__}, 1 thread on each rank, gloo"},
            given.write,
        )
    replicas.close()


if __name__ == "__main__":
    main()
