"""A model whose optimizer reports the memory of a replica after each batch and during a save."""

import gc
import tempfile

import keras
import numpy as np

import keras_shardopt as ks
from keras_shardopt.checkpoint.together import from_rank_0

CASES = {
    "plain": {},
    "shard_state": {"shard_state": True},
    "accumulation": {"shard_state": True, "gradient_accumulation_steps": 2},
}
if keras.config.backend() == "torch":
    CASES["divided weights"] = {"shard_state": True, "extensions": [ks.ShardedWeights()]}
SIZES = (60, 96, 8)
"""Features, hidden units, outputs: divisible by four, so JAX divides the arrays of state."""

NUM_WEIGHTS = 60 * 96 + 96 + 96 * 8 + 8
NUM_STATISTICS = 2 * 96


class Reports(keras.callbacks.Callback):
    """Takes `memory_report().kinds` after each batch and epoch."""

    kinds = None
    while_saving = None

    def on_train_batch_end(self, batch, logs=None):
        self.kinds = self.model.optimizer.memory_report().kinds

    def on_epoch_end(self, epoch, logs=None):
        self.while_saving = self.model.optimizer.memory_report().kinds


def reported(replicas, name):
    """Return `kinds` after the last batch, during a save of process 0's part, and after `fit`."""
    num_features, width, num_outputs = SIZES
    layers = [keras.layers.Dense(width, use_bias=False), keras.layers.BatchNormalization(scale=False)]
    model = keras.Sequential([keras.Input((num_features,)), *layers, keras.layers.Dense(num_outputs)])
    model.compile(ks.CrossShard(keras.optimizers.SGD(0.1, momentum=0.9), **CASES[name]), "mse")
    reports, x = Reports(), np.ones((24, num_features), "float32")
    with tempfile.TemporaryDirectory() as folder:
        shared = from_rank_0(lambda: folder)
        save = ks.callbacks.ShardedCheckpoint(shared)
        model.fit(x, x[:, :num_outputs], batch_size=12, epochs=2, verbose=0, callbacks=[save, reports])
    gc.collect()
    after = model.optimizer.memory_report().kinds
    return {"batch": reports.kinds, "save": reports.while_saving, "after": after}


def printed(replicas, name):
    """Return the text of a report before the first update."""
    model = keras.Sequential([keras.Input((50,)), keras.layers.Dense(2)])
    model.compile(ks.CrossShard("sgd"), "mse")
    model.optimizer.build(model.trainable_variables)
    return str(model.optimizer.memory_report())
