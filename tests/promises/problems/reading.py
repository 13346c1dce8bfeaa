"""A model whose state is loaded before it has trained: what can be read then, and how training goes on."""

from __future__ import annotations

import os
import tempfile
import warnings

import keras
from support import problem

import keras_shardopt as ks
from keras_shardopt.backends.active import processes

NUM_UPDATES = 4
SCALE = 8.0
WAYS = {
    "whole": lambda inner: ks.CrossShard(inner),
    "divided": lambda inner: ks.CrossShard(inner, shard_state=True),
    "loaded by one process": lambda inner: ks.CrossShard(inner),
}


def made(name):
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    inner = ks.LossScaling(keras.optimizers.SGD(rate, momentum=0.9), "Backoff", {"scale_max": SCALE})
    model = problem.model()
    model.compile(WAYS[name](inner), "mse")
    return model


def fit(model, start=0):
    rows = slice(start * problem.BATCH_SIZE, (start + NUM_UPDATES) * problem.BATCH_SIZE)
    x, y = (array[rows] for array in problem.data(num_steps=2 * NUM_UPDATES))
    model.fit(x, y, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
    return model


def reading(replicas, name):
    """Updates, rate and scale after loading; weights after that and some steps, and those without an interruption."""
    whole = fit(made(name))
    file = os.path.join(processes.gather_objects(tempfile.mkdtemp())[0], "model.weights.h5")
    ks.save_weights(whole, file)
    loaded = made(name)
    if replicas.is_chief or "one process" not in name:
        loaded.load_weights(file)
    optimizer = loaded.optimizer
    read = [
        float(keras.ops.convert_to_numpy(v))
        for v in (optimizer.iterations, optimizer.learning_rate, optimizer.loss_scale)
    ]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*process 0")  # that the others are given its state
        fit(loaded, NUM_UPDATES)
    return read, loaded.get_weights(), fit(whole, NUM_UPDATES).get_weights()
