"""Parts of batches on JAX: losses that count rows get no padding, and steps that are not compiled are refused."""

import types

import jax
import keras
import numpy as np
import pytest
from keras.src.backend.jax import trainer
from promises.problems import uneven
from support.suites import some

import keras_shardopt as ks
from keras_shardopt.extensions.equal_bits import jax as parts

pytestmark = pytest.mark.backends("jax")

layers = keras.layers
NUM_ROWS = 11


class AddsLoss(layers.Layer):
    def call(self, x):
        self.add_loss(keras.ops.mean(keras.ops.square(x)))
        return x


def scalar(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_true - y_pred))


CASES = {
    "activity_regularizer": (lambda: layers.Dense(2, activity_regularizer="l2"), "mse"),
    "add_loss": (AddsLoss, "mse"),
    "scalar": (lambda: layers.Dense(2), scalar),
}


@pytest.mark.parametrize("case", some(CASES, ["add_loss"]))
def test_means_over_rows_are_those_of_the_whole_batch(case):
    """Of 11 rows parts have 3, 3, 3 and 2; of 5 rows 2, 2, 1 and none."""
    if case == "activity_regularizer" and not uneven.penalties_are_means():
        pytest.skip("this Keras does not divide penalties on activities by the number of rows")
    make, loss = CASES[case]
    x, y = (np.random.RandomState(1).randn(NUM_ROWS, size).astype("float32") for size in (3, 1))
    found = []
    for num_devices, options in ((1, {}), (2, {"virtual_replicas": 4})):
        keras.utils.set_random_seed(5)
        with ks.data_parallel(num_devices) as replicas:
            model = keras.Sequential([keras.Input((3,)), make(), layers.Dense(1)])
            model.compile(ks.CrossShard(keras.optimizers.SGD(0.1, momentum=0.9), **options), loss)
        losses = [model.evaluate(x[:rows], y[:rows], batch_size=rows, verbose=0) for rows in (NUM_ROWS, 5)]
        losses += [model.train_on_batch(x[:rows], y[:rows]) for rows in (NUM_ROWS, 5)]
        found.append([*losses, *model.get_weights()])
        replicas.close()
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("received", [{"run_eagerly": True}, {"jit_compile": False}])
def test_steps_that_are_not_compiled_are_refused(received):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    model.compile(ks.CrossShard("sgd", virtual_replicas=4), "mse", **received)
    ks.prepare(model)
    x, y = np.ones((NUM_ROWS, 3), "float32"), np.ones((NUM_ROWS, 1), "float32")
    ((name, value),) = received.items()
    for call in (model.fit, model.evaluate):
        with pytest.raises(ValueError, match=rf"^`VirtualReplicas` needs steps .* Received: {name}={value}, .*4"):
            call(x, y, verbose=0)


def test_passes_that_the_environment_leaves_out_stay_left_out(monkeypatch):
    options = []

    def jit(function, compiler_options, **kwargs):
        options.append(compiler_options)
        return jax.jit(function, compiler_options=compiler_options, **kwargs)

    monkeypatch.setattr(trainer, "jit", jit)
    environment = {"XLA_FLAGS": "--xla_a=1 --xla_disable_hlo_passes=fusion,dce --xla_b=2"}
    monkeypatch.setattr(
        parts, "os", types.SimpleNamespace(environ=environment)
    )  # XLA looks at the real one now and then
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    model.compile(ks.CrossShard("sgd", virtual_replicas=4), "mse")
    ks.prepare(model).train_on_batch(np.ones((4, 3)), np.ones((4, 1)))
    assert options == [{"xla_disable_hlo_passes": "fusion,dce,cse"}]


def test_a_test_step_of_ones_own_runs_as_it_is():
    class Own(keras.Sequential):
        def test_step(self, state, data):
            _, state = super().test_step(state, data)
            return {"rows": keras.ops.ones(()) * data[0].shape[0]}, state

    model = Own([keras.Input((3,)), layers.Dense(1)])
    model.compile(ks.CrossShard("sgd", virtual_replicas=4), "mse")
    ks.prepare(model)
    found = model.evaluate(np.ones((4, 3)), np.ones((4, 1)), batch_size=4, verbose=0, return_dict=True)
    assert found == {"rows": 4.0}


@pytest.mark.parametrize("options", some([{}, {"shard_state": True}], [{"shard_state": True}]))
def test_norms_of_single_gradients_do_not_depend_on_the_number_of_devices(options):
    """What a norm is made of is fused with it, and how gradients are added up depends on that number."""
    random = np.random.RandomState(1)
    x, y = random.randn(16, 12).astype("float32"), random.randn(16, 4).astype("float32")
    found = set()
    for num_devices in (1, 2, 8):
        keras.utils.set_random_seed(5)
        with ks.data_parallel(num_devices) as replicas:
            model = keras.Sequential([keras.Input((12,)), layers.Dense(32, "relu"), layers.Dense(4)])
            inner = keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.01)
            model.compile(ks.CrossShard(inner, virtual_replicas=8, **options), "mse")
        for _ in range(2):
            model.train_on_batch(x, y)
        found.add(b"".join(keras.ops.convert_to_numpy(weight).tobytes() for weight in model.weights))
        replicas.close()
    assert len(found) == 1
