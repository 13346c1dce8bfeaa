"""Models that carry a state for each row from batch to batch."""

from __future__ import annotations

import keras
import numpy as np
from support import problem

import keras_shardopt as ks

BATCH_SIZE = 6
NUM_BATCHES = 4


def data(num_rows=NUM_BATCHES * BATCH_SIZE):
    random = np.random.default_rng(5)
    x = random.normal(size=(num_rows, 3, 2)) * np.resize(np.linspace(0.3, 1.8, BATCH_SIZE), num_rows)[:, None, None]
    return x.astype("float32"), random.normal(size=(num_rows, 1)).astype("float32")


class Carries(keras.layers.Layer):
    """A layer that is not of Keras, for a fixed number of rows."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 4), name="kernel")
        self.states = [self.add_weight(shape=(shape[0], 4), initializer="zeros", trainable=False, name="state")]

    def call(self, x):
        after = keras.ops.tanh(keras.ops.matmul(x[:, -1], self.kernel) + 0.5 * self.states[0])
        self.states[0].assign(after)
        return after

    def reset_state(self):
        self.states[0].assign(keras.ops.zeros_like(self.states[0]))


LAYERS = {
    "SimpleRNN": lambda: keras.layers.SimpleRNN(4, stateful=True),
    "Bidirectional": lambda: keras.layers.Bidirectional(keras.layers.SimpleRNN(3, stateful=True)),
    "Carries": Carries,
}


def trained(built):
    return [keras.ops.convert_to_numpy(v) for v in built.trainable_variables]


def model(rows, layer="SimpleRNN"):
    built = keras.Sequential([keras.Input(batch_shape=(rows, 3, 2)), LAYERS[layer](), keras.layers.Dense(1)])
    random = np.random.default_rng(0)
    for variable in built.trainable_variables:
        variable.assign((random.normal(size=variable.shape) * 0.4).astype("float32"))
    return built


class Resets(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch % 2:
            self.model.layers[0].reset_state()


# The rows that `batch_shape` names, and what else a case has.
CASES = {
    "whole batch": (BATCH_SIZE, {}),
    "rows of one replica": (BATCH_SIZE // 2, {}),
    "Bidirectional": (BATCH_SIZE, {"layer": "Bidirectional"}),
    "layer of your own": (BATCH_SIZE // 2, {"layer": "Carries"}),
    "each replica's gradients": (BATCH_SIZE, {"around": {"replica_clipnorm": 1e9}}),
    "apart": (BATCH_SIZE, {"around": {"sync_every": 1}}),
}


def run(replicas, name):
    """Weights and history of a case; of one process without the package where `replicas` is None."""
    rows, case = CASES[name]
    built = model(BATCH_SIZE if replicas is None else rows, case.get("layer", "SimpleRNN"))
    optimizer = keras.optimizers.SGD(0.3) if name == "apart" else keras.optimizers.SGD(0.1, momentum=0.9)
    if replicas is not None:
        optimizer = ks.CrossShard(optimizer, **case.get("around", {}))
    built.compile(optimizer, "mse", metrics=["mae"])
    if replicas is not None:
        ks.prepare(built, auto_shard=True)
    if rows == BATCH_SIZE:  # on JAX, where `fit` carries nothing, all batches start from these
        for state in keras.tree.flatten(built.layers[0].states):
            state.assign(np.linspace(-0.9, 0.9, np.prod(state.shape)).reshape(state.shape).astype("float32"))
    (x, y), given = data(), {"batch_size": BATCH_SIZE, "verbose": 0}
    looks = name == "whole batch"  # each other function takes seconds to trace
    validation = {"validation_data": data(2 * BATCH_SIZE)} if looks else {}
    found = built.fit(x, y, epochs=3, shuffle=False, callbacks=[Resets()], **validation, **given).history
    if looks:
        found["evaluated"] = [built.evaluate(x, y, **given) for _ in range(2)]
        found["predicted"] = 2 + built.predict(x, **given)  # far from zero, where relative differences mean nothing
    return trained(built), found


# The rows of `batch_shape`, of the data, and what is around the inner optimizer.
REFUSED = {
    "uneven": (BATCH_SIZE, 22, {}),
    "other rows": (4, 24, {}),
    "parts": (BATCH_SIZE, 24, {"virtual_replicas": 4}),
}


def refused(replicas, name):
    """What `fit` says, and the loss of a `fit` of the same model that works."""
    rows, num_rows, around = REFUSED[name]
    built = model(rows)
    built.compile(ks.CrossShard(problem.sgd_momentum(), **around), "mse")
    ks.prepare(built, auto_shard=True)
    x, y = data(num_rows)
    try:
        built.fit(x, y, batch_size=BATCH_SIZE, shuffle=False, verbose=0)
    except ValueError as error:
        text = str(error)
    else:
        text = "nothing"
    if name != "uneven":
        return text, None
    built.layers[0].reset_state()
    built.fit(x[:18], y[:18], batch_size=BATCH_SIZE, shuffle=False, verbose=0)
    return text, replicas.largest_difference(built)
