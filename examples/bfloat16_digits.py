"""Handwritten digits with bfloat16 weights: the effect of float32 master weights.

    python examples/bfloat16_digits.py

Trains one model in three ways, each with the same three seeds: in float32, in bfloat16,
and in bfloat16 with `MixedPrecision` (float32 master weights). Plain bfloat16 loses updates
smaller than 1/256 of a weight, and Adam's averages do not change because 0.999 is
rounded to 1. Prints the mean accuracy on held-out digits.
"""

import argparse
import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import keras_shardopt as ks


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=25, help="number of epochs")
    parser.add_argument(
        "--steps", type=int, help="one seed and this number of steps, for a quick test"
    )
    arguments = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    split = train_test_split(images, labels, test_size=0.4, random_state=0, stratify=labels)
    train_images, test_images, train_labels, test_labels = split
    rows = None if arguments.steps is None else 64 * arguments.steps
    epochs, seeds = (arguments.epochs, (1, 2, 3)) if arguments.steps is None else (1, (1,))

    def accuracy(policy, optimizer, seed):
        keras.utils.set_random_seed(seed)
        layers = [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu", dtype=policy),
            keras.layers.Dense(10, dtype=policy),
        ]
        model = keras.Sequential(layers)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(ks.CrossShard(optimizer), loss, metrics=["accuracy"])
        model.fit(
            train_images[:rows],
            train_labels[:rows],
            batch_size=64,
            epochs=epochs,
            verbose=0,
        )
        return model.evaluate(test_images, test_labels, verbose=0)[1]

    def adam():
        return keras.optimizers.Adam(2e-3)

    ways = {
        "float32": ("float32", adam),
        "bfloat16": ("bfloat16", adam),
        "bfloat16 with masters": ("bfloat16", lambda: ks.MixedPrecision(adam())),
    }
    print(f"{'backend':28}{keras.config.backend()}")
    for name, (policy, make) in ways.items():
        accuracies = [accuracy(policy, make(), seed) for seed in seeds]
        print(f"{name:28}{sum(accuracies) / len(seeds):.4f}", flush=True)


if __name__ == "__main__":
    main()
