"""Cost of summaries: steps of `fit` and of `optimize_loss` without them, and with them at `every=100`.

    KERAS_BACKEND=jax python benchmarks/summaries.py [--quick]

"Off" is measured twice, alternating with "on", to show the noise. Ratios are medians over rounds. A round of
`optimize_loss` is a hundred steps of each kind; a round of `fit` is one training of each kind.
"""

from __future__ import annotations

import argparse
import importlib
import os
import tempfile
import time
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
import timing
from keras import ops

import keras_shardopt as ks

EVERY = 100
now = time.perf_counter
BATCH_SIZE = 64
Kinds = dict[str, "list[str] | bool | None"]
EVERYTHING = ["learning_rate", "gradient_norm", "global_gradient_norm", "variable_norm", "loss_scale"]


def make_model(width: int) -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(width, activation="relu") for _ in range(3)]
    return keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(10)])


class Clock(keras.callbacks.Callback):
    """Measures seconds per step, without the first epoch (compilation)."""

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self.start = now()
        self.seconds = [] if epoch == 0 else self.seconds

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self.seconds.append((now() - self.start) / self.params["steps"])


def seconds_of_fit(width: int, num_steps: int, epochs: int, summaries: list[str] | bool | None) -> float:
    model = make_model(width)
    model.compile(ks.CrossShard(ks.GradientClipping(keras.optimizers.Adam(), 1.0)), "mse")
    x, y = np.ones((num_steps * BATCH_SIZE, 64), "float32"), np.ones((num_steps * BATCH_SIZE, 10), "float32")
    clock = Clock()
    callbacks: list[keras.callbacks.Callback] = [clock]
    with tempfile.TemporaryDirectory() as folder:
        if summaries is not False:
            callbacks.append(ks.callbacks.TrainingSummaries(folder, summaries, every=EVERY))
        model.fit(x, y, batch_size=BATCH_SIZE, epochs=epochs + 1, verbose=0, callbacks=callbacks)
    return min(clock.seconds[1:])


def rounds_of_fit(width: int, num_rounds: int, num_steps: int, kinds: Kinds) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(num_rounds):
        for kind, summaries in kinds.items():
            found[kind].append(seconds_of_fit(width, num_steps, 2, summaries))
    return found


def rounds_of_steps(width: int, num_rounds: int, num_steps: int, kinds: Kinds) -> dict[str, list[float]]:
    x, y = np.ones((BATCH_SIZE, 64), "float32"), np.ones((BATCH_SIZE, 10), "float32")
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        steps = {kind: make_step(width, summaries, os.path.join(folder, kind)) for kind, summaries in kinds.items()}
        for number in range(-1, num_rounds):
            for kind, step in steps.items():
                start = now()
                for _ in range(num_steps):
                    value = step(x, y)
                float(value)
                if number >= 0:  # the first includes compilation
                    found[kind].append((now() - start) / num_steps)
        for step in steps.values():
            step.close()
    return found


def make_step(width: int, summaries: list[str] | bool | None, folder: str) -> Any:
    model = make_model(width)
    seen = {} if summaries is False else {"summaries": summaries, "log_dir": folder, "every": EVERY}
    return ks.optimize_loss(
        lambda x, y: ops.mean(ops.square(model(x) - y)), "Adam", clip_gradients=1.0, model=model, **seen
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the result to benchmarks/results/")
    parser.add_argument("--quick", action="store_true", help="a small model, few steps: to see that it runs")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions of each measurement")
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time, on a busy machine")
    arguments = parser.parse_args()
    global now
    now = time.process_time if arguments.cpu_time else time.perf_counter
    width, num_steps, num_rounds = (64, 2, 1) if arguments.quick else (512, 200, arguments.rounds)
    num_calls = num_rounds if arguments.quick else 5 * num_rounds
    kinds: Kinds = {"off": False, "default": None, "norms of all": EVERYTHING, "off again": False}
    parts = []
    for name, found in (
        ("fit", rounds_of_fit(width, num_rounds, num_steps, kinds)),
        ("optimize_loss", rounds_of_steps(width, num_calls, min(num_steps, EVERY), kinds)),
    ):
        parts.append(f"Steps of `{name}`:\n\n{timing.table(found, ['off'])}")
    backend = keras.config.backend()
    timing.report(
        f"What summaries cost on {backend}, 3 hidden layers of {width}",
        f"KERAS_BACKEND={backend} python benchmarks/summaries.py{' --cpu-time' * arguments.cpu_time}",
        "\n\n".join(parts),
        {"Keras": keras.__version__, backend: importlib.import_module(backend).__version__},
        arguments.write,
    )


if __name__ == "__main__":
    main()
