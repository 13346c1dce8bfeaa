"""Numbers recorded by running the originals; tests/golden/README.md says which and how."""

from __future__ import annotations

import json
import pathlib

import keras
import numpy as np

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
