import keras
import numpy as np
import pytest
from keras import ops
from support import golden, problem
from support.suites import some

import keras_shardopt as ks
from keras_shardopt.numerics import dtype_of

CASES = golden.cases("larc")


class Seen(keras.optimizers.Optimizer):
    """Keeps the gradients that it is given, and moves nothing."""

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.seen = [self.add_variable(v.shape, dtype=v.dtype, name="seen") for v in variables]

    def update_step(self, gradient, variable, learning_rate):
        assert dtype_of(gradient) == dtype_of(variable)
        self.assign(self.seen[self._get_variable_index(variable)], gradient)


def seen_by_inner(weights, grads, learning_rate, dtype="float32", **arguments):
    variables = [keras.Variable(np.array(w, dtype), dtype=dtype) for w in weights]
    inner = Seen(learning_rate=learning_rate)
    ks.LARC(inner, **arguments).apply(grads, variables)
    return inner.seen


@pytest.mark.parametrize("id", CASES)
def test_golden(id, backend):
    case = CASES[id]
    if any(golden.is_sparse(grad) for grad in case["grads"]) and backend != "tensorflow":
        pytest.skip("gradients are dense on this backend")
    grads = [golden.tensor(grad, case["grad_dtype"]) for grad in case["grads"]]
    rate = float(case["learning_rate"])
    seen = seen_by_inner(case["weights"], grads, rate, case["var_dtype"], faithful=True, **case["larc_params"])
    for got, expected in zip(seen, case["outputs"], strict=True):
        assert tuple(got.shape) == tuple(expected["shape"])
        golden.assert_close(got, expected["values"], expected["dtype"])


@pytest.mark.parametrize("id", [id for id in CASES if not id.startswith(("zero", "lr_zero", "float16"))])
@pytest.mark.exhaustive("jax", "tensorflow")
def test_faithful_makes_no_difference_elsewhere(id, backend):
    case = CASES[id]
    if any(golden.is_sparse(grad) for grad in case["grads"]) and backend != "tensorflow":
        pytest.skip("gradients are dense on this backend")
    grads = [golden.tensor(grad) for grad in case["grads"]]
    seen = seen_by_inner(case["weights"], grads, float(case["learning_rate"]), **case["larc_params"])
    for got, expected in zip(seen, case["outputs"], strict=True):
        golden.assert_close(got, expected["values"])


@pytest.mark.parametrize("mode", ["clip", "scale"])
@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_a_variable_of_norm_zero_keeps_its_gradient(mode, rate):
    grads = [ops.convert_to_tensor([0.3, 0.4]), ops.zeros(2)]
    seen = seen_by_inner([[0.0, 0.0], [0.0, 0.0]], grads, rate, larc_eta=0.02, larc_mode=mode)
    for got, grad in zip(seen, grads):
        np.testing.assert_array_equal(ops.convert_to_numpy(got), ops.convert_to_numpy(grad))


@pytest.mark.parametrize("faithful", [False, True])
def test_rate_zero_gives_no_nan(faithful):
    (seen,) = seen_by_inner([[3.0, 4.0]], [ops.convert_to_tensor([0.3, 0.4])], 0.0, larc_eta=0.02, faithful=faithful)
    golden.assert_close(seen, [0.3, 0.4])


def test_an_infinite_gradient_stays_infinite():
    (seen,) = seen_by_inner([[3.0, 4.0]], [ops.convert_to_tensor([np.inf, 0.4])], 0.1, larc_eta=0.02)
    assert np.isinf(ops.convert_to_numpy(seen)[0])


def test_products_are_taken_in_float32():
    # The factor is 1e5 and has no float16; the product has one.
    grads = [ops.convert_to_tensor([1e-4], "float16")]
    (seen,) = seen_by_inner([[1e3]], grads, 0.1, "float16", larc_eta=0.01, larc_mode="scale")
    golden.assert_close(seen, [10.0], rtol=2e-3)


def moved_by_updates(optimizer, num_updates):
    """The lengths of the updates of a variable of norm 5 whose gradient has norm 50, in units of that norm."""
    if not optimizer.built:
        optimizer.build([keras.Variable([3.0, 4.0])])
    (weight,) = optimizer._trainable_variables
    moved = []
    for _ in range(num_updates):
        weight.assign([3.0, 4.0])
        optimizer.apply([ops.convert_to_tensor([30.0, 40.0])], [weight])
        moved.append(float(np.linalg.norm(ops.convert_to_numpy(weight) - [3.0, 4.0])) / 50)
    return moved


def test_clip_mode_follows_a_schedule():
    # eta |w| / |g| = 0.002 is the largest rate; the schedule passes below it.
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0, 1], [1.0, 0.004, 0.001])
    optimizer = ks.LARC(keras.optimizers.SGD(schedule), larc_eta=0.02)
    np.testing.assert_allclose(moved_by_updates(optimizer, 3), [0.002, 0.002, 0.001], rtol=1e-4)


def test_clip_mode_follows_a_rate_that_is_set():
    optimizer = ks.LARC(keras.optimizers.SGD(1.0), larc_eta=0.02)
    np.testing.assert_allclose(moved_by_updates(optimizer, 1), [0.002], rtol=1e-4)
    optimizer.learning_rate = 1e-3
    np.testing.assert_allclose(moved_by_updates(optimizer, 1), [0.001], rtol=1e-4)


def test_scale_mode_multiplies_with_the_rate():
    optimizer = ks.LARC(keras.optimizers.SGD(0.5), larc_eta=0.02, larc_mode="scale")
    np.testing.assert_allclose(moved_by_updates(optimizer, 1), [0.001], rtol=1e-4)


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="needs a Keras with MultiOptimizer")
def test_each_variable_has_the_rate_of_its_own_optimizer():
    weights = [keras.Variable([3.0, 4.0], name="a"), keras.Variable([3.0, 4.0], name="b")]
    rules = keras.optimizers.OptimizerMap(keras.optimizers.SGD(1.0), {"b": keras.optimizers.SGD(1e-3)})
    optimizer = ks.LARC(keras.optimizers.MultiOptimizer(rules), larc_eta=0.02)
    optimizer.apply([ops.convert_to_tensor([30.0, 40.0])] * 2, weights)
    golden.assert_close(weights[0], [3 - 0.002 * 30, 4 - 0.002 * 40])
    golden.assert_close(weights[1], [3 - 0.001 * 30, 4 - 0.001 * 40])


def test_norms_are_of_the_unscaled_loss():
    plain = ks.LARC(keras.optimizers.SGD(1.0), larc_eta=0.02)
    scaled = ks.LARC(keras.optimizers.SGD(1.0, loss_scale_factor=8.0), larc_eta=0.02)
    weights = [keras.Variable([3.0, 4.0]), keras.Variable([3.0, 4.0])]
    plain.apply([ops.convert_to_tensor([30.0, 40.0])], weights[:1])
    scaled.apply([ops.convert_to_tensor([240.0, 320.0])], weights[1:])
    golden.assert_close(weights[1], ops.convert_to_numpy(weights[0]))


@pytest.mark.parametrize("wrap", some([lambda o: o, ks.CrossShard], [ks.CrossShard]), ids=["alone", "in CrossShard"])
@pytest.mark.parametrize("mode", some(["clip", "scale"], ["scale"], "jax", "tensorflow"))
@pytest.mark.parametrize("run_eagerly", some([False, True], [False], "jax", "tensorflow"))
def test_fit_compiled_and_eager(wrap, mode, run_eagerly):
    x, y = problem.data(num_steps=3)
    model = problem.model()
    schedule = keras.optimizers.schedules.PolynomialDecay(0.5, 3)
    optimizer = wrap(ks.LARC(keras.optimizers.SGD(schedule, momentum=0.9), larc_eta=0.02, larc_mode=mode))
    model.compile(optimizer, "mse", run_eagerly=run_eagerly)
    model.fit(x, y, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
    for weight, start in zip(model.get_weights(), problem.start_weights()):
        assert 1e-4 < np.max(np.abs(weight - start)) < 1


def test_none_gradients_stay_none():
    weights = [keras.Variable([3.0, 4.0]), keras.Variable([3.0, 4.0])]
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        ks.LARC("sgd", larc_eta=0.02).apply([None, ops.ones(2)], weights)
    golden.assert_close(weights[0], [3.0, 4.0])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, TypeError, "larc_eta"),
        ({"larc_eta": 0.1, "larc_nu": 0.1}, TypeError, "larc_nu"),
        ({"larc_eta": "0.1"}, TypeError, "`larc_eta` must be a float"),
        ({"larc_eta": 0.1, "larc_mode": "both"}, ValueError, '`larc_mode` must be "clip" or "scale"'),
        ({"larc_eta": 0.0}, ValueError, "must be > 0"),
        ({"larc_eta": 0.1, "epsilon": 0}, ValueError, "must be > 0"),
        ({"larc_eta": 0.1, "min_update": -1.0}, ValueError, "`min_update` must be >= 0"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        ks.LARC("sgd", **arguments)


def test_it_must_be_inside_cross_shard():
    with pytest.raises(ValueError, match=r"Use `CrossShard\(LARC"):
        ks.LARC(ks.GradientClipping("sgd", 1.0), 0.1) and ks.LARC(ks.CrossShard("sgd"), 0.1)
