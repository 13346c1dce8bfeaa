"""Parts of batches on JAX: what counts the rows that fill them up is refused, and steps that are not compiled."""

import keras
import numpy as np
import pytest

import keras_shardopt as ks

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
    "activity_regularizer": (
        lambda: layers.Dense(2, activity_regularizer="l2", name="penalized"),
        "mse",
        "'penalized'",
    ),
    "add_loss": (AddsLoss, "mse", "1 added loss"),
    "scalar": (lambda: layers.Dense(2), scalar, "a scalar"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("called", ["evaluate", "fit"])
def test_what_counts_padding_is_refused_in_words_of_virtual_replicas(case, called):
    make, loss, received = CASES[case]
    x = np.ones((NUM_ROWS, 3), "float32")
    y = np.ones((NUM_ROWS, 1), "float32")
    with ks.data_parallel(2) as replicas:
        model = keras.Sequential([keras.Input((3,)), make(), layers.Dense(1)])
        model.compile(ks.CrossShard("sgd", virtual_replicas=4), loss)
    value = model.evaluate(x[:8], y[:8], batch_size=8, verbose=0)  # it divides
    assert np.isfinite(value)
    words = rf"^`virtual_replicas` fills up .*{received}.* 11 rows, virtual_replicas=4.* leave `virtual_replicas` out"
    with pytest.raises(ValueError, match=words):
        getattr(model, called)(x, y, batch_size=NUM_ROWS, verbose=0)
    assert model.evaluate(x[:8], y[:8], batch_size=8, verbose=0) == value  # nothing is lost
    model.fit(x[:8], y[:8], batch_size=8, verbose=0)
    replicas.close()


@pytest.mark.parametrize("received", [{"run_eagerly": True}, {"jit_compile": False}])
def test_steps_that_are_not_compiled_are_refused(received):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    model.compile(ks.CrossShard("sgd", virtual_replicas=4), "mse", **received)
    ks.prepare(model)
    x, y = np.ones((NUM_ROWS, 3), "float32"), np.ones((NUM_ROWS, 1), "float32")
    ((name, value),) = received.items()
    for call in (model.fit, model.evaluate):
        with pytest.raises(ValueError, match=rf"^`virtual_replicas` needs steps .* Received: {name}={value}, .*=4"):
            call(x, y, verbose=0)
