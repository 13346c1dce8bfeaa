"""TensorFlow and JAX: the devices of one process equal one device with the whole batch, under `fit`."""

import functools

import keras
import pytest
from conftest import BACKEND
from support import problem
from support.reducing import global_gradients, plant
from support.suites import some

import keras_shardopt as ks
from keras_shardopt.backends.communicator import GradientState

pytestmark = pytest.mark.backends("tensorflow", "jax")

# TensorFlow traces a step once for each replica.
SOME = 2 if BACKEND == "tensorflow" else 4
each_number = pytest.mark.parametrize("num_replicas", some([2, 4] if BACKEND != "jax" else [2, 4, 8], [SOME]))
OPTIMIZERS = problem.keras_optimizers()


def fit(optimizer, x=None, y=None, make_model=problem.model, batch_size=problem.BATCH_SIZE, **compile_arguments):
    if x is None:
        x, y = problem.data()
    model = make_model()
    model.compile(optimizer, **{"loss": "mse", **compile_arguments})
    # Before `fit`, because ScheduleFreeAdamW assigns in `build`, which TensorFlow would trace into every step.
    optimizer.build(model.trainable_variables)
    model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)
    return model


def fit_on_replicas(num_replicas, make, *args, **kwargs):
    with ks.data_parallel(num_replicas) as replicas:
        assert replicas.num_replicas == num_replicas
        model = fit(make(), *args, **kwargs)
        assert replicas.largest_difference(model) == 0
    weights = model.get_weights()
    replicas.close()
    return weights


@functools.cache
def on_one_device(name):
    return fit(OPTIMIZERS[name]()).get_weights()


@functools.cache
def with_momentum(num_replicas):
    return fit_on_replicas(num_replicas, lambda: ks.CrossShard(problem.sgd_momentum()))


def check_equals_one_device(num_replicas, name="SGD momentum"):
    weights = fit_on_replicas(num_replicas, lambda: ks.CrossShard(OPTIMIZERS[name]()))
    assert problem.relative_difference(weights, on_one_device(name)) <= problem.tolerance(name)


@each_number
def test_replicas_equal_one_device(num_replicas):
    assert problem.relative_difference(with_momentum(num_replicas), on_one_device("SGD momentum")) <= problem.TOLERANCE


@pytest.mark.parametrize(
    "name", some([n for n in OPTIMIZERS if n != "SGD momentum"], ["Lamb" if BACKEND == "tensorflow" else "Adafactor"])
)
def test_every_keras_optimizer(name):
    check_equals_one_device(SOME, name)


def test_the_list_of_optimizers_is_complete():
    tested = {type(make()).__name__ for make in OPTIMIZERS.values()}
    wrappers = {"LossScaleOptimizer", "MultiOptimizer", "Optimizer"}
    shipped = {
        name
        for name, value in vars(keras.optimizers).items()
        if isinstance(value, type) and issubclass(value, keras.optimizers.Optimizer)
    }
    assert shipped - wrappers == tested


@each_number
def test_the_whole_agrees_with_a_run_in_numpy(num_replicas):
    """Against arithmetic that shares nothing with Keras: the model, its gradient and SGD with momentum by hand."""
    # float32 against float64 over twenty steps.
    assert problem.relative_difference(with_momentum(num_replicas), problem.trained_in_numpy()) <= 1e-5


@each_number
def test_the_sum_is_that_many_times_the_mean(num_replicas):
    weights = fit_on_replicas(num_replicas, lambda: ks.CrossShard(problem.sgd_momentum(), reduction="sum"))
    reference = fit(keras.optimizers.SGD(0.1 * num_replicas, momentum=0.9)).get_weights()
    assert problem.relative_difference(weights, reference) <= problem.TOLERANCE


@pytest.mark.parametrize("clip", some([{"global_clipnorm": 0.1}, {"clipnorm": 0.05}, {"clipvalue": 0.01}], 3))
@pytest.mark.exhaustive
def test_clipping_inside_sees_the_global_gradient(clip):
    def make():
        return keras.optimizers.SGD(0.1, momentum=0.9, **clip)

    weights = fit_on_replicas(SOME, lambda: ks.CrossShard(make()))
    assert problem.relative_difference(weights, fit(make()).get_weights()) <= problem.TOLERANCE


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True, ema_momentum=0.5), id="ema"),
        pytest.param(
            lambda: keras.optimizers.LossScaleOptimizer(problem.sgd_momentum(), initial_scale=4.0),
            id="lso",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            lambda: keras.optimizers.SGD(0.1, momentum=0.9, loss_scale_factor=8.0),
            id="loss_scale_factor",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
@pytest.mark.exhaustive
def test_composed_optimizers(make):
    weights = fit_on_replicas(2, lambda: ks.CrossShard(make()))
    assert problem.relative_difference(weights, fit(make()).get_weights()) <= problem.TOLERANCE


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="Keras before 3.15 has no MultiOptimizer")
@pytest.mark.parametrize("outside", some([True, False], 2))
@pytest.mark.exhaustive("tensorflow")
def test_multi_optimizer(outside):
    def multi(wrap):
        rules = {".*bias": wrap(keras.optimizers.SGD(0.05))}
        return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(wrap(problem.sgd_momentum()), rules))

    def make():
        return ks.CrossShard(multi(lambda inner: inner)) if outside else multi(ks.CrossShard)

    weights = fit_on_replicas(2, make)
    reference = fit(multi(lambda inner: inner)).get_weights()
    assert problem.relative_difference(weights, reference) <= problem.TOLERANCE


@pytest.mark.exhaustive
def test_nesting_reduces_once():
    weights = fit_on_replicas(2, lambda: ks.CrossShard(ks.CrossShard(problem.sgd_momentum(), reduction="sum")))
    assert problem.relative_difference(weights, on_one_device("SGD momentum")) <= problem.TOLERANCE


@pytest.mark.exhaustive
def test_a_weight_constraint():
    def constrained():
        return problem.model(constraint=keras.constraints.MaxNorm(0.5))

    weights = fit_on_replicas(2, lambda: ks.CrossShard(problem.sgd_momentum()), make_model=constrained)
    reference = fit(problem.sgd_momentum(), make_model=constrained).get_weights()
    assert problem.relative_difference(weights, reference) <= problem.TOLERANCE


# What breaks the reduction on each backend: TensorFlow's gradients under `fit` are local, JAX's are global.
def _unreduced(grads, variables, replicas, *_):
    return grads


def _reduced_twice(grads, variables, replicas, reduction="mean", gradient_state=None, trained=None):
    once = real_global_gradients(grads, variables, replicas, reduction, gradient_state)
    return real_global_gradients(once, variables, replicas, reduction, gradient_state)


def _taken_for_summed(grads, variables, replicas, reduction="mean", gradient_state=None, trained=None):
    return real_global_gradients(grads, variables, replicas, reduction, GradientState.SUMMED)


real_global_gradients = global_gradients
FAULTS = {"tensorflow": [_unreduced, _reduced_twice, _taken_for_summed], "jax": [_taken_for_summed]}


@pytest.mark.parametrize("fault", some(FAULTS.get(BACKEND, []), 3))
@pytest.mark.exhaustive
def test_a_planted_fault_turns_the_check_red(monkeypatch, fault):
    plant(monkeypatch, fault)
    with pytest.raises(AssertionError):
        check_equals_one_device(2)
