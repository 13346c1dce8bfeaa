"""TensorFlow 1's two phases, `compute_gradients` and `apply_gradients`, and both at once, on every backend."""

import keras
import numpy as np
import pytest
from conftest import BACKEND
from keras import ops
from support import problem
from support.worlds import FakeWorld

import keras_shardopt as ks
from keras_shardopt.backends.communicator import GradientState


def batches(num_steps=4):
    x, y = problem.data(num_steps)
    for start in range(0, len(x), problem.BATCH_SIZE):
        yield x[start : start + problem.BATCH_SIZE], y[start : start + problem.BATCH_SIZE]


def squared_error(model, x, y):
    return ops.mean(ops.square(ops.subtract(model(x, training=True), y)))


def trained_by(step, optimizer, num_steps=4):
    model = problem.model()
    optimizer.build(model.trainable_variables)
    for x, y in batches(num_steps):
        step(optimizer, lambda x=x, y=y: squared_error(model, x, y), model.trainable_variables)
    return model.get_weights()


def minimize(optimizer, loss, variables):
    optimizer.minimize(loss, variables)


def two_phases(optimizer, loss, variables):
    optimizer.apply_gradients(optimizer.compute_gradients(loss, variables))


def in_numpy(update=None, num_steps=4):
    weights = [w.astype("float64") for w in problem.start_weights()]
    velocities = [np.zeros_like(w) for w in weights]
    for x, y in batches(num_steps):
        grads = problem.gradients_in_numpy(weights, x.astype("float64"), y.astype("float64"))
        for weight, velocity, grad in zip(weights, velocities, grads if update is None else update(grads)):
            velocity *= 0.9
            velocity -= 0.1 * grad
            weight += velocity
    return weights


INNERS = {
    "plain": problem.sgd_momentum,
    "scaled by a factor": lambda: keras.optimizers.SGD(0.1, momentum=0.9, loss_scale_factor=1000.0),
    "scaled dynamically": lambda: keras.optimizers.LossScaleOptimizer(problem.sgd_momentum(), initial_scale=2.0**15),
}
each_inner = pytest.mark.parametrize("inner", INNERS)


@each_inner
@pytest.mark.parametrize("step", [minimize, two_phases])
@pytest.mark.exhaustive("jax", "tensorflow")
def test_it_trains(inner, step):
    weights = trained_by(step, ks.CrossShard(INNERS[inner]()))
    assert problem.relative_difference(weights, in_numpy()) <= 1e-5


@each_inner
def test_gradients_are_in_units_of_the_loss_and_may_be_changed_in_between(inner):
    limit = 0.3

    def clip_in_between(optimizer, loss, variables):
        grads, of = zip(*optimizer.compute_gradients(loss, variables))
        assert all(v is w for v, w in zip(of, variables))
        clipped, _ = ks.clip_by_global_norm(list(grads), limit)
        optimizer.apply_gradients(zip(clipped, of))

    def clipped_in_numpy(grads):
        norm = np.sqrt(sum(np.sum(g**2) for g in grads))
        assert norm > limit
        return [g * limit / norm for g in grads]

    weights = trained_by(clip_in_between, ks.CrossShard(INNERS[inner]()))
    assert problem.relative_difference(weights, in_numpy(clipped_in_numpy)) <= 1e-5


@each_inner
@pytest.mark.exhaustive("jax", "tensorflow")
def test_a_loop_that_scales_its_loss_itself_still_works_after_it(inner):
    """`compute_gradients` only to look at gradients, then `fit`."""
    optimizer = ks.CrossShard(INNERS[inner]())
    model = problem.model()
    model.compile(optimizer, "mse", auto_scale_loss=False)
    optimizer.build(model.trainable_variables)
    x, y = problem.data(num_steps=4)
    first = optimizer.compute_gradients(lambda: squared_error(model, x[:16], y[:16]))
    for (grad, _), expected in zip(first, problem.gradients_in_numpy(problem.start_weights(), x[:16], y[:16])):
        np.testing.assert_allclose(ops.convert_to_numpy(grad), expected, rtol=1e-4, atol=1e-6)
    model.fit(x, y, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
    assert problem.relative_difference(model.get_weights(), in_numpy()) <= 1e-5


def test_units_that_are_not_restored_turn_the_check_red(monkeypatch):
    from keras_shardopt.optimizers import cross_shard

    monkeypatch.setattr(cross_shard, "scaled_gradients", lambda grads, *_: grads)
    with pytest.raises(AssertionError):
        test_it_trains("scaled dynamically", two_phases)


@pytest.mark.parametrize("gradient_state", [GradientState.LOCAL, GradientState.LOCAL_PRESCALED])
@each_inner
@pytest.mark.exhaustive("jax", "tensorflow")
def test_replicas_equal_one_process_with_the_whole_batch(inner, gradient_state, monkeypatch):
    world = FakeWorld(2, gradient_state, is_spmd=False).hold(monkeypatch)
    models = [problem.model() for _ in range(2)]
    optimizers = [ks.CrossShard(INNERS[inner]()) for _ in range(2)]
    for optimizer, model in zip(optimizers, models):
        optimizer.build(model.trainable_variables)
    x, y = ([problem.rows_of_replica(a, r, 2) for r in range(2)] for a in problem.data(num_steps=4))

    def train(replicas):
        r = replicas.replica_id
        for start in range(0, len(x[r]), 8):
            rows = slice(start, start + 8)

            def loss(rows=rows):
                value = squared_error(models[r], x[r][rows], y[r][rows])
                return value / 2 if gradient_state is GradientState.LOCAL_PRESCALED else value

            optimizers[r].minimize(loss)

    world.run(train)
    for model in models:
        assert problem.relative_difference(model.get_weights(), in_numpy()) <= 1e-5


def test_the_counter_is_returned():
    weight = keras.Variable([1.0])
    optimizer = ks.CrossShard("sgd")
    counts = [optimizer.minimize(lambda: ops.sum(ops.square(weight)), [weight]) for _ in range(2)]
    assert [int(ops.convert_to_numpy(c)) for c in counts][-1] == int(ops.convert_to_numpy(optimizer.iterations)) == 2


def test_computing_changes_nothing():
    weight = keras.Variable([1.0, 2.0])
    optimizer = ks.CrossShard(keras.optimizers.Adam())
    optimizer.build([weight])
    for _ in range(2):
        ((grad, of),) = optimizer.compute_gradients(lambda: ops.sum(ops.square(weight)))
        assert of is weight
        np.testing.assert_array_equal(ops.convert_to_numpy(grad), [2.0, 4.0])
    np.testing.assert_array_equal(ops.convert_to_numpy(weight), [1.0, 2.0])
    assert int(ops.convert_to_numpy(optimizer.iterations)) == 0
    if BACKEND == "torch":
        assert weight.value.grad is None


def test_what_the_loss_assigns_is_assigned_once():
    """Moving statistics and seeds, and nothing of a trace stays behind in them."""
    keras.utils.set_random_seed(3)
    layers = [keras.Input((5,)), keras.layers.BatchNormalization(momentum=0.9)]
    model = keras.Sequential([*layers, keras.layers.Dense(3)])
    optimizer = ks.CrossShard("sgd")
    x, y = problem.data(num_steps=1)
    generator = keras.random.SeedGenerator(5)
    seed = generator.state
    before = ops.convert_to_numpy(seed).copy()

    def loss():
        noise = keras.random.normal(x.shape, stddev=1e-6, seed=generator)
        return squared_error(model, ops.add(x, noise), y)

    optimizer.minimize(loss, model.trainable_variables)
    mean = ops.convert_to_numpy(model.layers[0].moving_mean)
    np.testing.assert_allclose(mean, 0.1 * x.mean(axis=0), rtol=1e-4, atol=1e-5)
    assert not np.array_equal(ops.convert_to_numpy(seed), before)
    first = model.predict(x, verbose=0)
    optimizer.minimize(loss, model.trainable_variables)
    assert np.abs(model.predict(x, verbose=0) - first).max() > 0


def test_losses_that_layers_add_are_seen():
    layers = [keras.Input((5,)), keras.layers.ActivityRegularization(l2=0.5)]
    model = keras.Sequential([*layers, keras.layers.Dense(3, kernel_regularizer=keras.regularizers.L2(0.25))])
    kernel = model.layers[-1].kernel
    x, _ = problem.data(num_steps=1)
    optimizer = ks.CrossShard("sgd")

    def loss():
        model(x, training=True)
        assert len(model.losses) == 2
        return sum(model.losses)

    ((grad, _),) = optimizer.compute_gradients(loss, [kernel])
    np.testing.assert_allclose(ops.convert_to_numpy(grad), 0.5 * ops.convert_to_numpy(kernel), rtol=1e-5)


def test_a_part_of_the_variables():
    model = problem.model()
    optimizer = ks.CrossShard(keras.optimizers.SGD(0.1))
    optimizer.build(model.trainable_variables)
    x, y = problem.data(num_steps=1)
    optimizer.minimize(lambda: squared_error(model, x, y), model.trainable_variables[2:])
    weights, start = model.get_weights(), problem.start_weights()
    for unchanged in (0, 1):
        np.testing.assert_array_equal(weights[unchanged], start[unchanged])
    assert np.abs(weights[2] - start[2]).max() > 1e-3


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_a_variable_that_the_loss_does_not_depend_on():
    used, unused = keras.Variable([1.0]), keras.Variable([1.0])
    optimizer = ks.CrossShard(keras.optimizers.SGD(0.5))
    pairs = optimizer.compute_gradients(lambda: ops.sum(used), [used, unused])
    if BACKEND == "jax":
        np.testing.assert_array_equal(pairs[1][0], [0.0])
    else:
        assert pairs[1][0] is None
    optimizer.apply_gradients(pairs)
    assert float(ops.convert_to_numpy(used)[0]) == 0.5
    assert float(ops.convert_to_numpy(unused)[0]) == 1.0


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_half_precision_is_unscaled_without_loss(half):
    """2 to the -26 is no float16, but 2 to the 12 times that is."""
    weight = keras.Variable([1.0], dtype=half)
    optimizer = ks.CrossShard(keras.optimizers.SGD(1.0, loss_scale_factor=2.0**12))
    ((grad, _),) = optimizer.compute_gradients(lambda: ops.cast(ops.sum(weight), "float32") * 2.0**-26, [weight])
    assert keras.backend.standardize_dtype(grad.dtype) == "float32"
    assert float(ops.convert_to_numpy(grad)[0]) == 2.0**-26


@pytest.mark.parametrize("loss", [3.0, None, "loss", np.ones(())])
def test_a_loss_that_is_no_function(loss):
    for call in (ks.CrossShard("sgd").compute_gradients, ks.CrossShard("sgd").minimize):
        with pytest.raises(TypeError, match=r"`loss` must be a function.*minimize\(lambda: "):
            call(loss, [keras.Variable([1.0])])


def test_a_loss_that_is_no_scalar():
    weight = keras.Variable([1.0, 2.0])
    with pytest.raises(ValueError, match=r"scalar. Received: a tensor of shape \(2,\)"):
        ks.CrossShard("sgd").minimize(lambda: ops.square(weight), [weight])


def test_variables_must_be_known_and_trainable():
    weight, frozen = keras.Variable([1.0]), keras.Variable([1.0], trainable=False, name="frozen")
    optimizer = ks.CrossShard("sgd")
    with pytest.raises(ValueError, match=r"`var_list` is required.*minimize\(loss, model.trainable_variables\)"):
        optimizer.minimize(lambda: ops.sum(weight))
    with pytest.raises(ValueError, match=r"`var_list` must hold trainable variables. Received: \['frozen'\]"):
        optimizer.minimize(lambda: ops.sum(weight), [weight, frozen])
    with pytest.raises(ValueError, match="`var_list` must hold"):
        optimizer.minimize(lambda: ops.sum(weight), [])


@pytest.mark.backends("jax")
def test_inside_jit():
    import jax

    model = problem.model()
    optimizer = ks.CrossShard(keras.optimizers.LossScaleOptimizer(problem.sgd_momentum(), initial_scale=64.0))
    optimizer.build(model.trainable_variables)
    everything = [*model.trainable_variables, *optimizer.variables]

    @jax.jit
    def step(values, x, y):
        with keras.StatelessScope(zip(everything, values)) as scope:
            optimizer.minimize(lambda: squared_error(model, x, y), model.trainable_variables)
        return [scope.get_current_value(v) for v in everything]

    values = [v.value for v in everything]
    for x, y in batches():
        values = step(values, x, y)
    assert problem.relative_difference([np.asarray(v) for v in values[:4]], in_numpy()) <= 1e-5
    for weight, start in zip(model.get_weights(), problem.start_weights()):
        np.testing.assert_array_equal(weight, start)


@pytest.mark.backends("tensorflow")
def test_inside_a_function():
    import tensorflow as tf

    model = problem.model()
    optimizer = ks.CrossShard(keras.optimizers.LossScaleOptimizer(problem.sgd_momentum(), initial_scale=64.0))
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x, y):
        optimizer.minimize(lambda: squared_error(model, x, y), model.trainable_variables)

    for x, y in batches():
        step(x, y)
    assert problem.relative_difference(model.get_weights(), in_numpy()) <= 1e-5
