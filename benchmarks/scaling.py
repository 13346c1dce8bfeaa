"""Growth of the cost of a step with parameters, variables and ranks, next to `DistributedDataParallel`, on PyTorch.

    torchrun --nproc-per-node 2 benchmarks/scaling.py [--write] [--parameters 1e4 1e6 1e8] [--variables 10 3000]

The model has weights and almost no computation, so a step is the cost of training: gradients, their reduction, Adam.
Calls with few and with many steps separate the cost per step from the cost per call: `fit` then compares data and
weights of the ranks, and creates callbacks, iterators and logs. Target: a step grows no faster than with DDP and
`torch.optim.Adam(fused=True)`. With more ranks than cores, both are slow. `--quick` runs in seconds with small sizes;
its times are meaningless.
"""

from __future__ import annotations

import functools
import os
import sys
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
"""The number of parameters while the number of variables varies."""


class Weights(keras.layers.Layer):
    """Divides the parameters among the variables. Multiplies each row with the sum of the variables' means."""

    def __init__(self, num_parameters: int, num_variables: int) -> None:
        super().__init__()
        self._sizes = (max(1, num_parameters // num_variables), num_variables)

    def build(self, shape: tuple) -> None:
        size, number = self._sizes
        self.arrays = [self.add_weight(shape=(size,), initializer="ones", name=f"w{i}") for i in range(number)]

    def call(self, x: torch.Tensor) -> torch.Tensor:
        return x * ops.sum(ops.stack([ops.mean(array) for array in self.arrays]))


def runs_of(num_parameters: int, num_variables: int, few: int, many: int) -> dict[str, Callable[[], object]]:
    """Measures short and long calls of `fit`, and of a custom training loop with DDP."""
    rank = dist.get_rank()  # each rank has different rows
    x = np.linspace(rank, rank + 1, many, dtype="float32")[:, None]

    def model() -> keras.Model:
        return keras.Sequential([keras.Input((1,)), Weights(num_parameters, num_variables)])

    ours = model()
    ours.compile(ks.CrossShard(keras.optimizers.Adam()), "mse")
    ddp = torch.nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.Adam(ddp.parameters(), fused=True)
    inputs = torch.from_numpy(x)

    def by_hand(num_steps: int) -> None:
        for row in inputs[:num_steps]:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(ddp(row[None]), row[None]).backward()
            optimizer.step()

    def fit(num_steps: int) -> object:
        rows = x[:num_steps]
        return ours.fit(rows, rows, batch_size=1, verbose=0, shuffle=False)

    return {
        f"{name}, {number}": functools.partial(run, steps)
        for number, steps in (("few", few), ("many", many))
        for name, run in (("DDP", by_hand), ("fit", fit))
    }


def row_of(seconds: dict[str, list[float]], few: int, many: int) -> tuple[str, float, float, float]:
    """Returns table cells, and the milliseconds of a step with DDP, a step of `fit`, and a call of `fit`."""
    steps: dict[str, list[float]] = {}
    calls: dict[str, list[float]] = {}
    for name in ("DDP", "fit"):
        pairs = list(zip(seconds[f"{name}, few"], seconds[f"{name}, many"]))
        steps[name] = [1000 * (long - short) / (many - few) for short, long in pairs]
        calls[name] = [1000 * short - few * step for (short, _), step in zip(pairs, steps[name])]
    ddp, fit = (float(np.median(steps[name])) for name in ("DDP", "fit"))
    start = float(np.median(calls["fit"]))
    middle, low, high = timing.ratios(steps, "fit", "DDP")
    cells = f"{ddp:.2f} | {fit:.2f} | {middle:.2f} ({low:.2f} to {high:.2f}) | {start:.1f}"
    return cells, ddp, fit, start


def main() -> None:
    parser = timing.parser(__doc__, rounds=7)
    parser.add_argument(
        "--parameters", type=float, nargs="*", default=[1e4, 1e5, 1e6, 1e7, 1e8], help="numbers of parameters"
    )
    parser.add_argument("--variables", type=int, nargs="*", default=[10, 100, 1000, 3000], help="numbers of variables")
    parser.add_argument("--few", type=int, default=2, help="steps of the short calls")
    parser.add_argument("--many", type=int, default=22, help="steps of the long calls")
    parser.add_argument("--gib", type=float, default=8.0, help="memory limit of all ranks together; skips larger sizes")
    given = parser.parse_args()
    if given.quick:
        given.parameters, given.variables, given.rounds, given.few, given.many = [1e3], [10, 20], 2, 1, 4
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with ks.data_parallel(auto_shard=False) as replicas:
        if not dist.is_initialized():  # for DDP; without it, a single rank needs no process group
            dist.init_process_group("gloo")
        ranks, notes, of_variables = replicas.num_replicas, [], []
        sizes = [(int(number), 10) for number in given.parameters]
        sizes += [(MANY, number) for number in given.variables if (MANY, number) not in sizes]
        heads = ["parameters", "variables", "a step, DDP", "a step, fit", "fit / DDP", "once in each fit"]
        lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        for parameters, variables in sizes:
            if 2 * 20 * parameters * ranks > given.gib * 2**30:  # weights, gradients, a bucket, two slots; two models
                notes.append(f"Left out: {parameters:,} parameters, which take more than {given.gib:g} GiB here.")
                continue
            runs = runs_of(parameters, variables, given.few, given.many)
            seconds = timing.in_turns(runs, given.rounds, dist.barrier)
            cells, *numbers = row_of(seconds, given.few, given.many)
            lines.append(f"| {parameters:,} | {variables} | {cells} |")
            if parameters == MANY:
                of_variables.append((variables, *numbers))
            del runs
        if len(of_variables) > 1:
            (fewest, *least), (most, *largest) = min(of_variables), max(of_variables)
            ddp, fit, start = ((b - a) / (most - fewest) for a, b in zip(least, largest))
            notes.append(
                f"Each further variable of {MANY:,} parameters: {ddp:.3f} ms of a step with DDP, {fit:.3f} ms of a "
                f"step of `fit`, {start:.3f} ms once in each `fit`."
            )
    shown = [argument for argument in sys.argv[1:] if argument not in ("--write", "--quick")]
    if replicas.is_chief:
        timing.report(
            f"How a step grows on {ranks} ranks of PyTorch",
            " ".join([f"torchrun --nproc-per-node {ranks} benchmarks/scaling.py", *shown]),
            "Milliseconds.\n\n" + "\n".join([*lines, *[f"\n{note}" for note in notes]]),
            {"Keras": keras.__version__, "PyTorch": f"{torch.__version__}, 1 thread on each rank, gloo"},
            given.write,
        )
    replicas.close()


if __name__ == "__main__":
    main()
