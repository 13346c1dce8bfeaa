"""The only packages that import a framework, behind interfaces that all others use.

A *replica* is one worker that sees its own data. `communicator` says who the replicas are and moves tensors between
them, `runtime` is about tracing and control flow, `placement` about where variables live, `processes` about the
programs that hold the replicas. `active` has those of the framework that runs Keras. The docstring of each says what a
new backend writes. What one backend alone has is no part of them: it is a file in the backend's folder, or a function
next to its classes, which the one caller finds with `for_backend`.

What Keras itself does not say is found out here too: `models` knows which models live and which optimizers they hold,
`keras_callers` who is calling.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Mapping

import keras


def for_backend(table: Mapping[str, str]) -> types.ModuleType | None:
    """The module that a table names for the backend that runs Keras; None where it names none.

    The one place that asks Keras which backend that is. A new backend is a folder here and a row in each table.
    """
    name = table.get(keras.config.backend())
    return None if name is None else importlib.import_module(name)
