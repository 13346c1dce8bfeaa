"""The one place that asks Keras which backend runs, and hands out what it can do with replicas."""

from __future__ import annotations

import importlib

import keras

from keras_shardopt.backends.communicator import Arrival, ReplicaBackend, SingleReplica
from keras_shardopt.backends.gradient_scope import (
    claim_reduction,
    differing_along,
    hold_slices,
    holds_slices,
    reduction_is_claimed,
)
from keras_shardopt.backends.processes import World
from keras_shardopt.backends.runtime import Framework
from keras_shardopt.update.trainer_context import current_part, ends_together

__all__ = [
    "Arrival",
    "Framework",
    "ReplicaBackend",
    "SingleReplica",
    "World",
    "claim_reduction",
    "current_part",
    "differing_along",
    "ends_together",
    "framework",
    "hold_slices",
    "holds_slices",
    "reduction_is_claimed",
]

# A new backend is one file and one row here.
_FRAMEWORKS = {
    "tensorflow": ("keras_shardopt.backends.tensorflow.communicator", "TensorFlow"),
    "jax": ("keras_shardopt.backends.jax.communicator", "Jax"),
    "torch": ("keras_shardopt.backends.torch.communicator", "Torch"),
}


def _load() -> Framework:
    row = _FRAMEWORKS.get(keras.config.backend())
    if row is None:
        return Framework()
    module, name = row
    loaded: Framework = getattr(importlib.import_module(module), name)()
    return loaded


framework: Framework = _load()
"""What the framework that runs Keras offers. Keras fixes its backend when it is imported, so this never changes."""
