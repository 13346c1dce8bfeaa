"""A model whose Adam state is too large for one replica: divided among them it fits.

    python examples/sharded_state.py --replicas 4  # JAX, four CPU devices
    KERAS_BACKEND=tensorflow python examples/sharded_state.py --replicas 2
    KERAS_BACKEND=torch torchrun --nproc-per-node 2 examples/sharded_state.py

Adam keeps two numbers per weight. With `--budget` MiB for them on each replica, the
optimizer is made with `shard_state=True` if that is what it takes; `memory_report()` says
what each replica then holds. The model learns which of the words in a row comes twice,
trains for a while, is saved, and goes on from the file.
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
    # An embedding with nearly all weights, which must be cut for its state to be divided.
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
    """Words in a row, each with a favourite place; the label is where one likes it best."""
    random = np.random.default_rng(0)
    words = random.integers(0, NUM_WORDS, size=(number, LENGTH))
    liking = random.normal(size=(NUM_WORDS,))
    return words.astype("int32"), np.argmax(liking[words], axis=1)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--replicas",
        type=int,
        help="how many; default: all devices, or all torchrun processes",
    )
    parser.add_argument(
        "--budget", type=float, default=1.5, help="MiB of optimizer state on each replica"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--file", default=os.path.join(tempfile.gettempdir(), "sharded_state.keras")
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
            print(f"Whole, the state takes {needed:.2f} MiB of {arguments.budget:.2f}.")
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
        )  # whole arrays, which fit any number of replicas
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
