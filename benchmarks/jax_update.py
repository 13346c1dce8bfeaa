"""Cost of a compiled update on JAX: Keras' optimizer, CrossShard, and optax, with the same parameters.

    python benchmarks/jax_update.py [--write]

Weights and state are donated, as in `fit`. Target: no slower than plain Keras. Needs optax.
`--quick` runs in seconds with small sizes; its times are meaningless.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
import optax
import timing

import keras_shardopt as ks

RATE = 1e-3


def kinds() -> dict[str, tuple]:
    o = keras.optimizers
    return {
        "adam": (lambda: o.Adam(RATE), optax.adam(RATE)),
        "adamw": (lambda: o.AdamW(RATE, weight_decay=4e-3), optax.adamw(RATE, weight_decay=4e-3)),
        "sgd": (lambda: o.SGD(RATE, momentum=0.9), optax.sgd(RATE, momentum=0.9)),
        "adagrad": (lambda: o.Adagrad(RATE), optax.adagrad(RATE)),
        "rmsprop": (lambda: o.RMSprop(RATE), optax.rmsprop(RATE)),
        "adamax": (lambda: o.Adamax(RATE), optax.adamax(RATE)),
        "nadam": (lambda: o.Nadam(RATE), optax.nadam(RATE)),
        "adadelta": (lambda: o.Adadelta(RATE), optax.adadelta(RATE, rho=0.95)),
        "lamb": (lambda: o.Lamb(RATE), optax.lamb(RATE)),
        "lion": (lambda: o.Lion(RATE), optax.lion(RATE)),
    }


def repeated(update: Callable[..., Any], state: Any, weights: Any, grads: Any) -> Callable[[], None]:
    """Runs compiled updates repeatedly, with donated memory."""
    step = jax.jit(update, donate_argnums=(0, 2))
    held = [state, weights]

    def run() -> None:
        held[:] = step(held[0], grads, held[1])
        jax.block_until_ready(held)

    return run


def of_keras(optimizer: keras.optimizers.Optimizer, values: list[Any], grads: list[Any]) -> Callable[[], None]:
    optimizer.build([keras.Variable(value) for value in values])

    def update(state: Any, grads: Any, weights: Any) -> tuple[Any, Any]:
        weights, state = optimizer.stateless_apply(state, grads, weights)
        return state, weights

    return repeated(update, [v.value for v in optimizer.variables], copies(values), grads)


def of_optax(optimizer: Any, values: list[Any], grads: list[Any]) -> Callable[[], None]:
    def update(state: Any, grads: Any, weights: Any) -> tuple[Any, Any]:
        changes, state = optimizer.update(grads, state, weights)
        return state, optax.apply_updates(weights, changes)

    return repeated(update, optimizer.init(values), copies(values), grads)


def copies(values: list[Any]) -> list[Any]:
    return [value + 0 for value in values]


def main() -> None:
    parser = timing.parser(__doc__, rounds=21)
    parser.add_argument("--size", type=int, default=1024, help="rows and columns of each of the 16 matrices")
    arguments = parser.parse_args()
    size, rounds = (64, 2) if arguments.quick else (arguments.size, arguments.rounds)
    random = np.random.default_rng(0)
    values = [jax.numpy.asarray(0.1 * random.normal(size=(size, size)), "float32") for _ in range(16)]
    grads = [0.1 * value for value in values]
    text = []
    for name, (make, peer) in kinds().items():
        runs = {
            f"optax.{name}": of_optax(peer, values, grads),
            f"Keras, {name}": of_keras(make(), values, grads),
            f"CrossShard, {name}": of_keras(ks.CrossShard(make()), values, grads),
        }
        text.append(timing.table(timing.in_turns(runs, rounds), list(runs)[:2]))
    timing.report(
        f"Updates of {sum(value.size for value in values) / 1e6:.3g} million parameters on JAX",
        "python benchmarks/jax_update.py" + (f" --size {size}" if size != 1024 else ""),
        "\n\n".join(text),
        {"Keras": keras.__version__, "JAX": jax.__version__, "optax": optax.__version__},
        arguments.write,
    )


if __name__ == "__main__":
    main()
