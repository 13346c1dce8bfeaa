"""Steps of prepared models on JAX: what they leave as it is, what their logs hold, and what is left where one fails."""

import contextlib

import keras
import numpy as np
import pytest
from keras import ops
from support.suites import some

import keras_shardopt as ks
from keras_shardopt.backends import phases
from keras_shardopt.fit.jax import batches

pytestmark = pytest.mark.backends("jax")

RANDOM = np.random.RandomState(0)
X = RANDOM.randn(24, 5).astype("float32")
Y = RANDOM.randn(24, 1).astype("float32")


def net():
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(3), keras.layers.Dense(1)])


@contextlib.contextmanager
def compiled(make, loss="mse", num_devices=4, **options):
    keras.utils.set_random_seed(7)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    if num_devices is None:  # Keras by itself
        model = make()
        model.compile(optimizer, loss)
        yield model
        return
    with ks.data_parallel(num_devices) as replicas:
        model = make()
        model.compile(ks.CrossShard(optimizer, **options), loss)
    yield model
    replicas.close()


def values(model):
    return [keras.ops.convert_to_numpy(weight) for weight in model.weights]


def unchanged(grads, variables):
    return list(grads)


OPTIONS = {
    "transformed": {"replica_transform": unchanged},
    "accumulated": {"gradient_accumulation_steps": 2},
    "in parts": {"virtual_replicas": 4},
    "apart": {"sync_every": 1},
}


def _masked():
    tokens = keras.Input((6,), dtype="int32")
    embedded = keras.layers.Embedding(5, 4, mask_zero=True)(tokens)
    outputs = {name: keras.layers.Dense(size, name=name)(embedded) for name, size in (("p", 1), ("q", 2))}
    return keras.Model(tokens, outputs)


MASKED = [(rows, name) for rows in (8, 7) for name in OPTIONS if name != "accumulated"]


@pytest.mark.parametrize(("rows", "name"), some(MASKED, [(7, "transformed"), (8, "apart")]))
def test_losses_of_outputs_leave_out_what_is_masked(rows, name):
    tokens = RANDOM.randint(0, 5, (16, 6))
    tokens[:8, 2:] = 0
    tokens[:, 0] = 1
    targets = {"p": RANDOM.randn(16, 6, 1).astype("float32"), "q": RANDOM.randn(16, 6, 2).astype("float32")}
    weights = {"p": RANDOM.rand(16, 6), "q": RANDOM.rand(16, 6)}
    found = []
    for options in (None, OPTIONS[name]):
        more = {"num_devices": None} if options is None else options
        with compiled(_masked, {"p": "mse", "q": "mae"}, **more) as model:
            history = model.fit(tokens, targets, sample_weight=weights, batch_size=rows, shuffle=False, verbose=0)
            found.append(history.history)
    assert found[0].keys() == found[1].keys() == {"loss", "p_loss", "q_loss"}
    for key, expected in found[0].items():
        np.testing.assert_allclose(found[1][key], expected, rtol=1e-4)


def _holding_infinity():
    hidden = keras.layers.Dense(5, trainable=False)
    hidden.build((None, 5))
    hidden.kernel.assign(np.where(np.eye(5), -0.0, 1.0))
    hidden.bias.assign([np.inf, -np.inf, 0, 1, 2])
    return keras.Sequential([keras.Input((5,)), hidden, keras.layers.Activation("sigmoid"), keras.layers.Dense(1)])


@pytest.mark.parametrize("name", some(OPTIONS, ["transformed", "in parts"]))
def test_weights_that_a_step_does_not_change_keep_their_bits(name):
    with compiled(_holding_infinity, **OPTIONS[name]) as model:
        frozen = [value.tobytes() for value in values(model.layers[0])]
        history = model.fit(X, Y, batch_size=8, verbose=0).history
        assert [value.tobytes() for value in values(model.layers[0])] == frozen
        assert np.isfinite(history["loss"][0])


@pytest.mark.parametrize("policy", ["float32", "bfloat16"])
def test_training_goes_on_after_averages_have_become_the_weights(policy):
    """Plain Keras has one array for both then, which the next step gives up."""

    def make():
        layers = [keras.layers.Dense(size, dtype=policy) for size in (3, 1)]
        return keras.Sequential([keras.Input((5,)), *layers])

    with compiled(make, num_devices=1) as model:
        inner = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9)
        model.compile(ks.CrossShard(ks.MixedPrecision(inner) if policy == "bfloat16" else inner), "mse")
        model.fit(X, Y, batch_size=8, verbose=0)
        average = [value.copy() for value in values(model)]
        model.evaluate(X, Y, batch_size=8, verbose=0)
        model.fit(X, Y, batch_size=8, verbose=0)
        assert all(np.isfinite(value).all() for value in values(model))
        assert any((value != before).any() for value, before in zip(values(model), average))


def test_one_process_waits_for_no_other():
    recorder = phases.Recorder("other")
    with compiled(net, replica_clipnorm=1.0) as model:
        assert not batches.is_together()
        recorder.start()
        model.fit(X, Y, batch_size=7, verbose=0)
        model.evaluate(X, Y, batch_size=8, verbose=0)
        model.predict(X, batch_size=7, verbose=0)
    assert not {"waiting", "sending"} & set(recorder.stop())


# -- steps that fail ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["train_on_batch", "test_on_batch", "predict_on_batch", "evaluate"])
def test_what_was_set_after_a_step_stays_where_the_next_ones_fail(call):
    with compiled(net) as model:
        model.train_on_batch(X[:8], Y[:8])
        model.set_weights([np.full_like(value, 5) for value in values(model)])
        wrong = (X[:8, :3],) if call == "predict_on_batch" else (X[:8, :3], Y[:8])
        with pytest.raises(ValueError):
            getattr(model, call)(*wrong)
        with pytest.raises(ValueError):
            model.fit(X, Y[:3], verbose=0)  # before there is a step
        assert all((value == 5).all() for value in values(model))


def test_an_input_with_other_rows_is_whole_on_every_device():
    """A batch with one cannot be filled up."""
    rows, table = keras.Input((2,)), keras.Input((2,))
    data = [RANDOM.randn(number, 2).astype("float32") for number in (5, 3)]
    with ks.data_parallel(2) as replicas:
        model = keras.Model([rows, table], ops.matmul(rows, ops.transpose(table)))
        model.compile(ks.CrossShard("sgd"), "mse")
    np.testing.assert_allclose(model.predict_on_batch(data), data[0] @ data[1].T, rtol=1e-6)
    replicas.close()
