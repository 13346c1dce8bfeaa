"""Cost of a step of `fit` with `virtual_replicas` (a batch in parts), relative to a step with the whole batch.

    KERAS_BACKEND=jax python benchmarks/virtual_replicas.py --replicas 4 [--write]
    KERAS_BACKEND=torch torchrun --nproc-per-node 4 benchmarks/virtual_replicas.py [--write]

Target: at most 1.05 times if the number of parts equals the number of replicas. With more parts, each is smaller than a
replica's batch, with the cost of smaller batches. It measures the CPU time of one process; `--wall` measures wall time.
`--quick` runs in seconds with small sizes; its times are meaningless.
"""

from __future__ import annotations

import importlib
import os
import time

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import keras
import numpy as np
import timing
from keras import layers

import keras_shardopt as ks


def dense(width: int) -> keras.Model:
    return keras.Sequential([keras.Input((width,)), *[layers.Dense(width, "relu") for _ in range(3)], layers.Dense(10)])


def attention(side: int) -> keras.Model:
    """A model with convolutions, attention, normalization and dropout."""
    image = keras.Input((side, side, 3))
    x = layers.Conv2D(8, 3, activation="relu")(image)
    x = layers.Reshape((-1, 8))(layers.Conv2D(8, 3, strides=2, activation="gelu")(x))
    x = layers.LayerNormalization()(layers.MultiHeadAttention(2, 4)(x, x))
    return keras.Model(image, layers.Dense(10)(layers.Dropout(0.2)(layers.Flatten()(x))))


def main() -> None:
    parser = timing.parser(__doc__, rounds=7)
    parser.add_argument("--replicas", type=int, default=None, help="number of replicas, on JAX and TensorFlow")
    parser.add_argument("--wall", action="store_true", help="measure wall time instead of CPU time")
    parser.add_argument("--steps", type=int, default=30, help="steps per measurement")
    arguments = parser.parse_args()
    backend = keras.config.backend()
    random = np.random.default_rng(0)
    width, steps, rounds = (32, 2, 2) if arguments.quick else (512, arguments.steps, arguments.rounds)
    clock = time.perf_counter if arguments.wall else time.process_time
    tables = []
    with ks.data_parallel(None if backend == "torch" else arguments.replicas) as replicas:
        number = replicas.num_replicas
        for name, make, size, rows in (
            (f"3 x {width}, 256 rows", dense, (width,), 256),
            ("convolution and attention, 64 images of 12 x 12", attention, (12, 12, 3), 64),
        ):
            x = random.normal(size=(steps * rows, *size)).astype("float32")
            y = random.integers(0, 10, len(x))
            runs = {}
            for num_parts in dict.fromkeys((None, number, 8)):
                keras.utils.set_random_seed(0)
                model = make(size[0])
                optimizer = ks.CrossShard(
                    keras.optimizers.Adam(1e-3), extensions=[] if num_parts is None else [ks.VirtualReplicas(num_parts)]
                )
                model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
                more = {"batch_size": rows, "verbose": 0, "shuffle": False}
                label = name if num_parts is None else f"virtual_replicas={num_parts}"
                runs[label] = lambda model=model, x=x, y=y, more=more: model.fit(x, y, **more)
            tables.append(timing.table(timing.in_turns(runs, rounds, clock=clock), [name], steps))
    if replicas.is_chief:
        start = f"torchrun --nproc-per-node {number}" if backend == "torch" else "python"
        size = "" if backend == "torch" else f" --replicas {number}"
        timing.report(
            f"A step in parts on {number} replica{'s' if number > 1 else ''} of {backend}",
            f"KERAS_BACKEND={backend} {start} benchmarks/virtual_replicas.py{size}{' --wall' * arguments.wall}",
            "\n\n".join(tables),
            {"Keras": keras.__version__, backend: importlib.import_module(backend).__version__},
            arguments.write,
        )
    replicas.close()


if __name__ == "__main__":
    main()
