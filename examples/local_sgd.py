"""Local SGD: replicas communicate every 20 updates, compared with synchronous training.

    python examples/local_sgd.py --replicas 4  # JAX, four CPU devices
    KERAS_BACKEND=tensorflow python examples/local_sgd.py --replicas 2
    KERAS_BACKEND=torch torchrun --nproc-per-node 2 examples/local_sgd.py

Trains on handwritten digits three times from the same weights: synchronously, with an
average of the replicas' weights every 20 updates, and with an outer optimizer (DiLoCo).
Prints the loss on held-out digits, and the number of communications.
"""

import argparse
import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
from sklearn.datasets import load_digits

import keras_shardopt as ks

EVERY = 20


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--replicas",
        type=int,
        help="number of replicas (default: all devices, or all torchrun processes)",
    )
    parser.add_argument("--epochs", type=int, default=9, help="number of epochs")
    arguments = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    held_out = images[1400:], labels[1400:]
    for name in ("synchronous", "mean of the weights", "outer optimizer"):
        keras.utils.set_random_seed(1)
        with ks.data_parallel(arguments.replicas) as replicas:
            rounds = ks.LocalSGD(EVERY)
            if name == "outer optimizer":
                sgd = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
                rounds = ks.LocalSGD(EVERY, outer_optimizer=sgd, warmup=2 * EVERY)
            extensions = [] if name == "synchronous" else [rounds]
            hidden = keras.layers.Dense(64, activation="relu")
            model = keras.Sequential([keras.Input((64,)), hidden, keras.layers.Dense(10)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(
                ks.CrossShard(keras.optimizers.Adam(2e-3), extensions=extensions), loss
            )
        epochs = arguments.epochs
        model.fit(images[:1400], labels[:1400], batch_size=64, epochs=epochs, verbose=0)
        error = model.evaluate(*held_out, verbose=0)
        updates = epochs * 22  # 22 batches of 64 per 1,400 rows
        together = (rounds.warmup or 0) if extensions else updates
        times = together + (updates - together) // EVERY
        if replicas.is_chief:
            label = f"{replicas.num_replicas} replicas, {name}"
            print(f"{label:34}  loss {error:.4f}, {times} communications")


if __name__ == "__main__":
    main()
