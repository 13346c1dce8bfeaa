"""Throughput of `fit` on 1, 2, 4 and 8 replicas, relative to plain Keras on one core.

    KERAS_BACKEND=torch python benchmarks/speedup.py [--write]

Three models: an MLP, a convolutional network and a transformer block, with Adam. PyTorch runs one rank per replica, JAX
and TensorFlow one device per replica. Each replica has one thread. N replicas run on N cores, if the machine has them;
more replicas than cores cannot be faster. Weak scaling keeps the rows per replica constant, strong scaling the rows of
the global batch.

The peer is a custom training loop with `DistributedDataParallel` and `Adam(fused=True)` on PyTorch, Keras' own
`DataParallel` on JAX, and `MirroredStrategy` with Keras' Adam on TensorFlow. On one replica the peer is plain Keras, or
the loop without DDP. Each number is the best of `--rounds` runs, because other load can only slow a run. `--quick` runs
in seconds with small sizes; its times are meaningless.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import subprocess
import sys
import time
from typing import Any

import timing

CORES = sorted(os.sched_getaffinity(0))
MODELS = {"MLP": 64, "ConvNet": 16, "transformer": 8}
"""The rows per replica in weak scaling. Strong scaling has 8 times as many in each global batch."""
SIDES = ("CrossShard", "peer")


# -- one process ---------------------------------------------------------------------------------------------------


def model_and_shape(name: str, quick: bool) -> tuple[Any, tuple[int, ...]]:
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    if name == "MLP":
        width = 32 if quick else 512
        shape: tuple[int, ...] = (width,)
        stack = [layers.Dense(width, activation="relu") for _ in range(4)]
    elif name == "ConvNet":
        shape = (8, 8, 3) if quick else (32, 32, 3)
        stack = [layers.Conv2D(width, 3, strides=2, activation="relu", padding="same") for width in (32, 64, 128)]
        stack.append(layers.GlobalAveragePooling2D())
    else:
        length, width = (8, 16) if quick else (64, 128)
        inputs = keras.Input((length, width))
        x = layers.LayerNormalization()(inputs)
        x = layers.Add()([inputs, layers.MultiHeadAttention(4, width // 4)(x, x)])
        y = layers.LayerNormalization()(x)
        y = layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(y))
        outputs = layers.Dense(10)(layers.GlobalAveragePooling1D()(layers.Add()([x, y])))
        return keras.Model(inputs, outputs), (length, width)
    return keras.Sequential([keras.Input(shape), *stack, layers.Dense(10)]), shape


def child(given: argparse.Namespace) -> None:
    """Measures one model on one number of replicas, and prints the rows per second of weak and strong scaling."""
    number, backend = given.replicas, os.environ["KERAS_BACKEND"]
    on_ranks = backend == "torch"
    if on_ranks:
        os.sched_setaffinity(0, {CORES[int(os.environ.get("LOCAL_RANK", 0)) % len(CORES)]})
        import torch

        torch.set_num_threads(1)
    else:
        os.sched_setaffinity(0, CORES[:number])
    if backend == "tensorflow":
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(number)
    import keras
    import numpy as np

    import keras_shardopt as ks

    is_ours = given.side == "CrossShard"
    # Each rank passes its own rows. Devices get the global batch.
    with ks.data_parallel(None if on_ranks else number, prepare=is_ours, auto_shard=False) as replicas:
        model, shape = model_and_shape(given.model, given.quick)
        if on_ranks and not is_ours:
            import torch_training

            module = torch.nn.parallel.DistributedDataParallel(model) if number > 1 else model
            run = functools.partial(torch_training.train, module, torch.optim.Adam(module.parameters(), fused=True))
        else:
            adam = keras.optimizers.Adam()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(ks.CrossShard(adam) if is_ours else adam, loss)

            def run(x: Any, y: Any, rows: int) -> None:
                model.fit(x, y, batch_size=rows, verbose=0, shuffle=False)

        random = np.random.default_rng(replicas.replica_id)
        small = MODELS[given.model]
        found = []
        for rows in (small * number, small * 8):  # of a global batch
            rows = rows // number if on_ranks else rows
            steps = 2 if given.quick else max(4, 512 // rows)
            x = random.normal(size=(steps * rows, *shape)).astype("float32")
            y = random.integers(0, 10, len(x))
            run(x, y, rows)
            seconds = []
            for _ in range(given.rounds):
                start = time.perf_counter()
                run(x, y, rows)
                seconds.append(time.perf_counter() - start)
            found.append(len(x) * (number if on_ranks else 1) / min(seconds))
    if replicas.is_chief:
        print("FOUND " + json.dumps(found), flush=True)
    replicas.close()


# -- all processes -------------------------------------------------------------------------------------------------


def measured(given: argparse.Namespace, backend: str, model: str, side: str, number: int) -> list[float]:
    command = [sys.executable, __file__, "--model", model, "--side", side, "--replicas", str(number)]
    command += ["--rounds", str(given.rounds), *(["--quick"] if given.quick else [])]
    if backend == "torch" and number > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--nproc-per-node", str(number)]
    more = {"OMP_NUM_THREADS": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment = {**os.environ, **more}
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    (line,) = [line for line in output.splitlines() if line.startswith("FOUND ")]
    found: list[float] = json.loads(line.removeprefix("FOUND "))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the result to benchmarks/results/")
    parser.add_argument("--quick", action="store_true", help="small sizes, to check that it runs")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each measurement")
    parser.add_argument("--model", help="used by this program: measure one model in this process")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--replicas", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    backend = os.environ.setdefault("KERAS_BACKEND", "jax")
    if given.model:
        child(given)
        return
    numbers, models = ((1, 2), ["MLP"]) if given.quick else ((1, 2, 4, 8), [*MODELS])
    given.rounds = 1 if given.quick else given.rounds
    head = ["model, scaling", "replicas", *[f"{side}, {unit}" for side in SIDES for unit in ("rows/s", "speedup")]]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for model in models:
        found = {(side, n): measured(given, backend, model, side, n) for n in numbers for side in SIDES}
        for place, scaling in enumerate(("weak", "strong")):
            base = found["peer", 1][place]
            for n in numbers:
                cells = [f"{found[side, n][place]:.0f} | {found[side, n][place] / base:.2f}" for side in SIDES]
                lines.append(f"| {model}, {scaling} | {n} | {' | '.join(cells)} |")
    timing.report(
        f"Throughput of fit on 1 to {numbers[-1]} replicas of {backend}, one thread each",
        f"KERAS_BACKEND={backend} python benchmarks/speedup.py --rounds {given.rounds}",
        f"The best of {given.rounds} runs on {len(CORES)} cores. Speedup: rows per second relative to the peer on one "
        "core.\n\n" + "\n".join(lines),
        {name: importlib.import_module(name).__version__ for name in ("keras", backend)},
        given.write,
    )


if __name__ == "__main__":
    main()
