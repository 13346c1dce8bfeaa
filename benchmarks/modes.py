"""Cost of a step of `fit` with each option and wrapper, relative to the same step without it.

    KERAS_BACKEND=jax python benchmarks/modes.py [--replicas 8] [--write]
    KERAS_BACKEND=torch torchrun --nproc-per-node 2 benchmarks/modes.py [--write]

Target: at most 1.03 times the step without it; summaries every 100 updates at most 1.05 times. Options that change the
training (accumulation, mixed precision) are measured without a target.
`--cpu` measures the CPU time of this process, which depends less on other load. `--quick` runs in seconds with small
sizes; its times are meaningless.
"""

from __future__ import annotations

import importlib
import os
import tempfile
import time
from collections.abc import Callable

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import keras
import numpy as np
import timing
from fit import ROWS, make_model

import keras_shardopt as ks

PLAIN = "CrossShard(Adam)"


def modes() -> dict[str, Callable[[], keras.optimizers.Optimizer]]:
    """Returns, by name, functions that create the optimizer."""

    def adam() -> keras.optimizers.Optimizer:
        return keras.optimizers.Adam(1e-4)

    made: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
        PLAIN: lambda: ks.CrossShard(adam()),
        'on_nonfinite="skip"': lambda: ks.CrossShard(adam(), on_nonfinite="skip"),
        "shard_state=True": lambda: ks.CrossShard(adam(), shard_state=True),
        'compression="bfloat16"': lambda: ks.CrossShard(adam(), compression="bfloat16"),
        "gradient_accumulation_steps=4": lambda: ks.CrossShard(adam(), gradient_accumulation_steps=4),
        "replica_clipnorm=1.0": lambda: ks.CrossShard(adam(), replica_clipnorm=1.0),
        "GradientNoise": lambda: ks.CrossShard(adam(), stages=[ks.GradientNoise()]),
        "LossScaling": lambda: ks.CrossShard(ks.LossScaling(adam())),
        "LARC": lambda: ks.CrossShard(ks.LARC(adam(), larc_eta=0.002)),
        "GradientClipping": lambda: ks.CrossShard(ks.GradientClipping(adam(), 1.0)),
        "MixedPrecision": lambda: ks.CrossShard(ks.MixedPrecision(adam())),
    }
    return {**made, f"{PLAIN} again": made[PLAIN]}  # measured twice, to show the noise


def main() -> None:
    parser = timing.parser(__doc__, rounds=11)
    parser.add_argument("--replicas", type=int, default=None, help="number of replicas, on JAX and TensorFlow")
    parser.add_argument("--cpu", action="store_true", help="measure CPU time instead of wall time")
    parser.add_argument("--only", nargs="*", default=[], help="names of modes to measure besides the plain one")
    parser.add_argument("--steps", type=int, default=20, help="steps per measurement")
    arguments = parser.parse_args()
    width, num_layers, rounds = (16, 1, 1) if arguments.quick else (512, 5, arguments.rounds)
    steps = 2 if arguments.quick else arguments.steps
    backend = keras.config.backend()
    runs, left_out = {}, []
    with ks.data_parallel(None if backend == "torch" else arguments.replicas) as replicas:
        random = np.random.default_rng(0)
        x, y = (random.normal(size=(steps * ROWS, width)).astype("float32") for _ in range(2))

        def add(name: str, optimizer: keras.optimizers.Optimizer, callbacks: tuple = ()) -> None:
            model = make_model(width, num_layers)
            model.compile(optimizer, "mse")
            more = {"batch_size": ROWS, "verbose": 0, "shuffle": False, "callbacks": list(callbacks)}
            runs[name] = lambda: model.fit(x, y, **more)
            runs[name]()

        for name, make in modes().items():
            if arguments.only and not name.startswith(PLAIN) and name not in arguments.only:
                continue
            try:
                add(name, make())
            except ValueError as error:
                left_out.append(f"Left out: {name} ({str(error).split('. ')[0]}).")
        with tempfile.TemporaryDirectory() as folder:
            if not arguments.only:
                summaries = ks.callbacks.TrainingSummaries(folder, every=100)
                add("TrainingSummaries(every=100)", ks.CrossShard(keras.optimizers.Adam(1e-4)), (summaries,))
            clock = time.process_time if arguments.cpu else time.perf_counter
            seconds = timing.in_turns(runs, rounds, clock=clock)
    if replicas.is_chief:
        number = replicas.num_replicas
        start = f"torchrun --nproc-per-node {number}" if backend == "torch" else "python"
        size = "" if backend == "torch" else f" --replicas {number}"
        timing.report(
            f"A step of fit in each mode on {number} replica{'s' if number > 1 else ''} of {backend}",
            f"KERAS_BACKEND={backend} {start} benchmarks/modes.py{size}{' --cpu' if arguments.cpu else ''}",
            "\n\n".join([timing.table(seconds, [PLAIN], steps), *left_out]),
            {"Keras": keras.__version__, backend: importlib.import_module(backend).__version__},
            arguments.write,
        )
    replicas.close()


if __name__ == "__main__":
    main()
