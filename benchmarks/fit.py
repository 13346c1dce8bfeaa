"""Cost of a step of `fit` with `CrossShard`, relative to the optimizer without it, on the backend of `KERAS_BACKEND`.

    KERAS_BACKEND=jax python benchmarks/fit.py [--replicas 8] [--write]

One replica by default. Several replicas are devices of this machine (CPU devices if it has no accelerators), on
TensorFlow those of a `MirroredStrategy`. For ranks of PyTorch, see `torch_fit.py`. Targets: at most 1.02 times plain
Keras, also with a prepared model. With divided state on JAX: at most 1.10 times, and 1/N of the state per replica.
`--cpu` measures the CPU time of this process, which depends less on other load. `--quick` runs in seconds with small
sizes; its times are meaningless.
"""

from __future__ import annotations

import importlib
import os
import time

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
import timing

import keras_shardopt as ks

ROWS = 64
UNPREPARED = "CrossShard(Adam), not prepared"


def make_model(width: int, num_layers: int = 3) -> keras.Model:
    """A model with this number of layers, and an output layer."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(width, activation="relu") for _ in range(num_layers)]
    return keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(width)])


def optimizers(num_replicas: int) -> dict[str, keras.optimizers.Optimizer]:
    adam, backend = keras.optimizers.Adam, keras.config.backend()
    made = {"Adam": adam(), "CrossShard(Adam)": ks.CrossShard(adam())}
    if backend == "torch":
        made["CrossShard(Adam, fused=False)"] = ks.CrossShard(adam(), torch=ks.TorchSpeed(fused=False))
    if num_replicas > 1:
        made["CrossShard(Adam, shard_state=True)"] = ks.CrossShard(adam(), shard_state=True)
        made[UNPREPARED] = ks.CrossShard(adam())
    # Measured twice, to show the noise of a ratio.
    return {**made, "Adam again": adam()}


def main() -> None:
    parser = timing.parser(__doc__, rounds=15)
    parser.add_argument("--replicas", type=int, default=1, help="number of replicas")
    parser.add_argument("--cpu", action="store_true", help="measure CPU time instead of wall time")
    parser.add_argument("--width", type=int, default=512, help="width of the layers")
    parser.add_argument("--steps", type=int, default=20, help="steps per measurement")
    arguments = parser.parse_args()
    width, rounds, steps = (16, 1, 2) if arguments.quick else (arguments.width, arguments.rounds, arguments.steps)
    number, backend = arguments.replicas, keras.config.backend()
    runs, reports = {}, []
    with ks.data_parallel(number, prepare=False):
        random = np.random.default_rng(0)
        x = random.normal(size=(steps * ROWS, width)).astype("float32")
        y = random.normal(size=(steps * ROWS, width)).astype("float32")
        for name, optimizer in optimizers(number).items():
            model = make_model(width)
            model.compile(optimizer, "mse")
            if "CrossShard" in name and name != UNPREPARED:
                ks.prepare(model)
            runs[name] = lambda model=model: model.fit(x, y, batch_size=ROWS, verbose=0, shuffle=False)
            runs[name]()
            if "shard_state" in name:
                reports.append(str(optimizer.memory_report()))
        seconds = timing.in_turns(runs, rounds, clock=time.process_time if arguments.cpu else time.perf_counter)
    module = importlib.import_module(backend)
    timing.report(
        f"A step of fit on {number} replica{'s' if number > 1 else ''} of {backend}, 4 x Dense({width}), {ROWS} rows",
        f"KERAS_BACKEND={backend} python benchmarks/fit.py --replicas {number}"
        + (f" --width {width}" if width != 512 else "")
        + " --cpu" * arguments.cpu,
        "\n\n".join([timing.table(seconds, ["Adam"], steps), *(f"```\n{text}\n```" for text in reports)]),
        {"Keras": keras.__version__, backend: module.__version__},
        arguments.write,
    )


if __name__ == "__main__":
    main()
