"""Sharded checkpoints on PyTorch ranks: how long a save stops training, and the bytes and memory that it needs.

    torchrun --nproc-per-node 2 benchmarks/checkpoints.py [--megabytes 100] [--write]

Layers `Dense(1024)`, 64 rows per rank, `CrossShard(Adam, shard_state=True)`. A checkpoint holds the weights and two
slots. Each number is the largest of all ranks. A save copies to host memory in the step that begins it. Threads write
the files during the next steps, and share the cores with them.
`--quick` runs in seconds with small sizes; its times are meaningless.
"""

from __future__ import annotations

import os
import pathlib
import resource
import shutil
import statistics
import tempfile
import time
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import keras
import numpy as np
import timing
import torch
import torch.distributed as dist
from torch_training import RATE, largest, parser

import keras_shardopt as ks

ROWS = 64


class Steps(keras.callbacks.Callback):
    """Measures the seconds from the beginning of each step to the beginning of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.begun.append(time.perf_counter())

    def seconds(self) -> list[float]:
        return [end - begin for begin, end in zip(self.begun, self.begun[1:])]


def peak() -> float:
    """Returns the peak memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def timed(call: Any, *arguments: Any) -> float:
    dist.barrier()
    begin = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - begin


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--megabytes", type=float, default=100.0, help="size of a checkpoint (default: 100)")
    arguments = options.parse_args()
    width = 32 if arguments.quick else 1024
    number = 2 if arguments.quick else max(1, round(arguments.megabytes * 1e6 / (3 * 4 * width * (width + 1))))
    every, num_saves = arguments.steps, 3 if arguments.quick else arguments.rounds
    with ks.data_parallel(auto_shard=False) as replicas:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(width, activation="relu") for _ in range(number)]
        model = keras.Sequential([keras.Input((width,)), *layers])
        model.compile(ks.CrossShard(keras.optimizers.Adam(RATE), shard_state=True), "mse")
        x = np.random.default_rng(replicas.replica_id).normal(size=(ROWS * every, width)).astype("float32")

        def fitted(num_steps: int, *callbacks: keras.callbacks.Callback) -> list[float]:
            steps, rows = Steps(), np.resize(x, (ROWS * num_steps, width))
            model.fit(rows, rows, batch_size=ROWS, verbose=0, shuffle=False, callbacks=[steps, *callbacks])
            return steps.seconds()

        found = [tempfile.mkdtemp() if replicas.is_chief else None]
        dist.broadcast_object_list(found)
        folder = pathlib.Path(str(found[0]))
        fitted(every)
        plain = statistics.median(fitted(2 * every))
        memory = [peak()]
        seconds = fitted(num_saves * every + 1, ks.callbacks.ShardedCheckpoint(folder / "sharded", every, keep=1))
        first, *later = seconds[every - 1 :: every]
        memory.append(peak())
        save = timed(ks.save_model, model, folder / "whole.keras")
        memory.append(peak())
        load = timed(ks.load_sharded, model, folder / "sharded")
        rows = {
            "a step": plain,
            "the step that begins the first save": first,
            "a step that begins a later save, median": statistics.median(later),
            "a step that begins a later save, slowest": max(later),
            "longer training per save": max(0.0, sum(seconds) - plain * len(seconds)) / num_saves,
            "`save_model`, one file": save,
            "`load_sharded`": load,
        }
        sizes = sorted(file.stat().st_size for file in (folder / "sharded").rglob("*.safetensors"))
        values = largest(*rows.values(), *memory)  # waits for all ranks, so rank 0 may remove the files
        times, megabytes = values[: len(rows)], values[len(rows) :]
        lines = [f"| {name} | {1000 * each:.0f} | {each / times[0]:.2f} |" for name, each in zip(rows, times)]
        share = sizes[-1] * len(sizes) / sum(sizes)
        training, saving, whole = (f"{each:.0f} MB" for each in megabytes)
        notes = [
            f"- The largest file of a process: {sizes[-1]:,} bytes, {share:.3f} of an equal share.",
            f"- Peak memory of a process: {training} in training, {saving} with saves, {whole} after `save_model`.",
        ]
        text = "\n".join(["|  | ms | steps |", "|---|---|---|", *lines, "", *notes])
        if replicas.is_chief:
            timing.report(
                f"Sharded checkpoints of {sum(sizes) / 1e6:.0f} MB on {replicas.num_replicas} ranks of PyTorch",
                f"torchrun --nproc-per-node {replicas.num_replicas} benchmarks/checkpoints.py "
                f"--megabytes {arguments.megabytes:g}",
                text,
                {"Keras": keras.__version__, "PyTorch": f"{torch.__version__}, 1 thread on each rank, gloo"},
                arguments.write,
            )
            shutil.rmtree(folder)
    replicas.close()


if __name__ == "__main__":
    main()
