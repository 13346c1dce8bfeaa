import copy

import keras
import numpy as np
import pytest
from keras import ops
from support import golden, problem
from support.golden import TF1Momentum
from support.suites import some

import keras_shardopt as ks

o = keras.optimizers
CASES = golden.cases("mixed_precision")


def value(variable):
    return np.asarray(ops.convert_to_numpy(variable)).astype("float64")


def of_dtype(numbers, dtype):
    return ops.cast(ops.convert_to_tensor(np.array(numbers, "float32")), dtype)


def low(numbers, dtype="float16", name=None):
    return keras.Variable(of_dtype(numbers, dtype), dtype=dtype, name=name)


# -- the numbers of the original -----------------------------------------------------------------------------------

INNERS = {
    "sgd": lambda learning_rate: o.SGD(learning_rate),
    "momentum": lambda learning_rate, momentum: TF1Momentum(learning_rate, momentum),
    "adam": lambda learning_rate, beta1, beta2, epsilon: o.Adam(learning_rate, beta1, beta2, epsilon),
}
# Name of a slot in the original and in the stand-in.
SLOTS = {"momentum": "momentum", "m": "momentum", "v": "velocity"}


def scale_of(recorded):
    if isinstance(recorded, dict) and "algorithm" in recorded:
        # The original's LogMax, with its bugs.
        return ks.AutomaticLossScaler(**recorded, faithful=True)
    return np.float64(recorded["value"]) if isinstance(recorded, dict) else recorded


@pytest.mark.parametrize("id", some(CASES, 5, "jax", "tensorflow"))
def test_golden(id):
    case = CASES[id]
    inner = dict(case["inner"])
    optimizer = ks.MixedPrecision(INNERS[inner.pop("name")](**inner), scale_of(case["loss_scale"]))
    variables = {name: low(v["value"], v["dtype"], name) for name, v in case["variables"].items()}
    for name, factor in case.get("l2_regularizer", {}).items():
        variables[name].regularizer = keras.regularizers.L2(factor / 2)
    optimizer.build(list(variables.values()))
    for expected in case["outputs"]:
        grads = [of_dtype(expected["scaled_raw_grads"][name], v.dtype) for name, v in variables.items()]
        optimizer.apply(grads)
        for name, variable in variables.items():
            golden.assert_close(variable, expected["variables"][name], variable.dtype)
            if name in expected["masters"]:
                golden.assert_close(optimizer.get_slot(variable, "master"), expected["masters"][name])
        for path, recorded in expected.get("slots", {}).items():
            name, _, slot = path.partition("/")
            if slot in SLOTS:
                golden.assert_close(optimizer.get_slot(variables[name], SLOTS[slot]), recorded)
        assert int(value(optimizer.iterations)) == expected["global_step"]
        if case["loss_scale"] is not None:
            np.testing.assert_allclose(float(value(optimizer.loss_scale)), expected["loss_scale"], rtol=1e-5)


@pytest.mark.backends("tensorflow")
def test_golden_with_gradients_that_are_really_sparse():
    import tensorflow as tf

    case = CASES["sparse_gather_sgd"]
    variable = low(case["variables"]["e"]["value"])
    optimizer = ks.MixedPrecision(o.SGD(0.1), 128.0)
    for step, expected in zip(case["steps"], case["outputs"], strict=True):
        fed = step["e"]
        rows = tf.cast(128.0 * np.array(fed["coef"]), "float16")
        optimizer.apply([tf.IndexedSlices(rows, tf.constant(fed["indices"]), tf.constant([3, 2]))], [variable])
        golden.assert_close(variable, expected["variables"]["e"], "float16")
        golden.assert_close(optimizer.get_slot(variable, "master"), expected["masters"]["e"])


# -- masters -------------------------------------------------------------------------------------------------------


class Around(keras.layers.Layer):
    """Calls a function inside a layer, where Keras casts variables to the layer's compute dtype."""

    def call(self, *, function):
        function()


@pytest.mark.parametrize("dtype", some(["float16", "bfloat16"], ["bfloat16"], "jax", "tensorflow"))
@pytest.mark.parametrize("is_in_a_layer", [False, True])
def test_updates_too_small_for_the_weight_add_up(dtype, is_in_a_layer):
    weight, without = low([1.0, -2.0, 0.0], dtype), low([1.0, -2.0, 0.0], dtype)
    optimizer, plain = ks.MixedPrecision(o.SGD(1e-4)), o.SGD(1e-4)

    def train():
        for _ in range(100):
            optimizer.apply([ops.ones(3, dtype)], [weight])
            plain.apply([ops.ones(3, dtype)], [without])

    Around(dtype=f"mixed_{dtype}")(function=train) if is_in_a_layer else train()
    assert value(without)[0] == 1.0
    np.testing.assert_allclose(value(weight)[:2], [0.99, -2.01], rtol=4e-3)
    tolerance = 2e-3 if is_in_a_layer else 1e-5  # Keras rounds its learning rate there
    np.testing.assert_allclose(value(optimizer.get_slot(weight, "master")), [0.99, -2.01, -0.01], rtol=tolerance)


def test_which_variables_have_masters():
    weights = [low([1.0], name="half"), keras.Variable([1.0], name="single"), low([1.0], "bfloat16", name="brain")]
    optimizer = ks.CrossShard(ks.MixedPrecision(o.Adam(0.1)))
    assert optimizer.get_slot(weights[0], "master") is None
    optimizer.build(weights)
    assert optimizer.get_slot_names() == ["master", "momentum", "velocity"]
    for weight in weights:
        assert optimizer.get_slot(weight, "momentum").dtype == "float32"
    masters = [optimizer.get_slot(weight, "master") for weight in weights]
    assert masters[1] is None
    assert [m.path for m in masters[::2]] == ["half", "brain"]
    assert all(any(m is v for v in optimizer.variables) for m in masters[::2])
    assert len({v.path for v in optimizer.variables}) == len(optimizer.variables) == 2 + 6 + 2 + 1  # skipped_steps


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.exhaustive("jax", "tensorflow")
def test_masters_follow_whoever_sets_the_weights(compiled):
    keras.config.set_dtype_policy("bfloat16")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, use_bias=False)])
    model.compile(ks.MixedPrecision(o.SGD(1e-4)), "mse", run_eagerly=not compiled)
    x, y = np.eye(2, dtype="float32"), np.array([[9.0, 8.0], [7.0, 6.0]])
    model.set_weights([np.ones((2, 2))])
    model.fit(x, y, epochs=5, verbose=0)
    (weight,) = model.trainable_variables
    moved = value(model.optimizer.get_slot(weight, "master"))
    assert (moved > 1).all() and (moved < 1.01).all()  # its further bits are kept
    new = np.array([[1.0, 5.0], [1.0, 1.0]])  # of which one is something else than its master rounded
    model.set_weights([new])
    model.optimizer.learning_rate = 0.0
    model.fit(x, y, epochs=1, verbose=0)
    master = value(model.optimizer.get_slot(weight, "master"))
    assert master[0, 1] == 5.0
    np.testing.assert_array_equal(master.ravel()[[0, 2, 3]], moved.ravel()[[0, 2, 3]])
    np.testing.assert_array_equal(value(weight), new)


def test_a_weight_beyond_the_range_is_clamped():
    weight = low([60000.0, -60000.0])
    optimizer = ks.MixedPrecision(o.SGD(1e4), 1.0)
    optimizer.apply([of_dtype([-1.0, 1.0], "float16")], [weight])
    np.testing.assert_array_equal(value(weight), [65504, -65504])
    np.testing.assert_array_equal(value(optimizer.get_slot(weight, "master")), [70000, -70000])


@pytest.mark.parametrize("scale", [None, 128.0])
@pytest.mark.exhaustive("jax", "tensorflow")
def test_an_overflow_is_skipped_counted_and_leaves_nothing_behind(scale):
    """Of the original it left an infinite master, and 65504 in the weight."""
    weights, grads = [low([1.0, -2.0]), keras.Variable([3.0])], [[[0.5, 0.25], [2.0]], [[-0.5, 1.0], [1.0]]]
    optimizer = ks.MixedPrecision(o.Adam(0.125), scale)
    optimizer.build(weights)

    def update(half, single):
        optimizer.apply([of_dtype(half, "float16"), of_dtype(single, "float32")])
        return [value(v) for v in [*weights, *optimizer.variables] if v is not optimizer.skipped_steps]

    before = update(*grads[0])
    for bad in (np.inf, -np.inf, np.nan, 1e30):
        for half, single in ([[0.5, bad], [1.0]], [[0.5, 0.25], [bad]]):
            if abs(bad) != 1e30 or half[1] == bad:  # as a float16 it is infinite
                for now, then in zip(update(half, single), before):
                    np.testing.assert_array_equal(now, then)
    assert int(value(optimizer.skipped_steps)) == 7 and int(value(optimizer.iterations)) == 1
    after = update(*grads[1])
    reference = [low([1.0, -2.0]), keras.Variable([3.0])]
    never = ks.MixedPrecision(o.Adam(0.125), scale)
    never.build(reference)
    for half, single in grads:
        never.apply([of_dtype(half, "float16"), of_dtype(single, "float32")])
    expected = [value(v) for v in [*reference, *never.variables] if v is not never.skipped_steps]
    for now, then in zip(after, expected):
        np.testing.assert_array_equal(now, then)


def test_without_a_scale_nothing_is_checked_where_nothing_overflows():
    weight = low([1.0], "bfloat16")
    optimizer = ks.MixedPrecision(o.SGD(1.0))
    optimizer.apply([of_dtype([np.inf], "bfloat16")], [weight])
    assert np.isinf(value(weight)).all() and optimizer.skipped_steps == 0


@pytest.mark.exhaustive("jax", "tensorflow")
def test_constraints_decay_and_averages_work_on_the_masters():
    def made(dtype, wrap):
        weights = [keras.Variable(of_dtype([[3.0, 4.0]], dtype), dtype=dtype, name=name) for name in ("kernel", "bias")]
        weights[0].constraint = keras.constraints.MaxNorm(4.9, axis=1)
        inner = o.AdamW(0.01, weight_decay=0.1, use_ema=True, ema_momentum=0.5)
        optimizer = wrap(inner)
        optimizer.exclude_from_weight_decay(var_list=[weights[1]])
        optimizer.build(weights)
        for step in range(5):
            optimizer.apply([of_dtype([[0.5, -0.25 * step]], dtype)] * 2)
        return weights, optimizer

    exact, _ = made("float32", lambda inner: inner)
    weights, optimizer = made("float16", ks.MixedPrecision)
    for weight, reference in zip(weights, exact):
        np.testing.assert_allclose(value(optimizer.get_slot(weight, "master")), value(reference), rtol=1e-6)
        np.testing.assert_allclose(value(weight), value(reference), rtol=1e-3)
    optimizer.finalize_variable_values(weights)
    for weight in weights:
        average = optimizer.get_slot(weight, "average")
        np.testing.assert_array_equal(value(weight), value(average).astype("float16"))
        np.testing.assert_array_equal(value(optimizer.get_slot(weight, "master")), value(average))


@pytest.mark.exhaustive("jax", "tensorflow")
def test_rules_by_path_and_wrappers_inside_see_the_weights_names():
    keras.config.set_dtype_policy("float16")
    model = problem.model()
    inner = ks.GradientClipping(ks.VariableClipping(o.SGD(0.1), {".*hidden/kernel": [0]}, 0.01), 1.0)
    model.compile(ks.CrossShard(ks.MixedPrecision(inner)), "mse")
    x, y = problem.data(num_steps=1)
    model.fit(x, y, batch_size=16, verbose=0)
    assert (np.linalg.norm(value(model.trainable_variables[0]), axis=0) < 0.0101).all()
    assert np.linalg.norm(value(model.trainable_variables[2]), axis=0).max() > 0.1


# -- penalties -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "arguments"),
    some(
        [(scale, arguments) for scale in (None, 128.0) for arguments in ({}, {"run_eagerly": True})],
        lambda case: case == (128.0, {}),
        "jax",
        "tensorflow",
    ),
)
def test_the_gradient_of_a_penalty_is_exact_in_float32(scale, arguments):
    """1e-4 times 1e-4 vanishes in float16, also when it is scaled by 128 next to a gradient of 0."""
    keras.config.set_dtype_policy("float16")
    penalty = keras.regularizers.L2(0.5e-4)
    layers = [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_regularizer=penalty)]
    model = keras.Sequential(layers)
    model.compile(ks.MixedPrecision(o.SGD(1.0), scale), "mse", **arguments)
    (weight,) = model.trainable_variables
    model.optimizer.build([weight])
    weight.assign([[1e-4]])
    start = value(weight)
    zeros = np.zeros((4, 1), "float32")
    history = model.fit(zeros, zeros, epochs=3, verbose=0)
    np.testing.assert_allclose(value(model.optimizer.get_slot(weight, "master")), start * (1 - 1e-4) ** 3, rtol=3e-7)
    np.testing.assert_allclose(history.history["loss"][0], 0.5e-4 * start.item() ** 2, rtol=1e-5)


def test_penalties_count_once_from_the_first_step_on_and_return_with_another_optimizer():
    keras.config.set_dtype_policy("float16")

    def made():
        penalty = keras.regularizers.L2(0.5)
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_regularizer=penalty)])
        model.set_weights([np.array([[1.0]])])
        return model

    zeros = np.zeros((4, 1), "float32")
    model = made()
    for epochs, optimizer in ((3, ks.CrossShard(ks.MixedPrecision(o.SGD(0.5)))), (2, o.SGD(0.5))):
        model.compile(optimizer, "mse", run_eagerly=True)
        if keras.config.backend() == "tensorflow":  # cannot add a float16 penalty to a float32 loss before
            optimizer.build(model.trainable_variables)
        model.fit(zeros, zeros, epochs=epochs, verbose=0)
    np.testing.assert_allclose(model.get_weights()[0], [[0.5**5]])


def test_loops_of_ones_own_get_the_penalty_from_the_optimizer():
    weight = low([1.0])
    weight.regularizer = keras.regularizers.L1(0.25)
    optimizer = ks.MixedPrecision(o.SGD(1.0))
    optimizer.apply([ops.zeros(1, "float16")], [weight])
    assert value(weight) == [0.75]


# -- files ---------------------------------------------------------------------------------------------------------


def fitted(optimizer, epochs=2):
    keras.config.set_dtype_policy("bfloat16")
    x, y = problem.data(num_steps=2)
    model = problem.model()
    model.compile(optimizer, "mse")
    model.fit(x, y, batch_size=16, shuffle=False, verbose=0, epochs=epochs)
    return model


@pytest.mark.exhaustive("tensorflow")
def test_masters_are_saved_and_training_continues(tmp_path):
    x, y = problem.data(num_steps=2)
    model = fitted(ks.CrossShard(ks.MixedPrecision(o.Adam(1e-3))))
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    masters = [[value(m.optimizer.get_slot(v, "master")) for v in m.trainable_variables] for m in (model, loaded)]
    for a, b in zip(*masters):
        np.testing.assert_array_equal(a, b)
    loaded.fit(x, y, batch_size=16, shuffle=False, verbose=0, epochs=2)
    longer = fitted(ks.CrossShard(ks.MixedPrecision(o.Adam(1e-3))), epochs=4)
    for a, b in zip(loaded.trainable_variables, longer.trainable_variables):
        np.testing.assert_array_equal(
            value(loaded.optimizer.get_slot(a, "master")), value(longer.optimizer.get_slot(b, "master"))
        )
    # A plain optimizer reads the file too, and its own is read here, without masters.
    plain = problem.model()
    plain.compile(o.Adam(1e-3), "mse")
    plain.optimizer.build(plain.trainable_variables)
    plain.load_weights(tmp_path / "model.weights.h5")
    assert int(value(plain.optimizer.iterations)) == 4
    plain.save_weights(tmp_path / "plain.weights.h5")
    back = problem.model()
    back.compile(ks.MixedPrecision(o.Adam(1e-3)), "mse")
    back.optimizer.build(back.trainable_variables)
    back.load_weights(tmp_path / "plain.weights.h5")
    back.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    assert int(value(back.optimizer.iterations)) == 6


@pytest.mark.neutral
@pytest.mark.parametrize(("scale", "kept"), [(None, 0), (128.0, 0), ("Backoff", 3)])
def test_files_hold_the_counts_of_a_scale_that_changes_only(scale, kept):
    """Files of versions in which a scale that stays counted nothing fit; a file without the counts would not."""
    optimizer = ks.MixedPrecision(o.SGD(0.1), ks.AutomaticLossScaler(scale) if isinstance(scale, str) else scale)
    weight = low([1.0])
    optimizer.build([weight])
    assert int(value(optimizer.skipped_steps)) == 0
    stored = {}
    optimizer.wrapper_state.save_own_variables(stored)
    assert len(stored) == kept + 1  # and the master


def test_an_optimizer_that_was_never_built_is_saved_too(tmp_path):
    """It has a scale before it has masters; a file of the scale alone would not fit later."""
    keras.config.set_dtype_policy("bfloat16")
    model = problem.model()
    model.compile(ks.CrossShard(ks.MixedPrecision(o.Adam(1e-3), ks.AutomaticLossScaler())), "mse")
    model.save(tmp_path / "model.keras")
    for again in (keras.saving.load_model(tmp_path / "model.keras").optimizer, copy.deepcopy(model.optimizer)):
        if not again.built:
            again.build(model.trainable_variables)
        assert float(value(again.loss_scale)) == 2.0**14


@pytest.mark.filterwarnings("ignore:The file holds no optimizer state")
@pytest.mark.parametrize("build_first", some([True, False], [True], "jax", "tensorflow"))
@pytest.mark.exhaustive("jax", "tensorflow")
def test_masters_follow_a_file_without_an_optimizer(tmp_path, build_first):
    keras.config.set_dtype_policy("bfloat16")
    source = problem.model()
    source.set_weights([np.full(w.shape, 0.25) for w in source.get_weights()])
    source.save_weights(tmp_path / "source.weights.h5")
    model = problem.model()
    model.compile(ks.CrossShard(ks.MixedPrecision(o.SGD(1e-6), ks.AutomaticLossScaler())), "mse")
    if build_first:
        model.optimizer.build(model.trainable_variables)
    model.load_weights(tmp_path / "source.weights.h5")
    model.train_on_batch(*problem.data(num_steps=1))
    for variable in model.trainable_variables:
        np.testing.assert_allclose(value(model.optimizer.get_slot(variable, "master")), 0.25, atol=1e-5)


# -- training ------------------------------------------------------------------------------------------------------


# One step takes ten times as long on PyTorch.
SCALES = ["Backoff"] if keras.config.backend() == "torch" else [None, 128.0, "Backoff", "LogMax"]


@pytest.mark.exhaustive("jax", "tensorflow")
@pytest.mark.parametrize("scale", some(SCALES, ["Backoff"]))
@pytest.mark.exhaustive("torch")
def test_the_regression_of_the_original_within_a_hundredth(scale):
    """10x10 weights, Adam 0.05, 6000 steps, float16."""
    scale = ks.AutomaticLossScaler(scale) if isinstance(scale, str) else scale
    optimizer = ks.MixedPrecision(o.Adam(0.05), scale)
    random = np.random.default_rng(0)
    # float16 holds the sums of these products exactly, so that the error can become 0: the rate of 0.05 would magnify
    # any noise of rounding beyond a hundredth.
    truth = (random.integers(-64, 65, size=(10, 10)) / 64).astype("float16")
    x = random.integers(-1, 2, size=(32, 10)).astype("float16")
    start = np.zeros((10, 10), "float16")
    if keras.config.backend() == "torch":
        found = by_hand(optimizer, x, truth, start)
    else:
        keras.config.set_dtype_policy("float16")
        model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(10, use_bias=False)])
        model.compile(optimizer, "mse", steps_per_execution=100)
        y = x.astype("float32") @ truth.astype("float32")
        model.set_weights([start])
        model.fit(np.tile(x, (1000, 1)), np.tile(y, (1000, 1)), batch_size=32, epochs=6, verbose=0)
        found = model.trainable_variables[0]
    assert int(value(optimizer.iterations)) + int(value(optimizer.skipped_steps)) == 6000
    np.testing.assert_allclose(value(found), truth, atol=0.01)  # the criterion of the original's own test


def by_hand(optimizer, x, truth, start):
    """The same in a loop: PyTorch takes longer for the steps of `fit` than for the arithmetic."""
    import torch

    x, y = torch.tensor(x), torch.tensor(x) @ torch.tensor(truth)
    weight = low(start)
    optimizer.build([weight])
    with torch.no_grad():
        for _ in range(6000):
            error = x @ weight.value - y
            scaled = optimizer.scale_loss(torch.tensor(2.0 / y.numel()))
            optimizer.apply([x.T @ (error.float() * scaled).half()])
    return weight


def test_bfloat16_scope_restores_the_policy():
    keras.config.set_dtype_policy("float16")
    with pytest.raises(KeyError), ks.bfloat16_scope():
        assert keras.layers.Dense(1).dtype_policy.name == "mixed_bfloat16"
        raise KeyError
    assert keras.config.dtype_policy().name == "float16"


@pytest.mark.parametrize(
    ("scale", "error"), [("Backoff", TypeError), (True, TypeError), (0, ValueError), (float("inf"), ValueError)]
)
def test_wrong_scales(scale, error):
    with pytest.raises(error, match="`loss_scale` must be"):
        ks.MixedPrecision("sgd", scale)


def test_around_cross_shard_it_is_refused():
    with pytest.raises(ValueError, match=r"CrossShard\(MixedPrecision\("):
        ks.MixedPrecision(ks.CrossShard("sgd"))


@pytest.mark.parametrize("kind, expected", [("own step", True), ("step of Keras", False)])
def test_penalties_are_those_of_any_optimizer_that_a_step_of_its_own_may_use(kind, expected):
    class Asking(keras.Sequential):
        def ask(self):
            return self.asked()

        def asked(self):
            return self.layers[0].kernel.regularizer._owner_updates()

    class Own(Asking):
        def train_step(self, *arguments):
            return super().train_step(*arguments)

    dense = keras.layers.Dense(1, dtype="bfloat16", kernel_regularizer="l2")
    model = (Own if kind == "own step" else Asking)([keras.Input((2,)), dense])
    model.compile("sgd", "mse")
    model.another = [ks.CrossShard(ks.MixedPrecision(keras.optimizers.SGD(0.1)))]
    model.another[0].build(model.trainable_variables)
    assert model.ask() is expected
