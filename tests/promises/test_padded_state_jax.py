"""JAX: `shard_state` divides state evenly for any number of devices, also if no dimension of a variable divides."""

import itertools

import keras
import numpy as np
import pytest
from support.suites import some

import keras_shardopt as ks

pytestmark = pytest.mark.backends("jax")
jax = pytest.importorskip("jax", reason="about JAX, which is not installed")

WIDTHS = (32, 16, 8)  # powers of two: nothing divides by 3, 6 or 7


@keras.saving.register_keras_serializable("tests")
def halved(grads, variables):
    return [None if grad is None else grad / 2 for grad in grads]


@keras.saving.register_keras_serializable("tests")
class Halving(keras.optimizers.SGD):
    """Puts other weights in place when training ends."""

    def finalize_variable_values(self, var_list):
        for variable in var_list:
            variable.assign(variable / 2)


@keras.saving.register_keras_serializable("tests")
class AsLargeAsTheFirst(keras.optimizers.SGD):
    """Steps of all variables as large as the mean step of the first, of which elements that are padding would count."""

    def build(self, variables):
        super().build(variables)
        self.size = self.add_variable((), name="size")

    def update_step(self, gradient, variable, learning_rate):
        if self._get_variable_index(variable) == 0:
            self.assign(self.size, keras.ops.mean(keras.ops.abs(gradient)))
        self.assign_sub(variable, learning_rate * keras.ops.sign(gradient) * self.size)


def compiled(optimizer, widths=WIDTHS):
    hidden = [keras.layers.Dense(width, activation="tanh") for width in widths[1:]]
    model = keras.Sequential([keras.Input((widths[0],)), *hidden])
    random = np.random.default_rng(3)
    model.set_weights([random.normal(size=w.shape).astype("float32") * 0.3 for w in model.weights])
    model.compile(optimizer, "mse")
    return model


def fitted(model, num_steps=4, rows=42, epochs=1):
    random = np.random.default_rng(8)
    x = random.normal(size=(rows * num_steps, model.input_shape[1])).astype("float32")
    y = np.tanh(x[:, : model.output_shape[1]]) * np.linspace(0.3, 2, len(x), dtype="float32")[:, None]
    model.fit(x, y, batch_size=rows, shuffle=False, verbose=0, epochs=epochs)
    return model


def momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9)


ARGUMENTS = {
    "plain": {},
    "own gradients": {"replica_transform": halved},
    "accumulates": {"gradient_accumulation_steps": 2},
    "skips": {"on_nonfinite": "skip"},
    "bfloat16": {"compression": "bfloat16"},
    "Int8": {"compression": ks.compression.Int8()},
}
INNER = {
    "momentum": momentum,
    "decaying": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "wrapped": lambda: ks.LossScaling(ks.GradientClipping(keras.optimizers.Adam(0.01), 0.1), "Backoff"),
    "finalized": lambda: Halving(0.05, momentum=0.9),
    "master": lambda: ks.MixedPrecision(keras.optimizers.Adam(0.01)),
}
CASES = [(name, "momentum", 3) for name in ARGUMENTS] + [("plain", name, 6) for name in INNER]
BY_DEFAULT = [
    *[("plain", name, 6) for name in ("wrapped", "finalized")],
    ("accumulates", "momentum", 3),
]


@pytest.mark.parametrize(("arguments", "inner", "num_replicas"), some(CASES, BY_DEFAULT))
def test_weights_are_those_of_whole_state(arguments, inner, num_replicas):
    results = []
    with ks.data_parallel(num_replicas):
        for shard_state in (False, True):
            options = {"shard_state": shard_state, **ARGUMENTS[arguments]}
            results.append(fitted(compiled(ks.CrossShard(INNER[inner](), **options))))
    whole, divided = results
    report = divided.optimizer.memory_report()
    assert report.max_over_ideal < 1.05 < whole.optimizer.memory_report().max_over_ideal  # of a small model
    moved = max(np.abs(w - s).max() for w, s in zip(whole.get_weights(), compiled(momentum()).get_weights()))
    for mine, theirs in zip(divided.get_weights(), whole.get_weights()):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6 * moved + 6e-8)  # and a rounding of the weight


@pytest.mark.parametrize("by_name", some([True, False], [False]), ids=["name", "variable"])
def test_variables_excluded_before_building_do_not_decay(by_name):
    with ks.data_parallel(3):
        optimizer = ks.CrossShard(keras.optimizers.AdamW(0.1, weight_decay=0.5), shard_state=True)
        weights = compiled(optimizer).trainable_variables
        left_out = [1, 3] if by_name else [0, 3]
        arguments = {"var_names": ["bias"]} if by_name else {"var_list": [weights[i] for i in left_out]}
        for weight in weights:
            weight.assign(np.ones(weight.shape, "float32"))
        optimizer.exclude_from_weight_decay(**arguments)
        optimizer.build(weights)
        values = [[v.value for v in variables] for variables in (optimizer.variables, weights)]
        zeros = [np.zeros(w.shape, "float32") for w in weights]  # without gradients, only decay moves a weight
        found, _ = jax.jit(optimizer.stateless_apply)(values[0], zeros, values[1])
    for i, value in enumerate(found):
        expected = np.full(value.shape, 1 if i in left_out else 1 - 0.1 * 0.5)
        np.testing.assert_allclose(np.asarray(value), expected, rtol=1e-6)


@pytest.mark.parametrize("num_replicas", some([2, 3, 4, 6, 8], [3]))
@pytest.mark.parametrize("widths", [(64, 64, 64), (50, 30, 10)])
def test_every_number_of_replicas_holds_an_equal_share(num_replicas, widths):
    with ks.data_parallel(num_replicas):
        optimizer = ks.CrossShard(keras.optimizers.Adam(), shard_state=True)
        model = compiled(optimizer, widths)
        optimizer.build(model.trainable_variables)
        axes = optimizer.pipeline.reducer.dividing_axes(model.trainable_variables)
    # No replica gets more of a gradient than its share, but for a bias that is too small to matter.
    assert None not in axes or widths[-1] == 10
    report = optimizer.memory_report()
    assert len(report.held) == num_replicas
    assert report.max_over_ideal <= 1.02
    numbers = 2 * 4  # iterations and the learning rate
    assert report.whole == numbers + 2 * sum(4 * (a * b + b) for a, b in itertools.pairwise(widths))


def test_optimizers_that_need_whole_variables_keep_them():
    with ks.data_parallel(3):
        optimizer = ks.CrossShard(keras.optimizers.Adafactor(), shard_state=True)
        model = compiled(optimizer)
        optimizer.build(model.trainable_variables)
    assert optimizer.memory_report().replicated


@pytest.mark.skipif(not hasattr(keras.optimizers, "Muon"), reason="not in this Keras")
def test_so_do_biases_of_optimizers_with_another_rule_for_matrices():
    """With one row per replica, a bias is a matrix, which Muon would update by another rule."""
    with ks.data_parallel(3):
        options = [{"shard_state": shard_state} for shard_state in (False, True)]
        made = [fitted(compiled(ks.CrossShard(keras.optimizers.Muon(0.01), **each))) for each in options]
    assert len(made[0].optimizer.variables) == len(made[1].optimizer.variables)
    for mine, theirs in zip(made[1].get_weights(), made[0].get_weights()):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5)


def test_so_do_optimizers_that_need_all_of_them():
    with ks.data_parallel(3):
        options = [{"shard_state": shard_state} for shard_state in (False, True)]
        whole, divided = [fitted(compiled(ks.CrossShard(AsLargeAsTheFirst(0.1), **each))) for each in options]
    for mine, theirs in zip(divided.get_weights(), whole.get_weights()):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)


def test_files_hold_the_shapes_of_the_weights_and_fit_any_number_of_devices(tmp_path):
    states = {}
    for num_replicas in (6, 4, 1):
        with ks.data_parallel(num_replicas):
            model = compiled(ks.CrossShard(keras.optimizers.Adam(0.01), shard_state=True))
            if num_replicas != 6:
                model.load_weights(tmp_path / "6.weights.h5")
            else:
                fitted(model).save_weights(tmp_path / "6.weights.h5")
                assert type(model.optimizer._shards).__name__ == "PaddedLayout"
            states[num_replicas] = {}
            model.optimizer.build(model.trainable_variables)
            model.optimizer.save_own_variables(states[num_replicas])
            fitted(model, 2)
            states[num_replicas]["weights"] = np.concatenate([w.ravel() for w in model.get_weights()])
    for key, value in states[6].items():
        for num_replicas in (4, 1):
            tolerance = 1e-6 if key == "weights" else 0
            np.testing.assert_allclose(states[num_replicas][key], value, rtol=0, atol=tolerance)
    plain = compiled(keras.optimizers.Adam(0.01))
    plain.optimizer.build(plain.trainable_variables)
    plain.load_weights(tmp_path / "6.weights.h5")
    assert int(plain.optimizer.iterations) == 4


def test_a_variable_of_one_element_is_not_padded():
    with ks.data_parallel(3):
        optimizer = ks.CrossShard(momentum(), shard_state=True)
        fitted(compiled(optimizer, widths=(32, 16, 1)), 1)
    divided = [variable for variable in optimizer.variables if optimizer._shards.state.is_divided(variable)]
    assert [tuple(optimizer._shards.state.stored_shape(variable)) for variable in divided] == [(32, 16), (16,), (16, 1)]


@pytest.mark.parametrize("num_replicas", some([3, 6, 7], [3]))
def test_parts_for_sharded_checkpoints_hold_each_element_once_and_no_padding(num_replicas):
    with ks.data_parallel(num_replicas):
        optimizer = ks.CrossShard(momentum(), shard_state=True)
        fitted(compiled(optimizer), 1)
    state = optimizer._shards.state
    divided = [variable for variable in optimizer.variables if state.is_divided(variable)]
    assert divided
    for variable in divided:
        parts, expected = state.own_parts(variable, (1, 0)), state.stored(variable)
        assert parts.shape == expected.shape and all(values.size for _, values in parts.parts)
        ordered = sorted(parts.parts, key=lambda part: part[0])
        assert [start for (start,), _ in ordered] == [0, *np.cumsum([values.size for _, values in ordered])[:-1]]
        np.testing.assert_array_equal(np.concatenate([values for _, values in ordered]), expected.reshape(-1))


def test_an_update_that_is_not_finite_changes_nothing():
    with ks.data_parallel(3):
        model = compiled(ks.CrossShard(momentum(), shard_state=True, on_nonfinite="skip"))
        fitted(model)
        before = [*model.get_weights(), *map(np.array, [v.value for v in model.optimizer.variables[2:]])]
        x = np.ones((42, WIDTHS[0]), "float32")
        x[20] = np.nan
        model.train_on_batch(x, np.ones((42, WIDTHS[-1]), "float32"))
    after = [*model.get_weights(), *map(np.array, [v.value for v in model.optimizer.variables[2:]])]
    assert int(model.optimizer.skipped_steps) == 1
    changed = sum(not np.array_equal(a, b) for a, b in zip(before, after))
    assert changed <= 2  # the counters of the skipped update
    for weight, start in zip(model.get_weights(), before):
        np.testing.assert_array_equal(weight, start)
