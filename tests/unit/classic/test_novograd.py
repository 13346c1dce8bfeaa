import keras
import numpy as np
import pytest
from keras import ops
from support import golden, problem

import keras_shardopt as ks

CASES = golden.cases("novograd")


def reference(start, grads, rate, beta1=0.95, beta2=0.98, epsilon=1e-8, weight_decay=0.0, grad_averaging=False):
    """Algorithm 1 of the paper, one variable, in float64. Returns the weights after each step."""
    weight, momentum, second_moment, trajectory = np.array(start, "float64"), 0.0, None, []
    for step, grad in enumerate(np.asarray(grads, "float64")):
        square = float(np.sum(grad**2))
        second_moment = square if second_moment is None else beta2 * second_moment + (1 - beta2) * square
        normalised = grad / (np.sqrt(second_moment) + epsilon) + weight_decay * weight
        momentum = beta1 * momentum + (1 - beta1 if grad_averaging else 1) * normalised
        weight = weight - (rate(step) if callable(rate) else rate) * momentum
        trajectory.append(weight)
    return trajectory


def problem_of(shape, num_steps=12):
    random = np.random.default_rng(5)
    # Norms that differ from step to step, so that beta2 matters.
    grads = random.normal(size=(num_steps, *shape)) * random.uniform(0.1, 3, num_steps).reshape(-1, *[1] * len(shape))
    return random.normal(size=shape).astype("float32"), grads.astype("float32")


@pytest.mark.parametrize("shape", [(), (7,), (3, 5)])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"beta2": 0.5},
        {"beta1": 0.9, "weight_decay": 0.01},
        {"weight_decay": 0.01, "grad_averaging": True},
        {"epsilon": 0.5},
    ],
    ids=str,
)
@pytest.mark.exhaustive("jax", "tensorflow")
def test_it_is_the_published_algorithm(shape, arguments):
    start, grads = problem_of(shape)
    weight = keras.Variable(start)
    optimizer = ks.NovoGrad(0.05, **arguments)
    for grad, expected in zip(grads, reference(start, grads, 0.05, **arguments)):
        optimizer.apply([ops.convert_to_tensor(grad)], [weight])
        np.testing.assert_allclose(ops.convert_to_numpy(weight), expected, rtol=2e-6, atol=2e-6)


def test_it_follows_a_schedule():
    start, grads = problem_of((4,))
    weight = keras.Variable(start)
    optimizer = ks.NovoGrad(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5))
    for grad, expected in zip(grads, reference(start, grads, lambda step: 0.1 * 0.5**step)):
        optimizer.apply([ops.convert_to_tensor(grad)], [weight])
        np.testing.assert_allclose(ops.convert_to_numpy(weight), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("id", CASES)
def test_golden(id):
    case = CASES[id]
    weights = {name: keras.Variable(np.array(v, "float32"), name=name) for name, v in case["variables"].items()}
    optimizer = ks.NovoGrad(**case["params"], faithful=True)
    wrapped = ks.CrossShard(optimizer)
    for step, output in zip(case["steps"], case["outputs"], strict=True):
        wrapped.apply([golden.tensor(step["grads"][name]) for name in weights], list(weights.values()))
        for name, weight in weights.items():
            golden.assert_close(weight, output["variables"][name])
            golden.assert_close(wrapped.get_slot(weight, "momentum"), output["momentum"][name])
            golden.assert_close(wrapped.get_slot(weight, "second_moment"), 0.0)


def test_beta2_has_an_effect_unless_faithful():
    start, grads = problem_of((4,))

    def trained(**arguments):
        weight = keras.Variable(start)
        optimizer = ks.NovoGrad(0.05, **arguments)
        for grad in grads:
            optimizer.apply([ops.convert_to_tensor(grad)], [weight])
        return ops.convert_to_numpy(weight)

    assert np.max(np.abs(trained(beta2=0.5) - trained(beta2=0.99))) > 1e-2
    np.testing.assert_array_equal(trained(beta2=0.5, faithful=True), trained(beta2=0.99, faithful=True))


def test_the_average_starts_at_the_first_gradient_that_is_not_zero():
    start, grads = problem_of((4,), num_steps=3)
    for epsilon in (0.0, 1e-8):
        weight = keras.Variable(start)
        optimizer = ks.NovoGrad(0.05, epsilon=epsilon)
        optimizer.apply([ops.zeros(4)], [weight])
        np.testing.assert_array_equal(ops.convert_to_numpy(weight), start)
        for grad, expected in zip(grads, reference(start, grads, 0.05, epsilon=epsilon)):
            optimizer.apply([ops.convert_to_tensor(grad)], [weight])
            np.testing.assert_allclose(ops.convert_to_numpy(weight), expected, rtol=2e-6, atol=2e-6)


def test_weight_decay_is_not_applied_twice_and_can_be_excluded():
    start, grads = problem_of((4,))
    weights = [keras.Variable(start, name="kernel"), keras.Variable(start, name="bias")]
    optimizer = ks.NovoGrad(0.05, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    for grad in grads:
        optimizer.apply([ops.convert_to_tensor(grad)] * 2, weights)
    for weight, decay in zip(weights, (0.1, 0.0)):
        expected = reference(start, grads, 0.05, weight_decay=decay)[-1]
        np.testing.assert_allclose(ops.convert_to_numpy(weight), expected, rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_second_moments_of_half_precision_do_not_overflow(dtype):
    weight = keras.Variable(np.zeros(4), dtype=dtype)
    optimizer = ks.NovoGrad(0.5)
    optimizer.apply([ops.full((4,), 1e4, dtype=dtype)], [weight])
    np.testing.assert_allclose(ops.convert_to_numpy(ops.cast(weight, "float32")), -0.25, rtol=1e-6)
    assert keras.backend.standardize_dtype(optimizer.variables[-1].dtype) == "float32"


def fitted(optimizer, **arguments):
    x, y = problem.data()
    model = problem.model()
    model.compile(optimizer, "mse", **arguments)
    model.fit(x, y, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
    return model


@pytest.mark.exhaustive("jax", "tensorflow")
def test_fit_saves_and_continues(tmp_path):
    model = fitted(ks.NovoGrad(0.01, weight_decay=1e-3))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    for got, expected in zip(loaded.optimizer.variables, model.optimizer.variables):
        np.testing.assert_array_equal(ops.convert_to_numpy(got), ops.convert_to_numpy(expected))
    eager = fitted(ks.NovoGrad(0.01, weight_decay=1e-3), run_eagerly=True)
    assert problem.relative_difference(eager.get_weights(), model.get_weights()) < 5e-6


def test_sparse_gradients_are_those_of_their_rows():
    x = np.array([[1, 1], [4, 1], [0, 5]])

    def trained():
        model = keras.Sequential([keras.layers.Embedding(6, 4), keras.layers.Flatten()])
        model.build((None, 2))
        model.set_weights([np.linspace(-1, 1, 24).reshape(6, 4)])
        model.compile(ks.NovoGrad(0.01), "mse")
        model.fit(x, np.zeros((3, 8)), epochs=3, verbose=0)
        return model.get_weights()[0]

    # By hand: the gradient of the mean square of the looked-up rows.
    table, momentum, average = np.linspace(-1, 1, 24).reshape(6, 4), 0.0, None
    for _ in range(3):
        grad = np.zeros((6, 4))
        np.add.at(grad, x.reshape(-1), table[x.reshape(-1)] * 2 / 24)
        average = np.sum(grad**2) if average is None else 0.98 * average + 0.02 * np.sum(grad**2)
        momentum = 0.95 * momentum + grad / (np.sqrt(average) + 1e-8)
        table = table - 0.01 * momentum
    np.testing.assert_allclose(trained(), table, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("arguments", [{"beta1": 1.0}, {"beta2": -0.1}, {"epsilon": -1.0}, {"weight_decay": -1.0}])
def test_numbers_out_of_range_are_refused(arguments):
    with pytest.raises(ValueError, match=f"`{next(iter(arguments))}`"):
        ks.NovoGrad(**arguments)


@pytest.mark.parametrize("arguments", [{"beta1": "0.9"}, {"beta2": None}, {"epsilon": None}, {"weight_decay": "0"}])
def test_what_is_no_number_is_refused(arguments):
    with pytest.raises(TypeError, match=f"`{next(iter(arguments))}` must be a float"):
        ks.NovoGrad(**arguments)


def test_no_weight_decay_may_be_said_with_none():
    weights = [keras.Variable([1.0, 2.0]), keras.Variable([1.0, 2.0])]
    for weight, decay in zip(weights, (None, 0.0)):
        optimizer = ks.NovoGrad.from_config(ks.NovoGrad(0.1, weight_decay=decay).get_config())
        optimizer.apply([ops.ones(2)], [weight])
    np.testing.assert_array_equal(*[ops.convert_to_numpy(weight) for weight in weights])
