"""The interfaces through which this package uses TensorFlow, JAX and PyTorch.

A *replica* is a worker that trains on its own rows. `communicator` describes the replicas and moves tensors between
them, `runtime` covers tracing and control flow, `placement` the storage of variables, and `processes` the processes of
a job. `active` holds the implementations for the current Keras backend. Each docstring lists the methods that a new
backend implements. A feature of only one backend is a file in the folder of that backend, imported with `for_backend`.

Two more modules supply information that Keras does not pass on: `models` finds live models and their optimizers,
`keras_callers` finds the calling function.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Mapping

import keras


def for_backend(table: Mapping[str, str]) -> types.ModuleType | None:
    """Import the module for the current Keras backend, or return None. `table` maps backend names to module names.

    This is the only function that reads the name of Keras' backend. A new backend needs a folder here and a row in
    the four tables that CONTRIBUTING.md names.
    """
    name = table.get(keras.config.backend())
    return None if name is None else importlib.import_module(name)
