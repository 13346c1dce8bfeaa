"""The interfaces through which this package uses TensorFlow, JAX and PyTorch.

A *replica* is a worker that trains on its own rows. `communicator` describes the replicas and moves tensors between
them, `runtime` covers tracing and control flow, `placement` the storage of variables, and `processes` the processes of
a job. `active` holds the implementations for the current Keras backend. Each docstring lists the methods that a new
backend implements. A feature of a single backend is a file in its folder, and its caller finds it with `for_backend`.

Two more modules supply information that Keras does not pass on: `models` finds live models and their optimizers,
`keras_callers` finds the calling function.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Mapping

import keras


def for_backend(table: Mapping[str, str]) -> types.ModuleType | None:
    """Return the module that `table`, keyed by backend name, lists for the current Keras backend, or None.

    This is the only function that asks Keras for its backend. A new backend is a folder here and a row in each table.
    """
    name = table.get(keras.config.backend())
    return None if name is None else importlib.import_module(name)
