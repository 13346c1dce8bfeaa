"""Batches with None somewhere in their structure: no weights for one of two outputs, no optional input."""

from __future__ import annotations

import keras
import numpy as np
from promises.problems import uneven
from support import problem

import keras_shardopt as ks

BATCH_SIZE = uneven.BATCH_SIZE


class Adds(keras.layers.Layer):
    """Adds a second input, if there is one."""

    def build(self, x_shape, more_shape=None):
        self.kernel = self.add_weight(shape=(problem.NUM_FEATURES,), initializer="ones")

    def call(self, x, more=None):
        return x * self.kernel if more is None else x * self.kernel + more

    def compute_output_shape(self, x_shape, more_shape=None):
        return x_shape


def two_outputs(is_optional=True):
    x, more = keras.Input((problem.NUM_FEATURES,)), keras.Input((problem.NUM_FEATURES,), optional=True)
    hidden = Adds()(x, more) if is_optional else Adds()(x)
    dense = [keras.layers.Dense(3, kernel_initializer="ones", name=name) for name in ("first", "second")]
    return keras.Model([x, more] if is_optional else x, [layer(hidden) for layer in dense])


def data(rows=slice(None)):
    x, y = uneven.data()
    whole = [x, None], [y, y**2], [None, uneven.row_weights()]
    return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[rows], whole)


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return len(uneven.batches())

    def __getitem__(self, index):
        x, *others = data(uneven.batches()[index])
        return x[0], *others


def batches():
    if keras.config.backend() != "tensorflow":
        return Batches()
    import tensorflow as tf  # where Keras' generators take no None

    (x, _), (y, _), (_, weights) = data()
    dataset = tf.data.Dataset.from_tensor_slices((x, y, weights)).batch(BATCH_SIZE)
    return dataset.map(lambda x, y, weights: (x, (y, y**2), (None, weights)))


# What is around the inner optimizer.
CASES = {
    "arrays": {},
    "batches": {},
    "one by one": {},
    "windows": {"gradient_accumulation_steps": 2},
    "parts": {"virtual_replicas": 4},
    "each replica's gradients": {"replica_clipnorm": 1e9},
}


def run(replicas, name):
    """The weights, and the history or logs; of one process without the package where `replicas` is None."""
    keras.utils.set_random_seed(3)
    model, optimizer = two_outputs(is_optional=name != "batches"), keras.optimizers.SGD(0.02, momentum=0.9)
    if replicas is not None:
        optimizer = ks.CrossShard(optimizer, **CASES[name])
    model.compile(optimizer, "mse", weighted_metrics=[["mae"], ["mae"]])
    if replicas is not None:
        ks.prepare(model, auto_shard=True)
    if name == "one by one":
        found = {"logs": _one_by_one(model, replicas)}
        return model.get_weights(), found
    given = {"epochs": 2, "shuffle": False, "verbose": 0}
    if name == "batches":
        found = model.fit(batches(), validation_data=batches(), **given).history
        return model.get_weights(), found
    if name == "windows":  # which are batches that are twice as large
        x, y, weights = data(slice(32))
        size = 2 * BATCH_SIZE if replicas is None else BATCH_SIZE
        model.fit(x, y, sample_weight=weights, batch_size=size, **given)
        return model.get_weights(), {}
    x, y, weights = data()
    found = model.fit(x, y, sample_weight=weights, batch_size=BATCH_SIZE, validation_data=data(), **given).history
    found["evaluated"] = model.evaluate(x, y, sample_weight=weights, batch_size=BATCH_SIZE, verbose=0)
    found["predicted"] = 2 + np.tanh(model.predict(x, batch_size=BATCH_SIZE, verbose=0)[1])  # far from zero
    return model.get_weights(), found


def _one_by_one(model, replicas):
    rows = slice(8)
    if replicas is not None and replicas.num_processes > 1:  # each gives its own rows
        rows = slice(5) if replicas.is_chief else slice(5, 8)
    x, y, weights = data(rows)
    logs = [model.train_on_batch(x, y, weights) for _ in range(2)]
    return [*logs, model.test_on_batch(x, y, weights)]
