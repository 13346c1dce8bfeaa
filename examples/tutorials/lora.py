# %% [markdown]
# # Fine-tuning with LoRA, mixed precision and sharded state
#
# KerasHub depends on TensorFlow on every backend. For a model without its tokenizers, as
# here, install `pip install --no-deps keras-hub`, and in addition
# `pip install regex tokenizers`.
#
# A small vision transformer from KerasHub learns to read upright digits. Then its weights
# are frozen, and low-rank adapters (LoRA) learn rotated digits: on two replicas, in mixed
# precision, with half of the optimizer state on each replica.
#
# ```sh
# python examples/tutorials/lora.py                                             # JAX
# KERAS_BACKEND=tensorflow python examples/tutorials/lora.py
# KERAS_BACKEND=torch torchrun --nproc-per-node 2 examples/tutorials/lora.py
# ```

# %%
import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import keras_hub
from sklearn.datasets import load_digits

import keras_shardopt as ks

keras.utils.set_random_seed(4)
on_torch = keras.config.backend() == "torch"

images, labels = load_digits(return_X_y=True)
images = (images.reshape(-1, 8, 8, 1) / 16).astype("float32")
on_their_side = images.transpose(0, 2, 1, 3)
train, test = slice(0, 1472), slice(1472, 1728)  # full batches of 64: one compilation

# %% [markdown]
# ## A backbone with random weights
#
# `ViTBackbone.from_preset(...)` downloads trained weights. This program needs no network,
# so it trains a small one below. The model divides an image into 16 patches, and its first
# output represents the whole image. Under the "mixed_bfloat16" policy, layers compute in
# bfloat16 and keep their weights in float32.


# %%
def classifier():
    backbone = keras_hub.models.ViTBackbone(
        image_shape=(8, 8, 1),
        patch_size=2,
        num_layers=1,
        num_heads=2,
        hidden_dim=32,
        mlp_dim=64,
        name="backbone",
    )
    inputs = keras.Input((8, 8, 1))
    outputs = keras.layers.Dense(10, dtype="float32")(backbone(inputs)[:, 0])
    return keras.Model(inputs, outputs)


keras.config.set_dtype_policy("mixed_bfloat16")

# %% [markdown]
# ## The optimizer
#
# `shard_state=True` divides Adam's moments among the replicas. With "mixed_float16" on a
# GPU use `CrossShard(LossScaling(adam), shard_state=True)`, because float16 needs a loss
# scale.


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
    model = classifier()
    compile_for_training(model, 5e-3)

model.fit(images[train], labels[train], batch_size=64, epochs=6, verbose=0)
upright = accuracy(model, images)
before = accuracy(model, on_their_side)
ks.save_model(model, "pretrained.keras")

# %% [markdown]
# ## Adapters
#
# Fine-tuning starts from a saved file, as it would from a downloaded one. A model trains on
# the replicas of the scope that loads it. `enable_lora(4)` freezes the backbone, adds two
# low-rank matrices to the kernels of queries and values, and trains these. The last layer
# stays trainable. Call `compile` last, because the optimizer needs the new variables.

# %%
with ks.data_parallel(num_replicas=None if on_torch else 2) as replicas:
    model = keras.saving.load_model("pretrained.keras", compile=False)
    model.get_layer("backbone").enable_lora(4)
    compile_for_training(model, 1e-2)

model.fit(on_their_side[train], labels[train], batch_size=64, epochs=6, verbose=0)
after = accuracy(model, on_their_side)

# %% [markdown]
# ## Result
#
# A tenth of the weights was trained, and each replica held half of the optimizer state.
# All processes call `largest_difference` and `save_model` together. Plain Keras can load
# the file.

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
