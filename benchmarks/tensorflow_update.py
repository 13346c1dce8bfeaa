"""Cost of an update on TensorFlow, in a graph and compiled by XLA: Keras' optimizer and CrossShard.

    python benchmarks/tensorflow_update.py [--write]

Target: no slower than plain Keras. `--quick` runs in seconds with small sizes; its times are meaningless.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf
import timing

import keras_shardopt as ks

RATE = 1e-3
KINDS = ("Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "Adamax", "Nadam", "Adadelta", "Lamb", "Lion")


def updates(optimizer: keras.optimizers.Optimizer, grads: list[Any], by_xla: bool) -> Callable[[], None]:
    """Updates new weights repeatedly, in a compiled function."""
    variables = [keras.Variable(0.1 * grad) for grad in grads]
    optimizer.build(variables)
    return tf.function(lambda: optimizer.apply(grads, variables), jit_compile=by_xla)


def main() -> None:
    parser = timing.parser(__doc__, rounds=21)
    parser.add_argument("--size", type=int, default=1024, help="rows and columns of each of the 16 matrices")
    arguments = parser.parse_args()
    size, rounds = (64, 2) if arguments.quick else (arguments.size, arguments.rounds)
    random = np.random.default_rng(0)
    grads = [tf.constant(0.01 * random.normal(size=(size, size)), "float32") for _ in range(16)]
    text = []
    for name in KINDS:
        more = {"momentum": 0.9} if name == "SGD" else {}
        runs = {}
        for way in ("graph", "XLA"):
            for make in (lambda o: o, ks.CrossShard):
                optimizer = make(getattr(keras.optimizers, name)(RATE, **more))
                label = "CrossShard" if isinstance(optimizer, ks.CrossShard) else "Keras"
                runs[f"{label} {name}, {way}"] = updates(optimizer, grads, way == "XLA")
        text.append(timing.table(timing.in_turns(runs, rounds), [f"Keras {name}, graph", f"Keras {name}, XLA"]))
    timing.report(
        f"Updates of {16 * size * size / 1e6:.3g} million parameters on TensorFlow",
        "python benchmarks/tensorflow_update.py" + (f" --size {size}" if size != 1024 else ""),
        "\n\n".join(text),
        {"Keras": keras.__version__, "TensorFlow": tf.__version__},
        arguments.write,
    )


if __name__ == "__main__":
    main()
