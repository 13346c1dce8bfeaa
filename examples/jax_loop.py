"""A custom training loop on JAX: `CrossShard` inside `shard_map`.

    python examples/jax_loop.py --replicas 4

Each device computes the gradients of its rows; `stateless_apply` averages them over the
axis "batch" and updates. Trains on handwritten digits, on several devices and on one.
Prints the largest difference between the weights, relative to the distance they moved.
"""

import argparse
import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import keras_shardopt as ks

BATCH_SIZE = 64


def trained(num_devices, images, labels):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(32, activation="tanh"),
            keras.layers.Dense(10),
        ]
    )
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Inside CrossShard, clipping uses the norm of the whole batch's gradient.
    optimizer = ks.CrossShard(
        ks.GradientClipping(keras.optimizers.SGD(0.2, momentum=0.9), 1.0), axis_name="batch"
    )
    optimizer.build(model.trainable_variables)

    def step(weights, state, x, y):
        def loss_of(weights):
            logits, _ = model.stateless_call(weights, [], x, training=True)
            return loss_fn(y, logits)

        loss, grads = jax.value_and_grad(loss_of)(weights)
        weights, state = optimizer.stateless_apply(state, grads, weights)
        return weights, state, jax.lax.pmean(loss, "batch")

    mesh = jax.sharding.Mesh(jax.devices()[:num_devices], ("batch",))
    # Without `check_vma`, each device's gradients arrive unreduced. With it, JAX has summed
    # them, and CrossShard divides by the number of devices.
    rows = P("batch")
    step = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P(), P(), rows, rows),
            out_specs=(P(), P(), P()),
            check_vma=False,
        )
    )
    start = [np.asarray(v.value) for v in model.trainable_variables]
    weights, state = start, [np.asarray(v.value) for v in optimizer.variables]
    losses = []
    for first in range(0, len(images), BATCH_SIZE):
        batch = slice(first, first + BATCH_SIZE)
        weights, state, loss = step(weights, state, images[batch], labels[batch])
        losses.append(float(loss))
    return start, [np.asarray(w) for w in weights], losses


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--replicas",
        type=int,
        default=4,
        help="number of devices (CPU devices if there are fewer accelerators)",
    )
    parser.add_argument("--steps", type=int, default=40, help="number of updates")
    arguments = parser.parse_args()
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", arguments.replicas)

    images, labels = load_digits(return_X_y=True)
    rows = np.arange(arguments.steps * BATCH_SIZE) % len(images)
    images, labels = (images[rows] / 16).astype("float32"), labels[rows]
    start, alone, _ = trained(1, images, labels)
    _, together, losses = trained(arguments.replicas, images, labels)
    movement = max(np.max(np.abs(a - s)) for a, s in zip(alone, start))
    difference = max(np.max(np.abs(a - t)) for a, t in zip(alone, together))
    print(f"replicas                   {arguments.replicas}")
    print(f"loss                       {losses[0]:.3f} to {losses[-1]:.3f}")
    print(f"relative difference        {difference / movement:.1e}")


if __name__ == "__main__":
    main()
