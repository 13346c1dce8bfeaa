"""Finds and restores the state that training needs to resume, but Keras' model files lack.

Private names of Keras touched here (a test checks that each exists):
    `keras.src.random.seed_generator.global_seed_generator` - creates the seed of layers that have none.
    `keras.src.backend.common.global_state` - holds that seed as "global_seed_generator" once it exists.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras.src.backend.common import global_state
from keras.src.random import seed_generator

from keras_shardopt.backends import for_backend
from keras_shardopt.backends.active import placement, processes
from keras_shardopt.backends.models import buffers_of, optimizers_of
from keras_shardopt.checkpoint.gathering import saves_collectively
from keras_shardopt.numerics import Optimizer
from keras_shardopt.optimizers.cross_shard import cross_shards_in
from keras_shardopt.wrapping.chain import shared_variables

REPLICA_STATE = "of_each_replica_"


def built_on(model: Any) -> list[list[int] | None]:
    """Returns one entry per optimizer: the indices of its variables in `model.variables`, or None if not built."""
    places = {id(v): i for i, v in enumerate(model.variables)}
    found: list[list[int] | None] = []
    for optimizer in optimizers_of(model):
        indices = [places.get(id(v)) for v in getattr(optimizer, "_trainable_variables", [])]
        is_whole = optimizer.built and None not in indices
        found.append([i for i in indices if i is not None] if is_whole else None)
    return found


def build_optimizers(model: Any, indices: list[list[int] | None]) -> None:
    """Builds optimizers that only the first custom training step would build, so their state can be restored."""
    variables = model.variables
    for optimizer, own in zip(optimizers_of(model), indices):
        if own is not None and not optimizer.built:
            optimizer.build([variables[i] for i in own])


def carried_values(model: Any) -> dict[str, list[keras.Variable]]:
    """Returns, by name, the variables with the compression errors that each replica keeps for its next gradients."""
    found: dict[str, list[keras.Variable]] = {}
    for part in cross_shards_of(model):
        for name, variables in part.pipeline.transport.carried.items():
            found.setdefault(name, []).extend(variables)
    return found


def restore_carried(variables: Sequence[keras.Variable], shapes: Sequence[Any], read: Callable[[int], Any]) -> None:
    """Restores the values of `carried_values`. Does nothing if shapes or the number of replicas have changed.

    Args:
        variables: the variables of `carried_values` under one name.
        shapes: the stored shapes, with a row per replica.
        read: returns the stored array of an index. All processes call it together.
    """
    own = [placement.replica_values(variable) for variable in variables]
    counts = processes.gather_objects(len(own[0]) if own else 0)
    if [tuple(shape) for shape in shapes] != [(sum(counts), *rows[0].shape) for rows in own]:
        return
    first = sum(counts[: processes.process()[1]])
    for i, (variable, rows) in enumerate(zip(variables, own)):
        placement.assign_replica_values(variable, list(read(i)[first : first + len(rows)]))


def is_stored_whole(optimizer: Optimizer) -> bool:
    """Whether a backup stores the state of all shards, joined. Such a backup fits any number of replicas."""
    return saves_collectively(optimizer) or any(part.shard_state for part in cross_shards_in(optimizer))


def saved_variables(model: Any) -> list[keras.Variable]:
    """Returns the variables that are equal on all processes, so a backup stores rank 0's values."""
    return [*model.variables, *buffers_of(model), *optimizer_variables(model)]


def optimizer_variables(model: Any) -> list[keras.Variable]:
    """Returns the optimizer variables among `saved_variables`."""
    return [variable for optimizer in optimizers_of(model) for variable in _variables_of(optimizer)]


def _variables_of(optimizer: Optimizer) -> list[keras.Variable]:
    if is_stored_whole(optimizer):
        # Return only counts of skipped steps. The backup stores all other variables elsewhere, joined from all shards.
        own = {id(v) for part in cross_shards_in(optimizer) for v in part._shared_own_variables}
        return [v for v in optimizer.variables if id(v) in own]
    extensions = [extension for part in cross_shards_in(optimizer) for extension in part.extension_stages]
    per_replica = {id(v) for extension in extensions for v in extension.replica_state}
    return [v for v in shared_variables(optimizer) if id(v) not in per_replica]


def extensions_of(model: Any) -> list[tuple[Any, str]]:
    """Returns each extension (such as local SGD) that has per-replica state, and the name of this state in backups."""
    found = [each for part in cross_shards_of(model) for each in part.extension_stages if each.keeps_state]
    return [(extension, f"{'abcdefgh'[i]}_{REPLICA_STATE}") for i, extension in enumerate(found)]


def cross_shards_of(model: Any) -> list[Any]:
    """Returns each `CrossShard` (a wrapper that averages gradients) in the optimizers of a model, also nested ones."""
    return [part for optimizer in optimizers_of(model) for part in cross_shards_in(optimizer)]


def before_reading(model: Any) -> None:
    """Assigns the mean over replicas to weights that differ because of local SGD. All processes must call this."""
    for part in cross_shards_of(model):
        part.pipeline.before_reading()


def is_inside_window(model: Any) -> bool:
    """Whether an optimizer has accumulated gradients of micro-batches for an unfinished update."""
    accumulations = [part.accumulation for part in cross_shards_of(model) if part.accumulation is not None]
    return any(accumulation.window.num_taken for accumulation in accumulations)


def global_seed(make: bool) -> list[keras.Variable]:
    """Returns Keras' global seed in a list. If no seed exists, creates one if `make`, else returns an empty list."""
    found = (
        seed_generator.global_seed_generator() if make else global_state.get_global_attribute("global_seed_generator")
    )
    return [] if found is None else [found.state]


# PyTorch only (otherwise None): the framework's global random number state, which must be saved too.
_generators = for_backend({"torch": "keras_shardopt.backends.torch.random_numbers"})


def random_state() -> dict[str, Any]:
    """Returns the state of this process's global random number generators. It is JSON-serializable."""
    kind, keys, *others = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *others],
        "framework": None if _generators is None else _generators.rng_state(),
    }


def set_random_state(states: list[dict[str, Any]], process: tuple[int, int]) -> None:
    """Restores a result of `random_state`: this process's, or rank 0's if the number of processes has changed.

    Args:
        states: the results of all processes.
        process: the number of processes now, and the index of this one.
    """
    is_own = len(states) == process[0]
    state = states[process[1] if is_own else 0]
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(state["numpy"]))
    if _generators is not None and state["framework"] is not None:  # None: saved on another backend
        _generators.set_rng_state(state["framework"], is_own)
