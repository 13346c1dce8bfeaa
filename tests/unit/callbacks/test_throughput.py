"""`Throughput`: rows per second of the batches after the first, in the bar and in the logs."""

import time

import keras
import numpy as np

import keras_shardopt as ks

SECONDS = 0.02


class Sleeps(keras.callbacks.Callback):
    """The first batch takes ten times as long as the others, and so does the validation."""

    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(SECONDS * (10 if batch == 0 else 1))

    def on_test_batch_begin(self, batch, logs=None):
        time.sleep(10 * SECONDS)


def test_rows_per_second_leave_out_the_first_batch_and_validation(capsys):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(ks.CrossShard("sgd"), "mse")
    x, y = np.ones((40, 3)), np.ones((40, 1))
    callbacks = [Sleeps(), ks.callbacks.Throughput(8)]
    model.fit(x, y, batch_size=8, verbose=0)  # compiles
    fit = {"batch_size": 8, "epochs": 2, "callbacks": callbacks, "validation_data": (x, y)}
    started = time.perf_counter()
    history = model.fit(x, y, verbose=2, **fit).history
    seconds = time.perf_counter() - started
    assert len(history["rows_per_s"]) == 2 and max(history["rows_per_s"]) <= 8 / SECONDS
    # The means cover four batches of each epoch, and neither the first batch nor the five of the validation.
    assert sum(4 * 8 / rate for rate in history["rows_per_s"]) <= seconds - 2 * (10 + 5 * 10) * SECONDS
    assert "val_loss" in history and "val_rows_per_s" not in history
    assert capsys.readouterr().out.count("rows_per_s: ") == 2
