# %% [markdown]
# # A GAN: two optimizers in a custom training loop
#
# Two networks train against each other. The generator maps noise to points of the plane.
# The discriminator classifies points as real (from the data, a ring) or generated. Each
# network has its own optimizer, so `fit` is not enough. Two training steps of
# `optimize_loss` train them on every backend and on any number of replicas.
#
# ```sh
# python examples/tutorials/gan.py                                              # JAX
# KERAS_BACKEND=tensorflow python examples/tutorials/gan.py
# KERAS_BACKEND=torch torchrun --nproc-per-node 2 examples/tutorials/gan.py
# ```

# %%
import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
from keras import ops

import keras_shardopt as ks

keras.utils.set_random_seed(2)
on_torch = keras.config.backend() == "torch"

# %% [markdown]
# ## The data
#
# Points near the circle of radius 1, and random noise. Every process draws the same
# numbers, and takes its own part of each batch: a custom loop divides its data itself,
# with `shard_data` or as here. On JAX and TensorFlow one process has all replicas, and
# passes the rows of all of them to each step.

# %%
random = np.random.default_rng(3)


def batch(num_rows=128):
    angle = random.uniform(0, 2 * np.pi, (num_rows, 1))
    radius = random.normal(1, 0.05, (num_rows, 1))
    points = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], 1)
    noise = random.normal(size=(num_rows, 4))
    return points.astype("float32"), noise.astype("float32")


# %% [markdown]
# ## Two networks, two steps
#
# A step is a function of the batch: it computes the loss and the gradients for the
# variables in `var_list`, and updates them. `on_horovod=True` puts a `CrossShard` around
# the optimizer to average gradients over the replicas. (OpenSeq2Seq has an argument of
# this name.)


# %%
def network(num_inputs, num_outputs):
    dense = keras.layers.Dense
    hidden = [dense(64, "leaky_relu"), dense(64, "leaky_relu")]
    return keras.Sequential([keras.Input((num_inputs,)), *hidden, dense(num_outputs)])


error = keras.losses.BinaryCrossentropy(from_logits=True)

with ks.data_parallel(num_replicas=None if on_torch else 2) as replicas:
    generator, discriminator = network(4, 2), network(2, 1)

    def discriminator_loss(points, noise):
        """Trains the discriminator to return 1 for data and 0 for generated points."""
        made = ops.stop_gradient(generator(noise))
        real, fake = discriminator(points), discriminator(made)
        return error(ops.ones_like(real), real) + error(ops.zeros_like(fake), fake)

    def generator_loss(points, noise):
        """Trains the generator: the discriminator should return 1 for its points."""
        fake = discriminator(generator(noise))
        return error(ops.ones_like(fake), fake)

    how = {
        "optimizer": "Adam",
        "optimizer_params": {"beta_1": 0.5},
        "learning_rate_decay_fn": 2e-3,
        "on_horovod": True,
    }
    train_discriminator = ks.optimize_loss(
        discriminator_loss, var_list=discriminator.trainable_variables, **how
    )
    train_generator = ks.optimize_loss(
        generator_loss, var_list=generator.trainable_variables, **how
    )

# %% [markdown]
# ## The loop
#
# Rank r of N takes every N-th row, starting with row r.

# %%
rows = slice(replicas.process_id, None, replicas.num_processes)


def radii():
    """Distances of 512 generated points from the origin."""
    noise = np.random.default_rng(0).normal(size=(512, 4)).astype("float32")
    return np.linalg.norm(ops.convert_to_numpy(generator(noise)), axis=1)


before = radii()
for _ in range(500):
    points, noise = batch()
    train_discriminator(points[rows], noise[rows])
    train_generator(points[rows], noise[rows])
after = radii()

# %% [markdown]
# ## Result
#
# Generated points were scattered over the plane, and now lie near the ring. Both networks
# are equal on all replicas.

# %%
differences = [replicas.largest_difference(m) for m in (generator, discriminator)]
if replicas.is_chief:
    print(f"backend                        {keras.config.backend()}")
    print(f"replicas                       {replicas.num_replicas}")
    print(f"distance to the ring, before   {np.abs(before - 1).mean():.3f}")
    print(f"distance to the ring, after    {np.abs(after - 1).mean():.3f}")
    print(f"difference between replicas    {max(differences):g}")
