# %% [markdown]
# # Fine-tuning with LoRA, mixed precision and sharded state
#
# A small transformer learns to read upright digits, row by row. Then its weights are
# frozen, and low-rank adapters (LoRA) learn digits that lie on their side, on two
# replicas, in mixed precision, with half of the optimizer state on each.
#
# ```sh
# python examples/tutorials/lora.py                                             # JAX
# KERAS_BACKEND=tensorflow python examples/tutorials/lora.py
# KERAS_BACKEND=torch torchrun --nproc-per-node 2 examples/tutorials/lora.py
# ```
#
# The model is written with `keras.layers`. A backbone of KerasHub is used in the same
# way: `backbone.enable_lora(rank=4)` takes the place of the loop over layers below.

# %%
import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
from sklearn.datasets import load_digits

import keras_shardopt as ks

keras.utils.set_random_seed(4)
on_torch = keras.config.backend() == "torch"

images, labels = load_digits(return_X_y=True)
images = (images.reshape(-1, 8, 8) / 16).astype("float32")
on_their_side = images.transpose(0, 2, 1)
train, test = slice(0, 1472), slice(1472, 1728)  # whole batches of 64, which compile once

# %% [markdown]
# ## A small transformer
#
# Eight tokens, one for each row of an image. Under the policy "mixed_bfloat16" layers
# compute in bfloat16, and keep their weights in float32.


# %%
def transformer(width=32, num_blocks=1):
    layers = keras.layers
    inputs = keras.Input((8, 8))
    x = layers.Dense(width)(inputs)
    for _ in range(num_blocks):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(2, width // 2)(y, y)
        y = layers.LayerNormalization()(x)
        x = x + layers.Dense(width)(layers.Dense(2 * width, activation="gelu")(y))
    x = layers.Flatten()(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(10, dtype="float32")(x))


keras.config.set_dtype_policy("mixed_bfloat16")

# %% [markdown]
# ## The optimizer
#
# `shard_state=True` divides Adam's moments among the replicas. With "mixed_float16" on a
# GPU write `CrossShard(LossScaling(adam), shard_state=True)`: float16 needs a loss scale.


# %%
def compile_for_training(model, learning_rate):
    adam = keras.optimizers.AdamW(learning_rate)
    model.compile(
        optimizer=ks.CrossShard(adam, shard_state=True),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


def accuracy(model, data):
    return model.evaluate(data[test], labels[test], batch_size=64, verbose=0)[1]


with ks.data_parallel(num_replicas=None if on_torch else 2) as replicas:
    model = transformer()
    compile_for_training(model, 5e-3)

model.fit(images[train], labels[train], batch_size=64, epochs=6, verbose=0)
upright = accuracy(model, images)
before = accuracy(model, on_their_side)
ks.save_model(model, "pretrained.keras")

# %% [markdown]
# ## Adapters
#
# Fine-tuning starts from the file, as it would from one that was downloaded. A model
# trains on the replicas of the scope in which it is loaded. Everything is frozen but the
# attention and the last layer; `enable_lora(4)` puts two thin matrices next to a kernel,
# and trains those in its place. `compile` comes last, since the optimizer needs the new
# variables.

# %%
with ks.data_parallel(num_replicas=None if on_torch else 2) as replicas:
    model = keras.saving.load_model("pretrained.keras", compile=False)
    *body, _ = model.layers
    for layer in body:
        if isinstance(layer, keras.layers.MultiHeadAttention):
            layer.key_dense.trainable = layer.output_dense.trainable = False
            layer.query_dense.enable_lora(4)
            layer.value_dense.enable_lora(4)
        else:
            layer.trainable = False
    compile_for_training(model, 1e-2)

model.fit(on_their_side[train], labels[train], batch_size=64, epochs=6, verbose=0)
after = accuracy(model, on_their_side)

# %% [markdown]
# ## What came out
#
# A quarter of the weights was trained, and each replica held half of the optimizer state.
# All processes call `largest_difference` and `save_model` together. The file is one that
# plain Keras loads.

# %%
difference = replicas.largest_difference(model)
report = model.optimizer.memory_report()
ks.save_model(model, "lora.keras")
if replicas.is_chief:
    trained = sum(int(keras.ops.size(w)) for w in model.trainable_weights)
    print(f"backend                        {keras.config.backend()}")
    print(f"replicas                       {replicas.num_replicas}")
    print(f"accuracy, upright              {upright:.3f}")
    print(f"on their side, before          {before:.3f}")
    print(f"on their side, after           {after:.3f}")
    print(f"weights trained                {trained} of {model.count_params()}")
    print(f"share of the state held        {report.held[0] / report.whole:.2f}")
    print(f"difference between replicas    {difference:g}")
