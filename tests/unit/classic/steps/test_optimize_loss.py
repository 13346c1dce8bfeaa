import keras
import numpy as np
import pytest
from keras import ops
from support import problem
from support.suites import some

import keras_shardopt as ks


def squared(model):
    return lambda x, y: ops.mean(ops.square(model(x, training=True) - y))


def weights_of(model):
    return [ops.convert_to_numpy(v) for v in model.trainable_variables]


@pytest.mark.parametrize("jit_compile", some([None, False], [None], "jax", "tensorflow"))
def test_a_step_is_that_of_fit(jit_compile):
    x, y = problem.data(num_steps=3)
    reference = problem.model()
    reference.compile(problem.sgd_momentum(), "mse")
    reference.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    model = problem.model()
    step = ks.optimize_loss(squared(model), problem.sgd_momentum(), model=model, jit_compile=jit_compile)
    first = reference.evaluate(x[:16], y[:16], verbose=0)
    for start in range(0, 48, 16):
        value = step(x[start : start + 16], y[start : start + 16])
    assert np.shape(ops.convert_to_numpy(value)) == () and first > 0
    assert problem.relative_difference(weights_of(model), weights_of(reference)) <= problem.TOLERANCE


@pytest.mark.exhaustive("jax", "tensorflow")
def test_the_model_of_fit_takes_the_optimizer_of_the_same_arguments():
    arguments = dict(clip_gradients=0.3, loss_scaling="Backoff", iter_size=2)
    x, y = problem.data(num_steps=4)
    compiled = problem.model()
    compiled.compile(ks.build_optimizer("Momentum", {"momentum": 0.9}, 0.1, **arguments), "mse")
    compiled.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    model = problem.model()
    step = ks.optimize_loss(squared(model), "Momentum", {"momentum": 0.9}, 0.1, model=model, **arguments)
    for start in range(0, 64, 16):
        step(x[start : start + 16], y[start : start + 16])
    assert int(ops.convert_to_numpy(step.optimizer.iterations)) == 2
    assert problem.relative_difference(weights_of(model), weights_of(compiled)) <= problem.TOLERANCE


def test_state_that_the_loss_touches():
    """Moving statistics and seeds move; variables that are only read may be set; nothing becomes a constant."""
    model = keras.Sequential([keras.Input((5,)), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)])
    outside, factor = keras.Variable(2.0), keras.Variable(1.0, trainable=False)
    seed = keras.random.SeedGenerator(3)
    counted = keras.Variable(0.0, trainable=False)

    def loss(x):
        counted.assign_add(1.0)
        noise = keras.random.normal((), seed=seed)
        return ops.square(outside * factor - 1) + 0 * noise + ops.mean(model(x, training=True)) * 0

    step = ks.optimize_loss(loss, "SGD", {}, 0.25, var_list=[outside], model=None)
    x = problem.data(num_steps=1)[0]
    statistics = [model.layers[0].moving_mean, model.layers[0].moving_variance]
    before = [ops.convert_to_numpy(v).copy() for v in statistics]
    assert float(step(x)) == 1.0
    factor.assign(0.0)
    assert float(step(x)) == 1.0
    factor.assign(1.0)
    assert float(step(x)) == pytest.approx(0.25)
    assert float(ops.convert_to_numpy(counted)) == 3.0
    after = [ops.convert_to_numpy(v) for v in statistics]
    assert all(np.any(a != b) for a, b in zip(after, before))
    assert np.any(ops.convert_to_numpy(seed.state) != [3, 0])
    assert all(np.all(ops.convert_to_numpy(v) == v0) for v, v0 in zip(model.trainable_variables, (1.0, 0.0)))


def test_no_gradient_for_some():
    used, unused = keras.Variable(1.0, name="used"), keras.Variable(1.0, name="unused")
    arguments = dict(clip_gradients=10.0, summaries=["gradient_norm", "gradients", "global_gradient_norm"], every=1)
    step = ks.optimize_loss(
        lambda x: used * ops.sum(x), "SGD", {}, 0.5, var_list=[used, unused], loss_scaling="Backoff", **arguments
    )
    with warn_of_unused():
        step(np.ones(2, "float32"))
    assert float(ops.convert_to_numpy(used)) == 0.0
    assert float(ops.convert_to_numpy(unused)) == 1.0
    seen = step.summaries()
    assert seen["Loss_Optimization/gradient_norm/used"] == 2.0 == seen["Loss_Optimization/global_gradient_norm"]
    # JAX has zeros where the others have none.
    assert seen.get("Loss_Optimization/gradient_norm/unused", 0.0) == 0.0


def warn_of_unused():
    import contextlib

    if keras.config.backend() == "jax":
        return contextlib.nullcontext()
    return pytest.warns(UserWarning, match="Gradients do not exist")


def test_penalties_of_the_model():
    layer = keras.layers.Dense(
        1, use_bias=False, kernel_initializer="ones", kernel_regularizer=keras.regularizers.L2(1.0)
    )
    model = keras.Sequential([keras.Input((2,)), layer])
    step = ks.optimize_loss(lambda x: 0.0 * ops.mean(model(x)), "SGD", {}, 0.25, model=model)
    assert float(step(np.ones((4, 2), "float32"))) == 2.0
    np.testing.assert_allclose(ops.convert_to_numpy(layer.kernel), 0.5)


@pytest.mark.parametrize("compiled_with", [None, "sgd"])
def test_a_penalty_counts_once_where_the_optimizer_takes_it_on_masters(compiled_with):
    layer = keras.layers.Dense(
        1, use_bias=False, kernel_initializer="ones", kernel_regularizer=keras.regularizers.L2(1.0), dtype="bfloat16"
    )
    model = keras.Sequential([keras.Input((2,)), layer])
    if compiled_with is not None:  # has nothing to do with the step
        model.compile(compiled_with, "mse")
    step = ks.optimize_loss(lambda x: 0.0 * ops.mean(model(x)), "SGD", {}, 0.125, dtype="mixed", model=model)
    assert float(step(np.ones((4, 2), "float32"))) == 2.0
    np.testing.assert_allclose(ops.convert_to_numpy(ops.cast(layer.kernel, "float32")), 0.75)


@pytest.mark.backends("tensorflow", "jax")  # `torch.compile` needs a C++ compiler
@pytest.mark.exhaustive("jax", "tensorflow")
def test_compiled_further():
    x, y = problem.data(num_steps=4)
    found = []
    for jit_compile in (None, True):
        model = problem.model()
        arguments = dict(clip_gradients=0.3, loss_scaling="Backoff", iter_size=2, jit_compile=jit_compile)
        step = ks.optimize_loss(squared(model), "Momentum", {"momentum": 0.9}, 0.3, model=model, **arguments)
        for start in range(0, 64, 16):
            step(x[start : start + 16], y[start : start + 16])
        found.append(weights_of(model))
    # The compiler may fuse a sum and round it otherwise, and two updates do not move far.
    assert problem.relative_difference(*found) <= 5 * problem.TOLERANCE


def test_who_says_when_a_window_ends():
    weight = keras.Variable(0.0)
    arguments = dict(var_list=[weight], iter_size=2, on_horovod=True)
    step = ks.optimize_loss(lambda x: weight * ops.sum(x), "SGD", {}, 1.0, skip_update_ph=True, **arguments)
    one = np.ones(1, "float32")
    for skip in (True, True, True, False, False):
        step(one, skip_update=skip)
    # Four and one, each of them a half.
    assert float(ops.convert_to_numpy(weight)) == -2.5
    with pytest.raises(ValueError, match="must be passed to each call"):
        step(one)
    counting = ks.optimize_loss(lambda x: weight * ops.sum(x), "SGD", {}, 1.0, **arguments)
    with pytest.raises(ValueError, match="`skip_update` must not be passed"):
        counting(one, skip_update=True)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"loss": 3.0}, TypeError, "`loss` must be a function"),
        ({"var_list": None}, ValueError, "`var_list` or `model`"),
        ({"var_list": []}, ValueError, "var_list"),
        ({"var_list": None, "model": keras.Sequential([keras.layers.Dense(1)])}, ValueError, "must be a built"),
        ({"summaries": ["lr"]}, ValueError, "'lr'"),
        ({"summaries": "gradients"}, TypeError, "summaries"),
        ({"skip_update_ph": True}, ValueError, "iter_size"),
        ({"skip_update_ph": 3}, TypeError, "skip_update_ph"),
        ({"summaries": ["gradients"], "every": 0}, ValueError, "every=0"),
    ],
)
def test_mistakes(arguments, error, words):
    given = {"loss": lambda: 0.0, "optimizer": "SGD", "var_list": [keras.Variable(1.0)], **arguments}
    with pytest.raises(error, match=words):
        ks.optimize_loss(**given)


def test_a_loss_that_is_no_scalar_is_refused():
    weight = keras.Variable(1.0)
    step = ks.optimize_loss(lambda x: weight * x, "SGD", var_list=[weight])
    with pytest.raises(ValueError, match="must return a scalar"):
        step(np.ones(3, "float32"))
    frozen = keras.Variable(1.0, trainable=False, name="frozen")
    with pytest.raises(ValueError, match="frozen"):
        ks.optimize_loss(lambda: frozen, "SGD", var_list=[frozen])
