"""Cost of CrossShard by the number of variables: 10 to 10,000, each of four elements, on one replica.

    KERAS_BACKEND=torch python benchmarks/variables.py [--write]

Milliseconds of an eager update (PyTorch; TensorFlow outside a `tf.function`), or to trace an update (JAX). The fitted
power of the number of variables is 1 for linear cost, and 2 for quadratic cost.
"""

from __future__ import annotations

import argparse
import importlib
import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import timing

import keras_shardopt as ks


def runner(optimizer: keras.optimizers.Optimizer, number: int):
    variables = [keras.Variable(np.ones(4, "float32")) for _ in range(number)]
    grads = [keras.ops.ones(4) for _ in variables]
    optimizer.build(variables)
    if keras.config.backend() != "jax":
        return lambda: optimizer.apply(grads, variables)
    import jax

    state, values = [v.value for v in optimizer.variables], [v.value for v in variables]
    return lambda: jax.make_jaxpr(lambda *given: optimizer.stateless_apply(*given))(state, grads, values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the result to benchmarks/results/")
    parser.add_argument("--quick", action="store_true", help="few variables, to check that it runs")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions of each measurement")
    parser.add_argument("--most", type=int, default=10_000, help="the largest number of variables")
    arguments = parser.parse_args()
    counts = [n for n in (10, 100, 1000, 10_000) if n <= (100 if arguments.quick else arguments.most)]
    backend = keras.config.backend()
    lines = ["| variables | ms, SGD | ms, CrossShard(SGD) | ratio |", "|---|---|---|---|"]
    medians = {}
    for number in counts:
        runs = {
            "SGD": runner(keras.optimizers.SGD(0.1, momentum=0.9), number),
            "CrossShard(SGD)": runner(ks.CrossShard(keras.optimizers.SGD(0.1, momentum=0.9)), number),
        }
        seconds = timing.in_turns(runs, arguments.rounds)
        plain, wrapped = (1000 * float(np.median(seconds[name])) for name in runs)
        middle, low, high = timing.ratios(seconds, "CrossShard(SGD)", "SGD")
        lines.append(f"| {number} | {plain:.2f} | {wrapped:.2f} | {middle:.2f} ({low:.2f} to {high:.2f}) |")
        medians[number] = (plain, wrapped)
    for i, name in enumerate(("SGD", "CrossShard(SGD)")):
        logs = np.log([medians[n][i] for n in counts[1:]])
        power = np.polyfit(np.log(counts[1:]), logs, 1)[0] if len(counts) > 2 else float("nan")
        lines.append(f"\n{name}: grows with the number of variables to the power of {power:.2f}.")
    module = importlib.import_module(backend)
    timing.report(
        f"{'Tracing an update' if backend == 'jax' else 'An update'} of many variables on {backend}",
        f"KERAS_BACKEND={backend} python benchmarks/variables.py",
        "\n".join(lines),
        {"Keras": keras.__version__, backend: module.__version__},
        arguments.write,
    )


if __name__ == "__main__":
    main()
