"""Epochs of `fit` for which no batch is left: what is logged, and what callbacks make of it."""

from __future__ import annotations

import warnings

import keras
from promises.problems import styles
from support import problem

import keras_shardopt as ks

CASES = ["built-in step", "custom train_step"]
NUM_BATCHES, EPOCHS = 3, 2  # later Keras begins with the batches that it has looked at first


def batches():
    x, y = problem.data(NUM_BATCHES)
    for i in range(NUM_BATCHES):
        rows = slice(i * problem.BATCH_SIZE, (i + 1) * problem.BATCH_SIZE)
        yield x[rows], y[rows]


def on_replicas(replicas, name):
    """The history, the best epoch and loss of `EarlyStopping`, and how often it was warned of empty epochs."""
    del replicas
    model = problem.model()
    if name == "custom train_step":
        model = styles.CustomStep(model.inputs, model.outputs)
    model.compile(ks.CrossShard(problem.sgd_momentum()), "mse")
    stopping = keras.callbacks.EarlyStopping("loss", patience=EPOCHS, restore_best_weights=True)
    validation = problem.data(NUM_BATCHES)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = model.fit(
            batches(),
            steps_per_epoch=NUM_BATCHES,
            epochs=EPOCHS,
            validation_data=validation,
            callbacks=[stopping],
            shuffle=False,
            verbose=0,
        ).history
    words = [str(each.message) for each in caught]
    return history, stopping.best_epoch, stopping.best, sum("An epoch without batches" in each for each in words)
