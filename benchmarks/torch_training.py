"""Shared by the benchmarks of training on PyTorch ranks: the model, its data, `fit`, and a custom loop with DDP.

The scripts set the backend and the number of threads before they import Keras and PyTorch.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import timing
import torch
import torch.distributed as dist

RATE = 1e-3
NUM_CLASSES = 10


def parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the common arguments."""
    made = timing.parser(description, rounds=11)
    made.add_argument("--steps", type=int, default=12, help="steps per measurement")
    return made


def largest(*values: float) -> list[float]:
    """Returns the largest of each value on all ranks."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    found: list[float] = tensor.tolist()
    return found


def train(module: torch.nn.Module, optimizer: torch.optim.Optimizer, x: np.ndarray, y: np.ndarray, rows: int) -> None:
    """Runs a custom training loop, with `rows` rows in each step."""
    inputs, targets = torch.from_numpy(x), torch.from_numpy(y)
    loss = torch.nn.CrossEntropyLoss()
    for start in range(0, len(inputs), rows):
        outputs = module(inputs[start : start + rows])
        optimizer.zero_grad()
        loss(outputs, targets[start : start + rows]).backward()
        optimizer.step()


class Training:
    """Runs of `arguments.steps` steps on this rank's rows, with the learning rate `RATE` for Adam."""

    def __init__(self, arguments: argparse.Namespace, replicas: Any) -> None:
        self._arguments = arguments
        self._replicas = replicas
        sizes = (32, 2, 8, 2) if arguments.quick else (1024, 6, 64, arguments.rounds)
        self._width, self._num_layers, self._rows, self._num_rounds = sizes
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        random = np.random.default_rng(replicas.replica_id)
        self._x = random.normal(size=(arguments.steps * self._rows, self._width)).astype("float32")
        self._y = random.integers(0, NUM_CLASSES, len(self._x))

    def _model(self) -> keras.Model:
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(self._width, activation="relu") for _ in range(self._num_layers)]
        return keras.Sequential([keras.Input((self._width,)), *layers, keras.layers.Dense(NUM_CLASSES)])

    def fit(self, optimizer: keras.optimizers.Optimizer) -> Callable[[], object]:
        """Returns a function that calls `fit` of a new model with a Keras optimizer."""
        model = self._model()
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return lambda: model.fit(self._x, self._y, batch_size=self._rows, verbose=0, shuffle=False)

    def by_hand(
        self, make_optimizer: Callable[[Iterator[torch.nn.Parameter]], torch.optim.Optimizer]
    ) -> Callable[[], None]:
        """Returns a custom training loop over a new model in DDP, with a PyTorch optimizer for its parameters."""
        ddp = torch.nn.parallel.DistributedDataParallel(self._model())
        optimizer = make_optimizer(ddp.parameters())
        return lambda: train(ddp, optimizer, self._x, self._y, self._rows)

    def seconds(self, runs: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
        """Returns the seconds of each run in each round."""
        return timing.in_turns(runs, self._num_rounds, dist.barrier)

    def report(self, title: str, script: str, text: str) -> None:
        """Prints the result on rank 0, and writes it with `--write`."""
        if not self._replicas.is_chief:
            return
        number = self._replicas.num_replicas
        timing.report(
            f"{title} on {number} ranks of PyTorch, {self._num_layers} x Dense({self._width}), {self._rows} rows",
            f"torchrun --nproc-per-node {number} benchmarks/{script}",
            text,
            {"Keras": keras.__version__, "PyTorch": f"{torch.__version__}, 1 thread on each rank, gloo"},
            self._arguments.write,
        )
