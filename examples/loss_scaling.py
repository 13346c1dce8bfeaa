"""float16 on several replicas: loss scaling for small gradients, and a skipped bad row.

    python examples/loss_scaling.py --replicas 4  # JAX, four CPU devices
    KERAS_BACKEND=tensorflow python examples/loss_scaling.py --replicas 2
    KERAS_BACKEND=torch torchrun --nproc-per-node 2 examples/loss_scaling.py

Trains a "mixed_float16" model on handwritten digits with a loss weight of 1e-6, so its
gradients underflow in float16. Then trains it again with `LossScaling`, and with one image
of infinities, on one replica in each epoch. Prints the accuracies, the number of skipped
updates, and the largest difference between replicas.
"""

import argparse
import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
from sklearn.datasets import load_digits

import keras_shardopt as ks

BATCH_SIZE = 64


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--replicas",
        type=int,
        help="number of replicas (default: all devices, or all torchrun processes)",
    )
    parser.add_argument("--epochs", type=int, default=10, help="number of epochs")
    parser.add_argument("--steps", type=int, default=22, help="steps per epoch")
    arguments = parser.parse_args()
    keras.utils.set_random_seed(1)

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    num_rows = min(arguments.steps, 22) * BATCH_SIZE
    held_out = images[22 * BATCH_SIZE :], labels[22 * BATCH_SIZE :]

    def trained(images, loss_scaling):
        with ks.data_parallel(arguments.replicas) as replicas:
            layers = [
                keras.Input((64,)),
                keras.layers.Dense(64, activation="relu", dtype="mixed_float16"),
                keras.layers.Dense(10, dtype="mixed_float16"),
            ]
            model = keras.Sequential(layers)
            optimizer = ks.CrossShard(
                ks.LossScaling(keras.optimizers.Adam(5e-3, epsilon=1e-12), loss_scaling)
            )
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(optimizer, loss, loss_weights=[1e-6], metrics=["accuracy"])
        x, y = images[:num_rows], labels[:num_rows]
        model.fit(x, y, batch_size=BATCH_SIZE, epochs=arguments.epochs, verbose=0)
        return model, replicas

    def accuracy(model):
        logits = keras.ops.convert_to_numpy(model(held_out[0]))
        return np.mean(logits.argmax(-1) == held_out[1])

    model, _ = trained(images, 1.0)
    unscaled = accuracy(model)
    images[100] = np.inf
    # 2**24 * 1e-6 is 17: these gradients are in float16's range.
    scaler = ks.AutomaticLossScaler("Backoff", {"scale_max": 2.0**24, "step_window": 50})
    model, replicas = trained(images, scaler)
    difference = replicas.largest_difference(model)
    scaled = accuracy(model)
    if replicas.is_chief:
        print(f"backend                    {keras.config.backend()}")
        print(f"replicas                   {replicas.num_replicas}")
        print(f"accuracy, not scaled       {unscaled:.3f}")
        print(f"accuracy, scaled           {scaled:.3f}")
        skipped, scale = model.optimizer.skipped_steps, model.optimizer.loss_scale
        print(f"skipped steps              {int(keras.ops.convert_to_numpy(skipped))}")
        print(f"loss scale                 {float(keras.ops.convert_to_numpy(scale)):.0f}")
        print(f"largest difference         {difference:g}")


if __name__ == "__main__":
    main()
