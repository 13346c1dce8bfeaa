"""Numbers recorded by running the originals, and the optimizer of TensorFlow 1 that they were recorded with.

tests/golden/README.md says which and how.
"""

from __future__ import annotations

import json
import pathlib

import keras
import numpy as np
from keras import ops

FOLDER = pathlib.Path(__file__).parent.parent / "golden"

# Of the dtype that the numbers were recorded in, for a few steps.
TOLERANCE = {
    "float64": {"rtol": 1e-12, "atol": 1e-12},
    "float32": {"rtol": 1e-5, "atol": 1e-6},
    "float16": {"rtol": 2e-3, "atol": 2e-3},
}


def load(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


def cases(name, group="cases"):
    """The cases of a file, by id."""
    return {case["id"]: case for case in load(name)[group]}


def tensor(value, dtype="float32", variable=None):
    """A gradient (of `variable`) as recorded: dense, sparse or None."""
    if value is None:
        return None
    if isinstance(value, dict):
        import tensorflow as tf

        values = tf.constant(np.array(value["values"], dtype))
        shape = value["dense_shape"] if variable is None else tuple(variable.shape)
        return tf.IndexedSlices(values, tf.constant(value["indices"]), tf.constant(shape))
    return keras.ops.convert_to_tensor(np.array(value, "float64").astype(dtype), dtype)


def is_sparse(value):
    return isinstance(value, dict)


def assert_close(got, expected, dtype="float32", **tolerance):
    """Compares a tensor or variable with a recorded one; "nan" and "inf" are spelled so in the files."""
    expected = np.array(expected, "float64")
    got = np.asarray(keras.ops.convert_to_numpy(got)).astype("float64")
    np.testing.assert_allclose(got, expected, **{**TOLERANCE[dtype], **tolerance})


class TF1Momentum(keras.optimizers.Optimizer):
    """Momentum as TensorFlow 1 has it: the rate is outside the momentum, and of a sparse gradient only the listed rows
    have theirs decayed and moved. (Keras' SGD decays and moves all rows.)"""

    def __init__(self, learning_rate, momentum=0.9, name=None):
        super().__init__(learning_rate=learning_rate, name=name)
        # TensorFlow 1 rounds both to float32, also for float64 variables.
        self.rate = float(np.float32(learning_rate))
        self.momentum = float(np.float32(momentum))

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.momentums = self.add_optimizer_variables(variables, "momentum")

    def update_step(self, gradient, variable, learning_rate):
        momentum = self.momentums[self._get_variable_index(variable)]
        # Python numbers times tensors: Keras' own arithmetic, also of its variables, takes numbers through float32.
        if hasattr(gradient, "dense_shape"):
            rows, position = _unique(gradient.indices)
            summed = ops.segment_sum(gradient.values, position, ops.shape(rows)[0])
            new = self.momentum * ops.take(momentum, rows, axis=0) + summed
            self.assign(momentum, type(gradient)(new, rows))
            self.assign_sub(variable, type(gradient)(self.rate * new, rows))
        else:
            new = self.momentum * ops.convert_to_tensor(momentum) + gradient
            self.assign(momentum, new)
            self.assign_sub(variable, self.rate * new)


def _unique(indices):
    import tensorflow as tf

    return tf.unique(indices)
