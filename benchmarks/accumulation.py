"""Cost of a micro-batch: the time of a step without optimizer, with Adam, and with CrossShard(Adam) between updates.

    KERAS_BACKEND=jax python benchmarks/accumulation.py

The step is a forward and backward pass; the table shows the time that each kind of optimizer step adds. On JAX it
measures one device by default; `--replicas 2` measures CPU devices in `fit` of a prepared model. Target: a micro-batch
of `CrossShard` adds at most 0.15 times the time of an Adam update.
`--quick` runs in seconds with small sizes; its times are meaningless.
"""

import argparse
import functools
import importlib
import os
import statistics
import time

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
import timing

import keras_shardopt as ks


class Nothing(keras.optimizers.SGD):
    """Reads each gradient, and does almost nothing."""

    def update_step(self, gradient, variable, learning_rate):
        row = keras.ops.sum(gradient) * 1e-30
        self.assign_add(self._iterations, keras.ops.cast(row, self._iterations.dtype))


def make_model(width):
    layers = [keras.Input((width,)), keras.layers.Dense(2 * width), keras.layers.Dense(width)]
    return keras.Sequential(layers)


def jax_steps(model, x, y):
    """Returns a function that runs this number of steps and waits for the device."""
    import jax
    from keras.src.backend.jax.trainer import _distribute_data

    model.fit(x, y, batch_size=len(x), verbose=0)  # builds
    state = model._get_jax_state(
        trainable_variables=True, non_trainable_variables=True, optimizer_variables=True, metrics_variables=True
    )
    shardings = None
    if keras.distribution.distribution() is not None:
        shardings = (None, model._get_state_sharding_spec())
    step = jax.jit(model.train_step, donate_argnums=0, out_shardings=shardings)
    data = _distribute_data((x, y))
    held = [jax.tree.map(lambda value: value.copy(), state)]

    def run(num_steps):
        for _ in range(num_steps):
            _, held[0] = step(held[0], data)
        jax.block_until_ready(held[0])

    return run


def other_steps(model, x, y):
    """The same on TensorFlow and PyTorch, with `train_on_batch`."""

    def run(num_steps):
        for _ in range(num_steps):
            model.train_on_batch(x, y)

    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=2048, help="units per layer")
    parser.add_argument("--rows", type=int, default=8, help="rows per micro-batch")
    parser.add_argument("--replicas", type=int, default=1, help="number of replicas")
    parser.add_argument("--repeats", type=int, default=15, help="repetitions of each measurement")
    parser.add_argument("--steps", type=int, default=4, help="steps per measurement")
    parser.add_argument("--write", action="store_true", help="write the result to benchmarks/results/")
    parser.add_argument("--quick", action="store_true", help="small sizes, to check that it runs")
    parser.add_argument("--cpu", action="store_true", help="measure CPU time instead of wall time")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.width, arguments.repeats = 32, 2
    random = np.random.default_rng(0)
    x = random.normal(size=(arguments.rows, arguments.width)).astype("float32")
    kinds = {
        "forward and backward": lambda: Nothing(0.0),
        "Adam": lambda: keras.optimizers.Adam(),
        "CrossShard(Adam), micro-batch": lambda: ks.CrossShard("adam", gradient_accumulation_steps=10**6),
        "Adam's own accumulation, micro-batch": lambda: keras.optimizers.Adam(gradient_accumulation_steps=10**6),
    }
    if arguments.replicas > 1 and keras.config.backend() == "tensorflow":
        del kinds["Adam's own accumulation, micro-batch"]  # a collective in a condition
    make_steps = jax_steps if keras.config.backend() == "jax" else other_steps
    with ks.data_parallel(arguments.replicas) as replicas:
        runs = {}
        for name, make in kinds.items():
            model = make_model(arguments.width)
            model.compile(make(), "mse")
            runs[name] = make_steps(model, x, x)
            runs[name](2)
        clock = time.process_time if arguments.cpu else time.perf_counter
        runs = {name: functools.partial(run, arguments.steps) for name, run in runs.items()}
        seconds = timing.in_turns(runs, arguments.repeats, clock=clock)
    replicas.close()
    milliseconds = {name: 1000 * min(values) / arguments.steps for name, values in seconds.items()}
    base = milliseconds["forward and backward"]
    adam = milliseconds["Adam"] - base
    lines = ["| | ms, least | ms, median | of what Adam adds |", "|---|---|---|---|"]
    for name, value in milliseconds.items():
        middle = 1000 * statistics.median(seconds[name]) / arguments.steps
        lines.append(f"| {name} | {value:.2f} | {middle:.2f} | {(value - base) / adam:.2f} |")
    backend, number = keras.config.backend(), arguments.replicas
    timing.report(
        f"What a micro-batch costs on {number} replica{'s' if number > 1 else ''} of {backend}",
        f"KERAS_BACKEND={backend} python benchmarks/accumulation.py --replicas {number}{' --cpu' * arguments.cpu}",
        "\n".join(lines),
        {"Keras": keras.__version__, backend: importlib.import_module(backend).__version__},
        arguments.write,
    )


if __name__ == "__main__":
    main()
