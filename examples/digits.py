"""Handwritten digits on any number of replicas: the same file for TensorFlow, JAX, PyTorch.

    python examples/digits.py --replicas 4                          # JAX, four CPU devices
    KERAS_BACKEND=tensorflow python examples/digits.py --replicas 2
    KERAS_BACKEND=torch torchrun --nproc-per-node 2 examples/digits.py

Prints the accuracy on held-out digits, the speed, and the largest difference between the
replicas' weights. It is 0, because replicas train on different rows of each batch, but all
apply the same update.
"""

import argparse
import os
import time

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import keras_shardopt as ks


class Speed(keras.callbacks.Callback):
    """Measures steps per second, without the first epoch, which includes compilation."""

    steps, seconds = 0, 0.0

    def on_epoch_begin(self, epoch, logs=None):
        self.start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.last = batch + 1

    def on_epoch_end(self, epoch, logs=None):
        if epoch:
            self.steps += self.last
            self.seconds += time.perf_counter() - self.start


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--replicas",
        type=int,
        help="number of replicas (default: all devices, or all torchrun processes)",
    )
    parser.add_argument("--epochs", type=int, default=15, help="number of epochs")
    parser.add_argument(
        "--steps", type=int, help="number of steps per epoch, for a quick test"
    )
    arguments = parser.parse_args()
    keras.utils.set_random_seed(1)

    with ks.data_parallel(arguments.replicas) as replicas:
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Conv2D(16, 3, activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(
            optimizer=ks.CrossShard(keras.optimizers.Adam(2e-3)),
            loss=loss,
            metrics=["accuracy"],
        )

    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 16).astype("float32")
    split = train_test_split(
        images, labels, train_size=22 * 64, test_size=6 * 64, random_state=0
    )
    train_images, test_images, train_labels, test_labels = split
    speed = Speed()
    model.fit(
        train_images,
        train_labels,
        batch_size=64,  # the global batch
        epochs=arguments.epochs,
        steps_per_epoch=arguments.steps,
        verbose="auto" if replicas.is_chief else 0,
        callbacks=[speed],
    )
    _, accuracy = model.evaluate(test_images, test_labels, batch_size=64, verbose=0)
    difference = replicas.largest_difference(model)
    if replicas.is_chief:
        print(f"backend                        {keras.config.backend()}")
        print(f"replicas                       {replicas.num_replicas}")
        print(f"accuracy on held-out digits    {accuracy:.3f}")
        per_second = speed.steps / speed.seconds if speed.steps else float("nan")
        print(f"steps per second               {per_second:.0f}")
        print(f"largest weight difference      {difference:g}")


if __name__ == "__main__":
    main()
