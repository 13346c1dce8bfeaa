"""Training steps in each mode, compiled for hardware that is not here.

    python tests/compiled/modes.py [mode or target ...]     prints the table of docs/compiled.md

Needs JAX, `libtpu`, `jax-cuda12-plugin` and `jax-cuda12-pjrt`; runs on 8 CPU devices.
"""

import functools
import os
import sys

if __name__ == "__main__":
    os.environ["KERAS_BACKEND"] = "jax"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import keras
import numpy as np

import keras_shardopt as ks
from keras_shardopt.compile_for import targets
from keras_shardopt.compile_for.jax import step as steps

TARGETS = ("tpu:v5e:2x4", "h100:8")
WIDTH, NUM_LAYERS, ROWS = 512, 3, 512


@keras.saving.register_keras_serializable("tests")
def unchanged(grads, variables):
    return grads


def dense(normalized=False, dtype=None):
    layers = [keras.Input((WIDTH,))]
    for _ in range(NUM_LAYERS):
        layers.append(keras.layers.Dense(WIDTH, activation="relu", dtype=dtype))
        if normalized:
            layers.append(keras.layers.BatchNormalization(synchronized=True))
    return keras.Sequential([*layers, keras.layers.Dense(WIDTH, dtype=dtype)])


def embedding():
    layers = [keras.layers.Embedding(4096, 64), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(WIDTH)]
    return keras.Sequential([keras.Input((16,), dtype="int32"), *layers])


def transformer():
    x = keras.Input((16, 128))
    y = keras.layers.LayerNormalization()(x)
    x_1 = x + keras.layers.MultiHeadAttention(4, 32)(y, y)
    y = keras.layers.Dense(512, activation="gelu")(keras.layers.LayerNormalization()(x_1))
    return keras.Model(x, keras.layers.Dense(128)(y) + x_1)


def cross(**options):
    return lambda inner: ks.CrossShard(inner, **options)


# The model, and what stands around Adam; None for plain Keras under a `DataParallel`.
MODES = {
    "Keras": (dense, None),
    "plain": (dense, cross()),
    "shard_state": (dense, cross(shard_state=True)),
    "shard_state, replica_transform": (dense, cross(shard_state=True, replica_transform=unchanged)),
    "accumulation": (dense, cross(gradient_accumulation_steps=4)),
    "accumulation, shard_state": (dense, cross(gradient_accumulation_steps=4, shard_state=True)),
    "on_nonfinite": (dense, cross(on_nonfinite="skip")),
    "on_nonfinite, shard_state": (dense, cross(on_nonfinite="skip", shard_state=True)),
    "bfloat16": (dense, cross(compression="bfloat16")),
    "Int8": (dense, cross(compression=ks.compression.Int8())),
    "MixedPrecision": (
        functools.partial(dense, dtype="bfloat16"),
        lambda inner: ks.CrossShard(ks.MixedPrecision(inner)),
    ),
    "LossScaling": (dense, lambda inner: ks.CrossShard(ks.LossScaling(inner))),
    "GradientClipping": (dense, lambda inner: ks.CrossShard(ks.GradientClipping(inner, 1.0))),
    "BatchNormalization": (functools.partial(dense, normalized=True), cross()),
    "sync_every": (dense, cross(sync_every=4)),
    "virtual_replicas": (dense, cross(virtual_replicas=8)),
    "Keras, embedding": (embedding, None),
    "embedding": (embedding, cross()),
    "Keras, transformer": (transformer, None),
    "transformer": (transformer, cross()),
}


@functools.cache
def compiled(mode, target):
    """The step of a mode as the target's compiler makes it."""
    build, around = MODES[mode]

    def train():
        if around is None:
            devices = keras.distribution.list_devices()
            keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
            model = build()
            model.compile(keras.optimizers.Adam(), "mse")
        else:
            with ks.data_parallel():
                model = build()
                model.compile(around(keras.optimizers.Adam()), "mse")
        x = np.zeros((ROWS, *model.input_shape[1:]), model.inputs[0].dtype)
        y = np.zeros((ROWS, *model.output_shape[1:]), "float32")
        model.fit(x, y, batch_size=ROWS, verbose=0)

    before = keras.distribution.distribution()
    try:
        step = steps.first_step(train, targets.parse(target))
    finally:
        keras.distribution.set_distribution(before)
    return steps.compiled(step, targets.parse(target))


def total(compiled, kind, in_branch=None):
    """The bytes of all collectives of a kind."""
    return sum(
        each.num_bytes for each in compiled.collectives if each.kind == kind and in_branch in (None, each.in_branch)
    )


def row(mode, target):
    """A line of the table."""
    made = compiled(mode, target)
    kinds = sorted({(each.kind, each.in_branch) for each in made.collectives})
    sent = ", ".join(
        f"{sum(e.kind == kind and e.in_branch == inside for e in made.collectives)} {kind}"
        f"{' in a branch' if inside else ''} {total(made, kind, inside) / 1e6:.3f}"
        for kind, inside in kinds
    )
    donated = made.aliased / made.output
    return (
        f"| {mode} | {target} | {sent} | {donated:.2%} | {made.arguments / 1e6:.2f} | {made.temporary / 1e6:.2f} "
        f"| {made.seconds:.1f} |"
    )


def main(chosen):
    print("| mode | target | collectives, MB | donated | arguments, MB | temporary, MB | seconds |")
    print("|---|---|---|---|---|---|---|")
    modes, wanted = [name for name in chosen if name in MODES], [name for name in chosen if name not in MODES]
    for mode in modes or MODES:
        for target in wanted or TARGETS:
            try:
                print(row(mode, target), flush=True)
            except Exception as error:
                print(
                    f"| {mode} | {target} | {type(error).__name__}: {' '.join(str(error).split())[:200]} |", flush=True
                )


if __name__ == "__main__":
    main(sys.argv[1:])
