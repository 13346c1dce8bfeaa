"""What looks at gradients or weights does the same on every backend, and in `CrossShard` on any number of replicas."""

import functools

import keras
import numpy as np
import pytest
from conftest import BACKEND
from promises.problems import at_work
from support import problem
from support.suites import some

import keras_shardopt as ks

each_wrapper = pytest.mark.parametrize("name", at_work.AT_WORK)


def fit(model):
    x, y = problem.data()
    model.fit(x, y, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
    return model.get_weights()


@functools.cache
def on_one_device(name):
    return fit(at_work.compiled(name, at_work.alone(name)))


@each_wrapper
def test_every_backend_agrees_with_the_run_in_numpy(name):
    # Each backend within half of it, so that any two agree to all of it.
    assert problem.relative_difference(on_one_device(name), at_work.trained_in_numpy(name)) <= problem.TOLERANCE / 2


@each_wrapper
def test_it_is_at_work(name):
    if name == "Tower":
        return  # which must not change the training
    assert problem.relative_difference(on_one_device(name), problem.trained_in_numpy()) > 1e-2


OFTEN = ["LARC"] if BACKEND == "tensorflow" else ["LARC", "Tower", "VariableClipping"]


@pytest.mark.parametrize("num_replicas", [4] if BACKEND == "torch" else some([2, 4], [2]))
@pytest.mark.parametrize("name", some(at_work.AT_WORK, OFTEN, "tensorflow", "jax"))
def test_inside_cross_shard_it_sees_global_gradients(world, name, num_replicas):
    difference, weights = world.run(at_work.on_replicas, num_replicas, name, of=at_work.AT_WORK)
    assert difference == 0
    assert problem.relative_difference(weights, on_one_device(name)) <= problem.TOLERANCE


@pytest.mark.backends("tensorflow")
def test_rows_that_any_replica_looks_up_are_clipped_on_all():
    x = np.arange(16).reshape(16, 1) % 5
    x[:8] = 0  # so that replicas look up different rows
    y = np.zeros((16, 4), "float32")

    def trained(wrap):
        layers = [keras.Input((1,), dtype="int32"), keras.layers.Embedding(6, 4), keras.layers.Flatten()]
        model = keras.Sequential(layers)
        model.set_weights([np.full((6, 4), 2.0)])
        inner = ks.VariableClipping(keras.optimizers.SGD(0.01), {".*embeddings": [1]}, 1.0)
        model.compile(wrap(inner), "mse")
        model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
        return model

    with ks.data_parallel(2) as replicas:
        model = trained(ks.CrossShard)
        assert replicas.largest_difference(model) == 0
    np.testing.assert_allclose(np.linalg.norm(model.get_weights()[0], axis=1), [1, 1, 1, 1, 1, 4], rtol=1e-6)
    np.testing.assert_allclose(model.get_weights()[0], trained(lambda inner: inner).get_weights()[0], rtol=1e-6)
