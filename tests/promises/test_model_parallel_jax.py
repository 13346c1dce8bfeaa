"""JAX: `CrossShard` under `keras.distribution.ModelParallel` divides state among all devices of a mesh."""

import functools

import keras
import numpy as np
import pytest
from support.suites import some

import keras_shardopt as ks

pytestmark = pytest.mark.backends("jax")
jax = pytest.importorskip("jax", reason="about JAX, which is not installed")

ROWS, NUM_STEPS, BAD_STEP = 16, 4, 2
MESHES = ["2x2", "4x2", "2x4"]
"""The number of replicas, and the number of devices of each."""
SIZES = {"even": (16, 32, 40, 16), "uneven": (15, 20, 36, 4)}
"""Features, hidden units, words, width of the embedding. The uneven ones divide by 4, and not by 8."""

LAYOUTS = {
    "none": {},
    "columns": {"hidden/kernel": (None, "model"), "hidden/bias": ("model",), "words/embeddings": (None, "model")},
    "rows": {"out/kernel": ("model", None), "words/embeddings": ("model", None)},
    "mixed": {
        "hidden/kernel": (None, "model"),
        "hidden/bias": ("model",),
        "norm/(gamma|beta|moving_.*)": ("model",),
        "out/kernel": ("model", None),
        "words/embeddings": ("model", None),
    },
    "both": {"words/embeddings": ("batch", "model"), "out/kernel": ("batch", None)},  # divides weights as FSDP does
}
INNER = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    # With the usual epsilon, an update is the sign of a gradient, whose rounding errors it makes as large.
    "adam": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3),
    "chain": lambda: ks.LossScaling(ks.GradientClipping(keras.optimizers.Adam(0.01, epsilon=1e-3), 0.1), "Backoff"),
    "average": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3, use_ema=True, ema_momentum=0.5),
}
PLAIN = {**INNER, "chain": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3, global_clipnorm=0.1)}
ARGUMENTS = {
    "plain": {},
    "accumulates": {"gradient_accumulation_steps": 2},
    "skips": {"on_nonfinite": "skip"},
    "clips": {"replica_clipnorm": 100.0},
    "accumulates and clips": {"gradient_accumulation_steps": 2, "replica_clipnorm": 100.0},
}


def model_parallel(mesh, layout):
    sizes, *is_turned = mesh.split(", ")
    axes = list(zip(map(int, sizes.split("x")), ["batch", "model"]))[:: -1 if is_turned else 1]
    devices = [f"cpu:{i}" for i in range(axes[0][0] * axes[1][0])]
    layouts = keras.distribution.LayoutMap(keras.distribution.DeviceMesh(*zip(*axes), devices))
    for path, axes in LAYOUTS[layout].items():
        layouts[path] = axes
    keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch"))


def compiled(optimizer, sizes, synchronized=False):
    num_features, width, num_words, length = SIZES[sizes]
    x, words = keras.Input((num_features,)), keras.Input((2,), dtype="int32")
    vectors = keras.layers.Embedding(num_words, length, name="words")(words)
    y = keras.layers.Concatenate()([x, keras.layers.Flatten()(vectors)])
    y = keras.layers.Dense(width, activation="tanh", name="hidden")(y)
    y = keras.layers.BatchNormalization(momentum=0.8, synchronized=synchronized, name="norm")(y)
    model = keras.Model([x, words], keras.layers.Dense(3, name="out")(y))
    random = np.random.default_rng(5)
    for weight in model.trainable_variables:
        if weight.name != "gamma":
            weight.assign(random.normal(size=weight.shape).astype("float32") * 0.3)
    model.compile(optimizer, "mse")
    return model


def fitted(model, sizes, steps=range(NUM_STEPS), bad=None):
    random, rows = np.random.default_rng(8), ROWS * NUM_STEPS
    num_features, _, num_words, _ = SIZES[sizes]
    x = random.normal(size=(rows, num_features)).astype("float32")
    words = random.integers(0, num_words, size=(rows, 2)).astype("int32")
    y = np.tanh(x[:, :3]) * np.linspace(0.3, 1.8, rows, dtype="float32")[:, None]
    if bad is not None:
        x[bad * ROWS] = np.nan
    taken = np.concatenate([np.arange(step * ROWS, (step + 1) * ROWS) for step in steps])
    model.fit([x[taken], words[taken]], y[taken], batch_size=ROWS, shuffle=False, verbose=0)
    return model


@functools.cache
def trained_without_package(inner, accumulates, skips, sizes):
    """Return the weights before and after training with Keras alone, on one device."""
    optimizer = PLAIN[inner]()
    if accumulates:
        optimizer = type(optimizer).from_config({**optimizer.get_config(), "gradient_accumulation_steps": 2})
    model = compiled(optimizer, sizes)
    steps = [step for step in range(NUM_STEPS) if not skips or step != BAD_STEP]
    start = model.get_weights()
    return start, fitted(model, sizes, steps).get_weights()


def places(model):
    """Return the part of each variable that each device holds."""
    values = [variable.value for variable in [*model.variables, *model.optimizer.variables]]
    return [value.sharding.devices_indices_map(value.shape) for value in values]


def bytes_on_each_device(optimizer):
    own = {id(v) for v in optimizer._variables}
    shards = [s for v in optimizer.variables if id(v) not in own for s in v.value.addressable_shards]
    devices = sorted({shard.device for shard in shards}, key=lambda device: device.id)
    return [sum(shard.data.nbytes for shard in shards if shard.device == device) for device in devices]


BY_DEFAULT = [
    ("4x2", "mixed", "even", "chain", "skips"),
    ("4x2, model first", "columns", "uneven", "momentum", "accumulates and clips"),
]
CASES = [  # in which each two levels meet: of a mesh (of the last two only with one layout), a layout, and so on
    *BY_DEFAULT,
    ("2x2", "none", "even", "momentum", "plain"),
    ("2x2", "rows", "uneven", "chain", "skips"),
    ("2x2", "mixed", "even", "average", "accumulates and clips"),
    ("2x2", "both", "even", "average", "accumulates"),
    ("2x2", "columns", "even", "adam", "skips"),
    ("2x2", "mixed", "uneven", "adam", "plain"),
    ("4x2", "both", "uneven", "average", "plain"),
    ("4x2", "rows", "even", "adam", "accumulates and clips"),
    ("4x2", "columns", "even", "chain", "accumulates"),
    ("4x2", "mixed", "uneven", "momentum", "clips"),
    ("4x2", "rows", "uneven", "momentum", "accumulates"),
    ("4x2", "none", "uneven", "chain", "clips"),
    ("2x4", "rows", "even", "average", "clips"),
    ("2x4", "mixed", "uneven", "adam", "accumulates"),
    ("2x4", "both", "even", "momentum", "skips"),
    ("2x4", "none", "uneven", "chain", "plain"),
    ("2x4", "columns", "uneven", "chain", "accumulates and clips"),
    ("2x4", "rows", "uneven", "adam", "plain"),
    ("4x2, model first", "columns", "uneven", "average", "skips"),
    ("4x2, model first", "columns", "uneven", "adam", "clips"),
    ("4x2, model first", "columns", "uneven", "chain", "accumulates"),
    ("4x2, model first", "columns", "uneven", "chain", "plain"),
    ("1x4", "columns", "uneven", "momentum", "plain"),
]


@pytest.mark.parametrize(("mesh", "layout", "sizes", "inner", "arguments"), some(CASES, BY_DEFAULT))
@pytest.mark.filterwarnings("ignore:.*accumulates gradients that are already averaged")
def test_training_equals_that_of_keras_on_one_device(mesh, layout, sizes, inner, arguments):
    start, expected = trained_without_package(inner, "accumulates" in arguments, arguments == "skips", sizes)
    model_parallel(mesh, layout)
    is_prepared = "clips" in arguments
    optimizer = ks.CrossShard(INNER[inner](), shard_state=True, **ARGUMENTS[arguments])
    model = compiled(optimizer, sizes, synchronized=is_prepared)
    if is_prepared:
        ks.prepare(model)
    optimizer.build(model.trainable_variables)
    placed = places(model)
    fitted(model, sizes, bad=BAD_STEP if arguments == "skips" else None)
    moved = max(float(np.max(np.abs(w - s))) for w, s in zip(expected, start))
    difference = max(float(np.max(np.abs(w - e))) for w, e in zip(model.get_weights(), expected))
    print("difference", difference, "moved", moved)
    assert moved > 0.02 and difference <= 1e-6 * max(moved, 1)
    assert places(model) == placed
    report = optimizer.memory_report()
    assert report.held == bytes_on_each_device(optimizer)
    # Optimizers with averages of weights are not padded: JAX divides only what the number of devices divides.
    not_padded = 3.2 if mesh == "4x2, model first" else 2.1
    assert report.max_over_ideal <= (not_padded if inner == "average" else 1.1)


SHARES = [(60, mesh, layout) for mesh in [*MESHES, "1x4"] for layout in LAYOUTS]
SHARES += [(64, [*MESHES, "1x4"][i % 4], layout) for i, layout in enumerate(LAYOUTS)]
SHARES_BY_DEFAULT = [(60, "1x4" if layout in ("columns", "mixed") else "2x4", layout) for layout in LAYOUTS]


@pytest.mark.parametrize(("width", "mesh", "layout"), some(SHARES, SHARES_BY_DEFAULT))
def test_every_device_holds_an_equal_share(mesh, layout, width):
    """A width of 60 divides by 4, and not by 8."""
    model_parallel(mesh, layout)
    x, words = keras.Input((64,)), keras.Input((), dtype="int32")
    y = keras.layers.Dense(width, name="hidden")(x) + keras.layers.Embedding(200, width, name="words")(words)
    y = keras.layers.BatchNormalization(name="norm")(y)
    model = keras.Model([x, words], keras.layers.Dense(3, name="out")(y))
    optimizer = ks.CrossShard("adam", shard_state=True, gradient_accumulation_steps=2)
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    report = optimizer.memory_report()
    assert report.held == bytes_on_each_device(optimizer)
    assert report.max_over_ideal <= 1.02, str(report)


def test_own_gradients_of_replicas_are_computed_once_per_replica():
    """The devices of a replica divide the computation of a prepared step; none repeats that of another."""
    flops = []
    for arguments in ({}, {"replica_clipnorm": 1.0}):
        model_parallel("2x4", "none")
        layouts = keras.distribution.distribution()._layout_map
        layouts[".*kernel"] = (None, "model")
        model = keras.Sequential([keras.Input((64,)), *[keras.layers.Dense(64) for _ in range(3)]])
        model.compile(ks.CrossShard("sgd", **arguments), "mse")
        ks.prepare(model)
        data = np.ones((64, 64), "float32"), np.ones((64, 64), "float32")
        model.train_on_batch(*data)
        variables = [model.trainable_variables, [], model.optimizer.variables, model.metrics_variables]
        state = [[variable.value for variable in each] for each in variables]
        flops.append(jax.jit(model.train_step).lower(state, data).compile().cost_analysis()["flops"])
    assert flops[1] < 1.5 * flops[0]


# -- files ------------------------------------------------------------------------------------------------------------


def set_world(name, layout):
    if name == "one device":
        keras.distribution.set_distribution(None)
    elif name == "DataParallel":
        keras.distribution.set_distribution(keras.distribution.DataParallel(devices=[f"cpu:{i}" for i in range(4)]))
    else:
        model_parallel(name, layout)


def built(inner, sizes):
    model = compiled(ks.CrossShard(INNER[inner](), shard_state=True), sizes)
    model.optimizer.build(model.trainable_variables)
    return model


def state_of(model):
    store = {}
    model.optimizer.save_own_variables(store)
    return [*model.get_weights(), *(np.asarray(store[str(i)]) for i in range(len(store)))]


SAVE = {
    "sharded": lambda model, path: ks.save_sharded(model, path),
    "weights": lambda model, path: ks.save_weights(model, path / "file.weights.h5"),
    "model": lambda model, path: ks.save_model(model, path / "file.keras"),
}
WORLDS = [("4x2", "mixed"), ("2x4", "rows"), ("DataParallel", ""), ("one device", "")]
SAVED = ["momentum", "adam", "chain"]
FILES = [
    (*world, kind, SAVED[(2 * w + 2 * k + 1) % 3]) for w, world in enumerate(WORLDS) for k, kind in enumerate(SAVE)
]
FILES_BY_DEFAULT = [("2x4", "rows", "sharded", "momentum"), ("one device", "", "model", "chain")]


@pytest.mark.parametrize(("world", "layout", "kind", "inner"), some(FILES, FILES_BY_DEFAULT))
def test_files_fit_any_mesh(tmp_path, world, layout, kind, inner):
    sizes = "even" if inner == "chain" else "uneven"
    model_parallel("2x2", "columns")
    model = fitted(built(inner, sizes), sizes)
    SAVE[kind](model, tmp_path)
    saved = state_of(model)
    expected = fitted(model, sizes).get_weights()
    set_world(world, layout)
    model = built(inner, sizes)
    placed = places(model)
    if kind == "sharded":
        ks.load_sharded(model, tmp_path)
    elif kind == "weights":
        model.load_weights(tmp_path / "file.weights.h5")
    else:
        model = keras.saving.load_model(tmp_path / "file.keras")
    assert places(model) == placed
    for restored, array in zip(state_of(model), saved, strict=True):
        np.testing.assert_array_equal(restored, array)
    for weight, other in zip(fitted(model, sizes).get_weights(), expected):
        np.testing.assert_allclose(weight, other, rtol=0, atol=1e-6)
