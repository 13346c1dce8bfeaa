"""When the logs of a batch are those of all replicas: only if somebody reads them."""

import types

import keras
import pytest

from keras_shardopt.callbacks import CheckReplicas
from keras_shardopt.fit import batch_logs, callbacks
from keras_shardopt.fit.batch_logs import BAR_SECONDS, BatchLogs

pytestmark = pytest.mark.neutral


class Reader(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        pass


class OldReader(keras.callbacks.Callback):
    def on_batch_end(self, batch, logs=None):
        pass


class ReaderOfTests(keras.callbacks.Callback):
    def on_test_batch_end(self, batch, logs=None):
        pass


def of_instance():
    callback = keras.callbacks.Callback()
    callback.on_train_batch_end = lambda batch, logs=None: None
    return callback


def bar(verbose):
    callback = keras.callbacks.ProgbarLogger()
    callback.verbose = verbose
    return callback


ALWAYS, AT_TIMES, NEVER = "always", "at times", "never"
CALLBACKS = {  # how often logs of training batches are read, and those of test batches outside of `fit`
    "none": (lambda: [], NEVER, NEVER),
    "one of two": (lambda: [keras.callbacks.History(), Reader()], ALWAYS, NEVER),
    "old name": (lambda: [OldReader()], ALWAYS, NEVER),
    "of an instance": (lambda: [of_instance()], ALWAYS, NEVER),
    "of tests": (lambda: [ReaderOfTests()], NEVER, ALWAYS),
    "of this package": (lambda: [CheckReplicas()], NEVER, NEVER),
    "files of epochs": (lambda: [keras.callbacks.ModelCheckpoint("of.keras")], NEVER, NEVER),
    "files of batches": (lambda: [keras.callbacks.ModelCheckpoint("of.keras", save_freq=2)], ALWAYS, ALWAYS),
    "summaries of epochs": (lambda: [keras.callbacks.TensorBoard("folder")], NEVER, NEVER),
    "summaries of batches": (lambda: [keras.callbacks.TensorBoard("folder", update_freq=2)], ALWAYS, ALWAYS),
    "bar": (lambda: [keras.callbacks.History(), bar(1)], AT_TIMES, AT_TIMES),
    "line of an epoch": (lambda: [bar(2)], NEVER, NEVER),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_logs_are_wanted_as_often_as_callbacks_read_them(name, monkeypatch):
    make, of_training, of_tests = CALLBACKS[name]
    now = [100.0]
    monkeypatch.setattr(batch_logs, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    model = types.SimpleNamespace(**{callbacks._CALLBACKS: make()})

    for trains, expected in ((True, of_training), (False, of_tests)):
        logs = BatchLogs(model)
        assert logs.are_read(trains) == (expected != NEVER)  # no logs to show again yet
        assert logs.last(trains, {"loss": 1.0}) == {"loss": 1.0}
        logs.show(trains, {"loss": 2.0})
        assert logs.last(trains, {"loss": 1.0}) == {"loss": 2.0}
        assert logs.last(not trains, {"loss": 1.0}) == {"loss": 1.0}
        now[0] += 0.9 * BAR_SECONDS
        assert logs.are_read(trains) == (expected == ALWAYS)
        now[0] += 0.2 * BAR_SECONDS
        assert logs.are_read(trains) == (expected != NEVER)
        seconds = logs.seconds_without_readers(trains)
        assert seconds == 0 if expected == ALWAYS else seconds >= 2 * BAR_SECONDS
        logs.show(trains, {"loss": 2.0})
        logs.forget()
        assert logs.are_read(trains) == (expected != NEVER)
        logs.is_fitting = True  # the bar of `fit` shows none of its validation
        assert logs.are_read(trains) == (expected == ALWAYS or (trains and expected == AT_TIMES))
