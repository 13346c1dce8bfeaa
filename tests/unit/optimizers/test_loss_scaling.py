import contextlib

import keras
import numpy as np
import pytest
from keras import ops
from support import catalogue, problem
from support.suites import some

import keras_shardopt as ks
from keras_shardopt.backends.active import runtime
from keras_shardopt.backends.gradient_scope import GradientScope

o = keras.optimizers

EVERYTHING_THAT_MOVES = {
    "decay, average and schedule": lambda: o.AdamW(
        o.schedules.ExponentialDecay(0.01, 2, 0.5), weight_decay=0.1, use_ema=True, ema_momentum=0.5
    ),
    "accumulators": lambda: o.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
    "clipping and constraint": lambda: ks.GradientClipping(ks.VariableClipping(o.Adam(0.1), {".*": []}, 0.1), 1.0),
    "loss scale factor": lambda: o.Adam(0.1, loss_scale_factor=4.0),
    "several": lambda: o.MultiOptimizer(o.OptimizerMap(o.Adam(0.1), {".*bias": o.SGD(0.1, momentum=0.5)})),
}
if not hasattr(o, "MultiOptimizer"):
    del EVERYTHING_THAT_MOVES["several"]
WAYS = {
    "LossScaling": lambda inner: ks.LossScaling(inner, "Backoff", {"scale_max": 64.0}),
    "in CrossShard": lambda inner: ks.CrossShard(ks.LossScaling(inner, "Backoff", {"scale_max": 64.0})),
    "around CrossShard": lambda inner: ks.LossScaling(ks.CrossShard(inner), "Backoff", {"scale_max": 64.0}),
    "MixedPrecision": lambda inner: ks.MixedPrecision(inner, ks.AutomaticLossScaler("Backoff", {"scale_max": 64.0})),
}


def number(value):
    return float(np.asarray(ops.convert_to_numpy(value)))


@contextlib.contextmanager
def mixed_float16():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        yield
    finally:
        keras.config.set_dtype_policy("float32")


def fit(model, x, y, **arguments):
    return model.fit(x, y, **{"batch_size": problem.BATCH_SIZE, "shuffle": False, "verbose": 0, **arguments})


@pytest.mark.parametrize(
    ("way", "inner", "bad"),
    some(
        [
            *[("in CrossShard", inner, np.inf) for inner in EVERYTHING_THAT_MOVES],
            *[(way, "decay, average and schedule", np.nan) for way in WAYS if way != "in CrossShard"],
        ],
        [("in CrossShard", "decay, average and schedule", np.inf)],
        "jax",
        "tensorflow",
    ),
)
def test_a_skipped_step_changes_nothing_but_the_scale(way, inner, bad):
    """Under `fit`: with an overflow in every third step the rest is as if those steps had not been."""

    def trained(bad_steps, num_steps=6):
        x, y = problem.data(num_steps=num_steps)
        kept = [i for i in range(num_steps) if bad_steps or i not in (1, 4)]
        x, y = x.reshape(num_steps, 16, -1)[kept].copy(), y.reshape(num_steps, 16, -1)[kept]
        if bad_steps:
            x[[1, 4], 3, 0] = bad
        model = problem.model()
        model.compile(WAYS[way](EVERYTHING_THAT_MOVES[inner]()), "mse")
        model.optimizer.build(model.trainable_variables)
        fit(model, x.reshape(-1, 5), y.reshape(-1, 3))
        return model

    bad_model, good_model = trained(True), trained(False)
    optimizer = bad_model.optimizer
    assert number(optimizer.loss_scale) == 16.0 * (optimizer.loss_scale_factor or 1.0)
    assert int(number(optimizer.skipped_steps)) == 2
    assert int(number(good_model.optimizer.skipped_steps)) == 0
    assert int(number(optimizer.iterations)) == int(number(good_model.optimizer.iterations))
    own = 3
    states = [catalogue.state_of(m.optimizer)[:-own] for m in (bad_model, good_model)]
    for a, b in zip([*bad_model.get_weights(), *states[0]], [*good_model.get_weights(), *states[1]]):
        # Powers of two: a scale changes no digit. XLA may round a step otherwise when it is part of another program.
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    assert all(np.isfinite(w).all() for w in bad_model.get_weights())


CROSS = pytest.mark.exhaustive("jax", "tensorflow")
EAGER_AND_COMPILED = [{"run_eagerly": True}, {"jit_compile": True}]


@pytest.mark.parametrize("arguments", some(EAGER_AND_COMPILED, [EAGER_AND_COMPILED[0]], "torch"))
def test_eager_and_compiled_steps_skip_too(arguments):
    x, y = problem.data(num_steps=3)
    x[20, 1] = np.inf
    model = problem.model()
    model.compile(ks.LossScaling(problem.sgd_momentum(), "Backoff", {"scale_max": 64.0}), "mse", **arguments)
    on_torch = keras.config.backend() == "torch"
    with problem.without_generated_code() if on_torch else contextlib.nullcontext():
        fit(model, x, y)
    assert number(model.optimizer.loss_scale) == 32.0
    assert int(number(model.optimizer.iterations)) == 2
    assert all(np.isfinite(w).all() for w in model.get_weights())


def test_a_skip_that_is_left_out_is_noticed(monkeypatch):
    """The tests above can fail."""
    monkeypatch.setattr(type(runtime), "cond", lambda self, condition, update, grads, variables, **_: update(grads))
    weight = keras.Variable([1.0])
    optimizer = ks.LossScaling(o.SGD(1.0))
    optimizer.apply([ops.convert_to_tensor([np.inf])], [weight])
    assert not np.isfinite(ops.convert_to_numpy(weight)).any()


def test_some_variables_only_and_none():
    weights = [keras.Variable([1.0]), keras.Variable([1.0])]
    optimizer = ks.LossScaling(o.SGD(1.0), "Backoff", {"scale_max": 2.0})
    optimizer.build(weights)
    optimizer.apply([ops.convert_to_tensor([1.0])], weights[1:])
    optimizer.apply([ops.convert_to_tensor([np.nan])], weights[:1])
    assert [number(w[0]) for w in weights] == [1.0, 0.5]
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply([None, ops.convert_to_tensor([0.5])], weights)
    assert [number(w[0]) for w in weights] == [1.0, 0.0]
    optimizer.apply([None, ops.convert_to_tensor([np.inf])], weights)
    assert [number(w[0]) for w in weights] == [1.0, 0.0] and number(optimizer.skipped_steps) == 2


def test_static_scale():
    weight = keras.Variable([1.0])
    optimizer = ks.LossScaling(o.SGD(1.0), 8)
    assert float(optimizer.scale_loss(ops.convert_to_tensor(0.5))) == 4.0
    optimizer.apply([ops.convert_to_tensor([4.0])], [weight])
    assert number(weight[0]) == 0.5
    assert (optimizer.loss_scale, optimizer.skipped_steps) == (8.0, 0)
    optimizer.apply([ops.convert_to_tensor([np.inf])], [weight])
    assert number(weight[0]) == -np.inf  # seen, not skipped


def test_a_loss_in_half_precision_is_scaled_in_float32():
    optimizer = ks.LossScaling("sgd", 1024.0)
    scaled = optimizer.scale_loss(ops.convert_to_tensor(128.0, "float16"))
    assert keras.backend.standardize_dtype(scaled.dtype) == "float32"
    assert float(scaled) == 131072.0


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda inner: ks.LossScaling(inner), id="LossScaling", marks=CROSS),
        pytest.param(lambda inner: ks.CrossShard(ks.LossScaling(inner)), id="CrossShard"),
        pytest.param(lambda inner: ks.Tower(ks.CrossShard(ks.LossScaling(inner, "LogMax"))), id="Tower", marks=CROSS),
        pytest.param(
            lambda inner: ks.GradientClipping(ks.LossScaling(inner, 128.0), 1e6),
            id="GradientClipping",
            marks=CROSS,
        ),
        pytest.param(lambda inner: ks.CrossShard(o.LossScaleOptimizer(inner)), id="stock"),
        pytest.param(lambda inner: ks.MixedPrecision(inner, 128.0), id="MixedPrecision", marks=CROSS),
    ],
)
def test_mixed_float16_needs_no_argument_and_scales_once(wrap, tmp_path):
    x, y = problem.data(num_steps=4)
    with mixed_float16():
        model = problem.model()
        model.compile(wrap(problem.sgd_momentum()), "mse")
        assert type(model.optimizer) is type(wrap(problem.sgd_momentum()))
        fit(model, x, y)
        model.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        assert type(loaded.optimizer) is type(model.optimizer)
        for a, b in zip(catalogue.state_of(loaded.optimizer), catalogue.state_of(model.optimizer)):
            np.testing.assert_array_equal(a, b)
        fit(loaded, x, y)
    reference = problem.model()
    reference.compile(problem.sgd_momentum(), "mse")
    fit(reference, x, y)
    # Scaled twice it would move by a thousandth; half precision rounds to three digits.
    assert problem.relative_difference(model.get_weights(), reference.get_weights()) < 2e-2
    fit(reference, x, y)
    assert problem.relative_difference(loaded.get_weights(), reference.get_weights()) < 2e-2


def test_without_loss_scaling_inside_keras_is_not_told_so():
    for optimizer in (ks.GradientClipping("sgd", 1.0), ks.CrossShard("sgd"), ks.MixedPrecision("sgd")):
        assert optimizer.__class__ is type(optimizer)
        assert not isinstance(optimizer, o.LossScaleOptimizer)
    with mixed_float16():
        model = problem.model()
        model.compile(ks.GradientClipping("sgd", 1.0), "mse")
        assert type(model.optimizer) is o.LossScaleOptimizer
        with pytest.raises(ValueError, match=r"CrossShard\(LossScaling\("):
            model.compile(ks.CrossShard("sgd"), "mse")


@pytest.mark.parametrize("make", [lambda: ks.LossScaling("sgd"), lambda: ks.CrossShard(ks.LossScaling("sgd", 8.0))])
def test_a_loss_scale_optimizer_around_it_is_refused(make):
    with pytest.raises(ValueError, match="`LossScaleOptimizer`"):
        o.LossScaleOptimizer(make())


class Read(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_end(self, epoch, logs=None):
        optimizer = self.model.optimizer
        self.seen.append((float(optimizer.loss_scale), int(optimizer.skipped_steps)))
        logs["loss_scale"] = self.seen[-1][0]


@pytest.mark.parametrize("wrap", some([lambda inner: inner, ks.CrossShard], [ks.CrossShard], "jax", "tensorflow"))
@pytest.mark.exhaustive("jax", "tensorflow")
def test_callbacks_read_the_scalars_at_epoch_ends(wrap):
    x, y = problem.data(num_steps=2)
    x[-1, 0] = np.inf
    model, read = problem.model(), Read()
    model.compile(wrap(ks.LossScaling("sgd", "Backoff", {"scale_max": 64.0})), "mse")
    history = fit(model, x, y, epochs=3, callbacks=[read])
    assert read.seen == [(32.0, 1), (16.0, 2), (8.0, 3)]
    assert history.history["loss_scale"] == [32.0, 16.0, 8.0]


def test_scalars_where_others_scale():
    assert (ks.CrossShard("sgd").loss_scale, ks.CrossShard("sgd").skipped_steps) == (1.0, 0)
    assert ks.CrossShard(o.SGD(loss_scale_factor=4.0)).loss_scale == 4.0
    assert number(ks.CrossShard(o.LossScaleOptimizer(o.SGD(), initial_scale=16.0)).loss_scale) == 16.0
    # All of it, where several do.
    for several, product in (
        (ks.LossScaling(o.SGD(loss_scale_factor=4.0), 8.0), 32.0),
        (ks.LossScaling(o.SGD(loss_scale_factor=4.0), "Backoff", {"scale_max": 8.0}), 32.0),
        (ks.LossScaling(ks.MixedPrecision("sgd", ks.AutomaticLossScaler("Backoff", {"scale_max": 4.0})), 8.0), 32.0),
    ):
        assert number(several.loss_scale) == number(several.scale_loss(ops.convert_to_tensor(1.0))) == product


def saved(optimizer, path, steps=3):
    model = catalogue.trained(optimizer, steps=steps)
    model.save_weights(path)
    return model


def loaded(optimizer, path, build_first=True):
    model = problem.model()
    model.compile(optimizer, "mse")
    if build_first:
        optimizer.build(model.trainable_variables)
    model.load_weights(path)
    optimizer.build(model.trainable_variables)
    return model


@pytest.mark.parametrize("build_first", some([True, False], [False], "jax", "tensorflow"))
@pytest.mark.exhaustive("jax", "tensorflow")
def test_files_hold_the_scale_beside_the_state_of_the_inner_optimizer(tmp_path, build_first):
    path = tmp_path / "model.weights.h5"
    model = saved(ks.CrossShard(ks.LossScaling(o.Adam(0.01), "LogMax")), path)
    again = loaded(ks.CrossShard(ks.LossScaling(o.Adam(0.01), "LogMax")), path, build_first)
    for a, b in zip(catalogue.state_of(again.optimizer), catalogue.state_of(model.optimizer)):
        np.testing.assert_array_equal(a, b)
    plain = loaded(o.Adam(0.01), path)
    inner = catalogue.state_of(model.optimizer)[:10]
    for a, b in zip(catalogue.state_of(plain.optimizer), inner):
        np.testing.assert_array_equal(a, b)
    # And a file of the plain inner optimizer: the scale stays what it is.
    plain.save_weights(path)
    back = loaded(ks.LossScaling(o.Adam(0.01), "Backoff", {"scale_max": 8.0}), path, build_first)
    for a, b in zip(catalogue.state_of(back.optimizer), inner):
        np.testing.assert_array_equal(a, b)
    assert number(back.optimizer.loss_scale) == 8.0


@pytest.mark.exhaustive("jax", "tensorflow")
def test_the_state_of_another_scaler_is_an_error(tmp_path):
    path = tmp_path / "model.weights.h5"
    saved(ks.LossScaling(o.SGD(), "LogMax"), path)
    with pytest.raises(ValueError, match="must have 3 arrays"):
        loaded(ks.LossScaling(o.SGD(), "Backoff"), path)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"loss_scaling": None}, TypeError, "`loss_scaling` must be a float"),
        ({"loss_scaling": True}, TypeError, "`loss_scaling` must be a float"),
        ({"loss_scaling": 0.0}, ValueError, "`loss_scaling` must be > 0 and finite"),
        ({"loss_scaling": float("nan")}, ValueError, "`loss_scaling` must be > 0 and finite"),
        ({"loss_scaling": "dynamic"}, ValueError, "`algorithm` must be"),
        ({"loss_scaling": 8.0, "loss_scaling_params": {}}, ValueError, "`loss_scaling_params` require"),
        ({"loss_scaling": "Backoff", "loss_scaling_params": {"beta1": 0.5}}, ValueError, "`params`"),
    ],
)
def test_wrong_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        ks.LossScaling("sgd", **arguments)


def low_precision_problem():
    """Gradients around 1e-8, which float16 cannot hold, and one step that overflows."""
    x, y = problem.data(num_steps=160)
    x[40, 0] = 7e4  # infinite in float16
    return x, y


def trained_in_float16(optimizer):
    """The loss in float32 after training; NaN where the weights are."""
    x, y = low_precision_problem()
    with mixed_float16():
        model = problem.model()
        model.compile(optimizer, "mse", loss_weights=[1e-7], auto_scale_loss=False)
        fit(model, x, y)
    in_float32 = problem.model()
    in_float32.set_weights(model.get_weights())
    return float(np.mean((in_float32.predict(x[64:], verbose=0) - y[64:]) ** 2))


@pytest.mark.exhaustive
def test_float16_training_that_fails_without_scaling_converges_with_each_algorithm():
    start = problem.model()
    x, y = problem.data(num_steps=8)
    before = float(np.mean((start.predict(x, verbose=0) - y) ** 2))

    def sgd():
        return keras.optimizers.SGD(1e6, momentum=0.9)

    assert np.isnan(trained_in_float16(sgd()))
    for algorithm, params in (("Backoff", {"scale_max": 2.0**20}), ("LogMax", {"scale_max": 2.0**20})):
        assert trained_in_float16(ks.LossScaling(sgd(), algorithm, params)) < 0.25 * before


def test_logmax_sees_gradients_that_are_unscaled():
    weight = keras.Variable([0.0, 0.0])
    optimizer = ks.LossScaling(keras.optimizers.SGD(1.0), "LogMax", {"scale_min": 8.0, "scale_max": 2.0**20})
    optimizer.build([weight])
    assert scalar(optimizer.loss_scale) == 8.0
    optimizer.apply([ops.convert_to_tensor([8 * 0.25, -8 * 0.5])], [weight])
    # The largest gradient is 2 ** -1, so 2 ** 17 is what brings it to the end of float16.
    np.testing.assert_allclose(scalar(optimizer.loss_scale), 2.0**17, rtol=1e-4)


def scalar(value):
    return float(ops.convert_to_numpy(value))


@pytest.mark.backends("torch")
def test_a_good_step_is_only_counted_and_all_bits_are_those_of_the_long_way(monkeypatch):
    """Five good steps with a window of 3, an overflow, and a largest value whose square is infinite."""
    short = []
    real = ks.AutomaticLossScaler._count_if_good

    def trained():
        weight = keras.Variable([1.0, 2.0])
        inner = keras.optimizers.SGD(0.1, momentum=0.9)
        scaling = ks.LossScaling(inner, "Backoff", {"scale_max": 64.0, "scale_min": 2.0, "step_window": 3})
        optimizer = ks.CrossShard(scaling)
        optimizer.build([weight])
        found = []
        for value in (1.0, 3.0, float("inf"), 2.0, -1.0, 5.0, 1e30, 0.5, float("nan"), 4.0):
            optimizer.apply([ops.convert_to_tensor([value, 0.25])])
            found.append([ops.convert_to_numpy(v).copy() for v in (weight, *optimizer.variables)])
        return found

    def noting(self, grads):
        short.append(real(self, grads))
        return short[-1]

    monkeypatch.setattr(ks.AutomaticLossScaler, "_count_if_good", noting)
    found = trained()
    # Not: the overflows, the third good step after one, which changes the scale, and what a sum does not show.
    assert short == [True, True, False, True, True, False, False, True, False, True]
    monkeypatch.setattr(ks.AutomaticLossScaler, "_count_if_good", lambda self, grads: False)
    for mine, expected in zip(found, trained(), strict=True):
        for a, b in zip(mine, expected, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.backends("torch")
@pytest.mark.parametrize(
    ("group_axis", "holds_slices", "is_reduced", "expected"),
    [(None, False, True, True), ("batch", False, True, False), (None, True, True, False), (None, False, False, False)],
)
def test_a_good_step_is_known_alone_only_of_global_gradients(group_axis, holds_slices, is_reduced, expected):
    """Where another replica may see an overflow that this one does not, they ask each other."""
    scaling = ks.LossScaling(o.SGD(0.1))
    weight = keras.Variable([1.0, 2.0])
    scaling.build([weight])
    scaling._scope = GradientScope(group_axis=group_axis)
    scaling._scope.holds_slices = holds_slices
    with scaling._scope.reduced() if is_reduced else contextlib.nullcontext():
        assert scaling._is_good([ops.ones(2)], [weight]) == expected
