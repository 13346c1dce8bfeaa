"""Handwritten digits with weights that are really bfloat16: what float32 masters are for.

    python examples/bfloat16_digits.py

Trains one model three times with the same seed: in float32; in bfloat16, where updates smaller than 1/256 of a weight
are lost, and Adam's averages stand still, because 0.999 is 1; and in bfloat16 with `MixedPrecision`, which keeps float32
masters. Prints the accuracy on held-out digits.
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
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--steps", type=int, default=None, help="steps per epoch; default: all")
    arguments = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    split = train_test_split(images, labels, test_size=0.4, random_state=0, stratify=labels)
    train_images, test_images, train_labels, test_labels = split

    def accuracy(policy, optimizer):
        keras.utils.set_random_seed(1)
        with_bits = dict(dtype=policy)
        layers = [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu", **with_bits),
            keras.layers.Dense(10, **with_bits),
        ]
        model = keras.Sequential(layers)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(ks.CrossShard(optimizer), loss, metrics=["accuracy"])
        model.fit(
            train_images,
            train_labels,
            batch_size=64,
            epochs=arguments.epochs,
            steps_per_epoch=arguments.steps,
            verbose=0,
        )
        return model.evaluate(test_images, test_labels, verbose=0)[1]

    print(f"backend                     {keras.config.backend()}")
    print(f"float32                     {accuracy('float32', keras.optimizers.Adam(2e-3)):.4f}", flush=True)
    print(f"bfloat16                    {accuracy('bfloat16', keras.optimizers.Adam(2e-3)):.4f}", flush=True)
    masters = ks.MixedPrecision(keras.optimizers.Adam(2e-3))
    print(f"bfloat16 with masters       {accuracy('bfloat16', masters):.4f}", flush=True)


if __name__ == "__main__":
    main()
