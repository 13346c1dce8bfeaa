# %% [markdown]
# # Handwritten digits on four replicas
#
# One program trains the same small network twice, on one replica and on four, with the
# same final weights. Run the cells in order, as a script or in an editor that supports
# `# %%` cells:
#
# ```sh
# python examples/tutorials/digits.py                                           # JAX
# KERAS_BACKEND=tensorflow python examples/tutorials/digits.py
# KERAS_BACKEND=torch torchrun --nproc-per-node 4 examples/tutorials/digits.py
# ```
#
# JAX and TensorFlow use four CPU devices here, so no accelerator is needed. On PyTorch a
# replica is a process, and `torchrun` starts four.

# %%
import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
from sklearn.datasets import load_digits

import keras_shardopt as ks

images, labels = load_digits(return_X_y=True)
images = (images.reshape(-1, 8, 8, 1) / 16).astype("float32")
train_images, test_images = images[:1500], images[1500:]
train_labels, test_labels = labels[:1500], labels[1500:]

# %% [markdown]
# ## The model
#
# The model does not depend on replicas. Equal seeds give equal initial weights.


# %%
def build_model():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def compiled(model, optimizer):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    return model


# %% [markdown]
# ## Four replicas
#
# Two lines make the training data-parallel: the scope around the creation and `compile` of
# the model, and `CrossShard` around the optimizer. Enter the scope first, because JAX and
# TensorFlow create their devices at first use.

# %%
on_torch = keras.config.backend() == "torch"

with ks.data_parallel(num_replicas=None if on_torch else 4) as replicas:
    model = compiled(build_model(), ks.CrossShard(keras.optimizers.Adam(2e-3)))

# %% [markdown]
# `fit` gets the whole data and the global batch size. 1500 rows make 23 batches of 64 and
# one batch of 28. Like the others it is divided among the replicas: 7 rows each.


# %%
def train(model, verbose):
    return model.fit(
        train_images,
        train_labels,
        batch_size=64,
        epochs=5,
        validation_data=(test_images, test_labels),
        verbose=verbose,
    )


history = train(model, verbose=2)
difference = replicas.largest_difference(model)

# %% [markdown]
# ## One replica, for comparison
#
# The same model with a plain Adam, on all rows. `close()` ends the scope of the four
# replicas, and the rest of the program is ordinary Keras.
#
# On PyTorch each of the four processes trains this model independently, with the same
# result.

# %%
weights = model.get_weights()
four = replicas.num_replicas
rank_0 = replicas.is_chief
replicas.close()

alone = compiled(build_model(), keras.optimizers.Adam(2e-3))
train(alone, verbose=0)
pairs = zip(weights, alone.get_weights())
apart = max(float(np.abs(a - b).max()) for a, b in pairs)

# %% [markdown]
# ## Result
#
# The weights of the four replicas are bitwise identical. Those of one replica differ by
# rounding, because sums have another order.

# %%
if rank_0:
    print(f"backend                        {keras.config.backend()}")
    print(f"replicas                       {four}")
    print(f"accuracy on held-out digits    {history.history['val_accuracy'][-1]:.3f}")
    print(f"difference between replicas    {difference:g}")
    print(f"difference to one replica      {apart:.1e}")
