"""Gradient accumulation: four micro-batches, one communication, the whole batch's update.

    python examples/accumulation.py --replicas 4  # JAX, four CPU devices
    KERAS_BACKEND=tensorflow python examples/accumulation.py --replicas 2
    KERAS_BACKEND=torch torchrun --nproc-per-node 2 examples/accumulation.py

Trains on handwritten digits twice from the same weights: with batches of 64 rows, and
with batches of 16 rows, four per update. Prints the number of updates of each, and the
largest difference between the final weights, relative to the distance that they moved.
The difference is rounding.
"""

import argparse
import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
from sklearn.datasets import load_digits

import keras_shardopt as ks

BATCH_SIZE = 64
MICRO_STEPS = 4


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--replicas",
        type=int,
        help="number of replicas (default: all devices, or all torchrun processes)",
    )
    parser.add_argument("--steps", type=int, default=40, help="number of updates")
    arguments = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    rows = np.arange(arguments.steps * BATCH_SIZE) % len(images)
    images, labels = (images[rows] / 16).astype("float32"), labels[rows]

    def trained(start, batch_size, **how):
        """Returns the model, trained from `start` with batches of this number of rows."""
        with ks.data_parallel(arguments.replicas) as replicas:
            layers = [
                keras.Input((64,)),
                keras.layers.Dense(32, activation="tanh"),
                keras.layers.Dense(10),
            ]
            model = keras.Sequential(layers)
            if start is not None:
                model.set_weights(start)
            start = model.get_weights()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(
                ks.CrossShard(keras.optimizers.SGD(0.2, momentum=0.9), **how), loss
            )
        model.fit(images, labels, batch_size=batch_size, shuffle=False, verbose=0)
        return model, start, replicas

    keras.utils.set_random_seed(1)
    whole, start, _ = trained(None, BATCH_SIZE)
    updates, weights = (
        int(keras.ops.convert_to_numpy(whole.optimizer.iterations)),
        whole.get_weights(),
    )
    parts, _, replicas = trained(
        start, BATCH_SIZE // MICRO_STEPS, gradient_accumulation_steps=MICRO_STEPS
    )
    movement = max(np.max(np.abs(w - s)) for w, s in zip(weights, start))
    difference = max(np.max(np.abs(w - p)) for w, p in zip(weights, parts.get_weights()))
    if replicas.is_chief:
        print(f"backend                    {keras.config.backend()}")
        print(f"replicas                   {replicas.num_replicas}")
        print(f"updates, whole batches     {updates}")
        updates = int(keras.ops.convert_to_numpy(parts.optimizer.iterations))
        print(f"updates, in micro-batches  {updates}")
        print(f"relative difference        {difference / movement:.1e}")


if __name__ == "__main__":
    main()
