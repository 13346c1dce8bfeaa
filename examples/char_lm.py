"""A character-level language model, trained with `optimize_loss` on Python's own help.

    python examples/char_lm.py --replicas 4  # JAX, four CPU devices
    KERAS_BACKEND=tensorflow python examples/char_lm.py --larc
    KERAS_BACKEND=torch torchrun --nproc-per-node 2 examples/char_lm.py
    python examples/char_lm.py --with-fit  # the same with `compile` and `fit`

Prints bits per character on held-out text; they decrease. `--log-dir` writes TensorBoard
event files.
"""

import argparse
import os
import pydoc_data.topics

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

import keras_shardopt as ks

WINDOW = 32
ITER_SIZE = 2  # micro-batches per update
SUMMARIES = [
    "learning_rate",
    "loss_scale",
    "global_gradient_norm",
    "gradient_norm",
    "gradients",
    "variable_norm",
    "variables",
    "larc_summaries",
]


def text():
    joined = "\n".join(
        pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)
    )
    return np.frombuffer(joined.encode("ascii", "replace"), "uint8").astype("int32") % 128


def batches(characters, batch_size, random):
    while True:
        starts = random.integers(0, len(characters) - WINDOW - 1, (batch_size, 1))
        rows = characters[starts + np.arange(WINDOW + 1)]
        yield rows[:, :-1], rows[:, 1:]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--replicas",
        type=int,
        help="number of replicas (default: all devices, or all torchrun processes)",
    )
    parser.add_argument("--steps", type=int, default=600, help="number of updates")
    parser.add_argument(
        "--batch-size", type=int, default=64, help="rows per micro-batch, over all replicas"
    )
    parser.add_argument("--larc", action="store_true", help="LARC instead of clipping")
    parser.add_argument(
        "--with-fit", action="store_true", help="use compile(build_optimizer(...)) and fit"
    )
    parser.add_argument("--log-dir", help="folder for TensorBoard event files")
    parser.add_argument(
        "--every", type=int, default=10, help="updates between event entries"
    )
    arguments = parser.parse_args()
    keras.utils.set_random_seed(1)
    # LARC scales each step, so it needs momentum; Adam would cancel the scale.
    how = {"optimizer": "Adam", "clip_gradients": 1.0}
    if arguments.larc:
        how = {
            "optimizer": "Momentum",
            "optimizer_params": {"momentum": 0.9},
            "larc_params": {"larc_eta": 0.02},
        }
    rate = ks.schedules.CosineDecay(
        1.0 if arguments.larc else 4e-3, decay_steps=arguments.steps
    )
    how |= {
        "learning_rate_decay_fn": rate,
        "loss_scaling": "Backoff",
        "iter_size": ITER_SIZE,
    }
    with ks.data_parallel(arguments.replicas) as replicas:
        embedding = keras.layers.Embedding(
            128, 32, keras.initializers.RandomNormal(stddev=1.0)
        )
        layers = [keras.Input((WINDOW,), dtype="int32"), embedding]
        for i in range(5):  # the receptive field grows: 2, 4, 8, 16, 32 characters
            layers.append(
                keras.layers.Conv1D(
                    64, 2, dilation_rate=2**i, padding="causal", activation="relu"
                )
            )
        model = keras.Sequential([*layers, keras.layers.Dense(128)])
        error = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        if arguments.with_fit:
            model.compile(ks.build_optimizer(**how, cross_shard=True), error)
        else:
            watch = {
                "summaries": SUMMARIES,
                "log_dir": arguments.log_dir,
                "every": arguments.every,
            }
            how |= {"on_horovod": True, "model": model} | (
                watch if arguments.log_dir else {}
            )
            step = ks.optimize_loss(lambda x, y: error(y, model(x, training=True)), **how)

    characters = text()
    held_out = characters[-256 * (WINDOW + 1) :].reshape(8, 32, WINDOW + 1)
    # `fit` divides each batch among processes; a step takes the rows of this process.
    parts, part = (
        (1, 0) if arguments.with_fit else (replicas.num_processes, replicas.process_id)
    )
    data = batches(
        characters[:-20_000], arguments.batch_size // parts, np.random.default_rng(part)
    )

    def report(update):
        nats = np.mean(
            [float(error(rows[:, 1:], model(rows[:, :-1]))) for rows in held_out]
        )
        if replicas.is_chief:
            print(
                f"after {update:4} updates: {nats / np.log(2):.2f} bits per character",
                flush=True,
            )

    report(0)
    micro_steps = arguments.steps * ITER_SIZE
    if arguments.with_fit:
        seen = ks.callbacks.TrainingSummaries(arguments.log_dir, every=arguments.every)
        model.fit(
            data,
            steps_per_epoch=micro_steps,
            callbacks=[seen],
            verbose=2 * replicas.is_chief,
        )
    else:
        for i, (x, y) in zip(range(1, micro_steps + 1), data):
            step(x, y)
            if i % (max(1, arguments.steps // 4) * ITER_SIZE) == 0 and i < micro_steps:
                report(i // ITER_SIZE)
        step.close()
    report(arguments.steps)
    difference = replicas.largest_difference(model)
    if replicas.is_chief:
        print(
            f"largest difference between {replicas.num_replicas} replicas: {difference:g}"
        )


if __name__ == "__main__":
    main()
