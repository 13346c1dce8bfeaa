"""One of two JAX processes with one device each: what can be read and saved before the first step."""

import pathlib
import sys

import keras
import numpy as np
from support import problem

import keras_shardopt as ks

folder = pathlib.Path(sys.argv[1])


def made():
    model = problem.model()
    model.compile(ks.CrossShard(keras.optimizers.Adam(0.01), shard_state=True), "mse")
    return model


def backups(epochs):
    """The weights after so many epochs, of which a backup may have some."""
    model = made()
    callback = ks.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False, sharded=True)
    x, y = problem.data()
    arguments = {"batch_size": problem.BATCH_SIZE, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, epochs=epochs, callbacks=[callback], **arguments)
    return history.epoch, model.get_weights()


with ks.data_parallel() as scope:
    assert scope.num_processes == scope.num_replicas == 2
    model = made()
    assert scope.largest_difference(model) == 0
    model.optimizer.build(model.trainable_variables)
    report = model.optimizer.memory_report()
    slots = 2 * sum(weight.nbytes for weight in model.get_weights())
    assert slots <= sum(report.held) <= 1.2 * slots + 100, str(report)
    path = ks.save_sharded(model, folder / "new")
    weights = model.get_weights()
    for variable in model.trainable_variables:
        variable.assign(variable + 1)
    assert ks.load_sharded(model, path) == (0, 0)
    for one, other in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(one, other)
    assert backups(2)[0] == [0, 1]
    epochs, resumed = backups(3)
    assert epochs == [2]
    model = made()
    x, y = problem.data()
    model.fit(x, y, epochs=3, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
    for one, other in zip(resumed, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
scope.close()
