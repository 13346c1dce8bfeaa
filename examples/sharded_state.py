"""Adam state that is too large for one replica fits when it is divided among replicas.

    python examples/sharded_state.py --replicas 4  # JAX, four CPU devices
    KERAS_BACKEND=tensorflow python examples/sharded_state.py --replicas 2
    KERAS_BACKEND=torch torchrun --nproc-per-node 2 examples/sharded_state.py

Adam keeps two numbers per weight. `--budget` limits them in MiB per replica; if necessary,
the optimizer uses `shard_state=True`. `memory_report()` shows the state of each replica.
The model learns the position of the word with the highest score in a row. It trains, is
saved, and continues training from the file.
"""

import argparse
import os
import tempfile

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

import keras_shardopt as ks

NUM_WORDS, WIDTH, LENGTH = 8000, 32, 8


def compiled(shard_state):
    # Nearly all weights are in one embedding, so its state must be divided.
    embedding = keras.layers.Embedding(NUM_WORDS, WIDTH)
    layers = [
        keras.Input((LENGTH,), dtype="int32"),
        embedding,
        keras.layers.Flatten(),
        keras.layers.Dense(LENGTH),
    ]
    model = keras.Sequential(layers)
    optimizer = ks.CrossShard(keras.optimizers.Adam(0.01), shard_state=shard_state)
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    optimizer.build(model.trainable_variables)
    return model


def rows(number):
    """Rows of words with random scores; the label is the position of the best word."""
    random = np.random.default_rng(0)
    words = random.integers(0, NUM_WORDS, size=(number, LENGTH))
    scores = random.normal(size=(NUM_WORDS,))
    return words.astype("int32"), np.argmax(scores[words], axis=1)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--replicas",
        type=int,
        help="number of replicas (default: all devices, or all torchrun processes)",
    )
    parser.add_argument(
        "--budget", type=float, default=1.5, help="MiB of optimizer state per replica"
    )
    parser.add_argument("--steps", type=int, default=200, help="number of updates")
    parser.add_argument(
        "--file",
        default=os.path.join(tempfile.gettempdir(), "sharded_state.keras"),
        help="file to save the model to",
    )
    arguments = parser.parse_args()
    keras.utils.set_random_seed(1)

    with ks.data_parallel(arguments.replicas) as replicas:
        model = compiled(shard_state=False)
        needed = model.optimizer.memory_report().held[0] / 2**20
        shard_state = needed > arguments.budget
        if shard_state:
            model = compiled(shard_state=True)
        report = model.optimizer.memory_report()
        held = max(held for held in report.held) / 2**20
        if replicas.is_chief:
            print(f"Undivided, the state takes {needed:.2f} MiB of {arguments.budget:.2f}.")
            print(report)
        if held > arguments.budget:
            raise SystemExit(
                f"Even divided, the state takes {held:.2f} MiB. Use more replicas."
            )

        x, y = rows(arguments.steps * 64)
        fitting = {"batch_size": 64, "shuffle": False}
        model.fit(x, y, **fitting, verbose=2 if replicas.is_chief else 0)
        ks.save_model(
            model, arguments.file
        )  # full-sized arrays, for any number of replicas
        model = keras.saving.load_model(arguments.file)
        history = model.fit(x, y, **fitting, verbose=2 if replicas.is_chief else 0)
        if replicas.is_chief:
            print(f"backend     {keras.config.backend()}")
            print(f"replicas    {replicas.num_replicas}")
            print(f"divided     {shard_state}")
            updates = int(keras.ops.convert_to_numpy(model.optimizer.iterations))
            print(f"updates     {updates}")
            print(f"MiB held    {held:.2f}")
            print(f"accuracy    {history.history['accuracy'][-1]:.3f}")


if __name__ == "__main__":
    main()
