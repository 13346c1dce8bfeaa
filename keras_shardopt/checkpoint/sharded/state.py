"""Copies a model's training state to the arrays of a sharded checkpoint, and back.

Arrays have the paths of Keras' weights files. Paths that start with "training/" are for state that such files lack:
seeds, buffers, compression errors, and the state of extensions such as local SGD.

Private names of Keras touched here (a test checks that each exists):
    `keras.src.saving.saving_lib._save_state`, `_load_state` - visit all parts of a model that have variables.
    `keras.src.saving.saving_lib.H5IOStore`, `DiskIOStore` - the classes of stores that these two functions accept.
"""

from __future__ import annotations

import contextlib
import pathlib
import sys
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import keras
import numpy as np
from keras.src.saving import saving_lib

from keras_shardopt.arguments import listed
from keras_shardopt.backends import for_backend, stored_parts
from keras_shardopt.backends.active import placement, processes
from keras_shardopt.backends.models import optimizers_of
from keras_shardopt.backends.stored_parts import OwnParts, Part, even_parts
from keras_shardopt.checkpoint.gathering import NoStore
from keras_shardopt.checkpoint.sharded.pieces import Checkpoint, Source, StoredArray
from keras_shardopt.checkpoint.together import raising_together
from keras_shardopt.checkpoint.training_state import (
    build_optimizers,
    built_on,
    carried_values,
    cross_shards_of,
    extensions_of,
    global_seed,
    random_state,
    restore_carried,
    saved_variables,
    set_random_state,
)
from keras_shardopt.numerics import Variable
from keras_shardopt.wrapping.chain import kind_of
from keras_shardopt.wrapping.rollback import changed_by_forward_passes
from keras_shardopt.wrapping.stored_state import check_groups
from keras_shardopt.wrapping.wrapper import OptimizerWrapper

# JAX only (otherwise None): `local_assignments` lets one process assign values without a check that all processes do.
_alone = for_backend({"jax": "keras_shardopt.backends.jax.placement"})

_TRAINING = "training/"

ASSETS = "training/assets/"
"""The start of the names of files that layers store in addition to variables."""
_WRAPPER_STATE = "/wrapper_state/"


def sources_of(model: Any, process: tuple[int, int]) -> dict[str, Source]:
    """Copy this process's part of a model's training state to host memory. All processes must call this."""
    store = _Saved(process, _ids_of_unequal(model))
    saving_lib._save_state(model, store, None, "", set())
    sources = store.sources
    for path, variable in _extra_variables(model, store.seen):
        sources[path] = Source(stored_parts.own_parts(variable, store.process_for(variable)), {})
    for name, variables in carried_values(model).items():
        for i, variable in enumerate(variables):
            sources[f"{_TRAINING}{name}/{i}"] = Source(_rows_of(variable, process), {})
    for extension, name in extensions_of(model):
        for i, array in enumerate(extension.save_state()):
            sources[f"{_TRAINING}{name}/{i}"] = Source(even_parts(np.asarray(array), process), {})
    # Call `_assets_of` on all processes, because Keras' saver creates an optimizer, and on JAX all must create it.
    for name, content in list(_assets_of(model)):
        if process[1] == 0:
            sources[ASSETS + name] = Source(even_parts(np.frombuffer(content, "uint8"), (1, 0)), {})
    return sources


def _ids_of_unequal(model: Any) -> set[int]:
    """Return the ids of variables whose values can differ between processes, such as moving statistics."""
    stages = [stage for part in cross_shards_of(model) for stage in part.extension_stages]
    of_replicas = [variable for stage in stages for variable in stage.replica_state]
    return {id(variable) for variable in [*changed_by_forward_passes([model]), *of_replicas]}


def _assets_of(model: Any) -> Iterator[tuple[str, bytes]]:
    """Yield the path and content of each file that layers store in addition to variables, such as vocabularies."""
    store = saving_lib.DiskIOStore("assets", mode="w")
    try:
        saving_lib._save_state(model, NoStore(), store, "", set())
        root = pathlib.Path(store.working_dir)
        for path in sorted(each for each in root.rglob("*") if each.is_file()):
            yield path.relative_to(root).as_posix(), path.read_bytes()
    finally:
        store.close()


def about_model(model: Any) -> dict[str, Any]:
    """Return facts about a model that `restore` needs, to be stored in the manifest. They are JSON-serializable."""
    return {
        "optimizers": [kind_of(optimizer) for optimizer in optimizers_of(model)],
        "built_on": built_on(model),
        "has_global_seed": bool(global_seed(make=False)),
    }


def about_process() -> dict[str, Any]:
    """Return values of this process to store in its report, such as its random number states."""
    return {"random_state": random_state()}


def restore(model: Any, checkpoint: Checkpoint, process: tuple[int, int]) -> None:
    """Load the values of a checkpoint into a model. All processes must call this.

    Args:
        model: the model.
        checkpoint: the checkpoint to read.
        process: the number of processes, and the index of this one.

    Raises:
        ValueError: if the checkpoint is of another model or optimizer. Then no value is changed.
    """
    manifest = checkpoint.manifest
    optimizer = getattr(model, "optimizer", None)  # some models lack it before `compile`
    stored = zip(optimizers_of(model), manifest["built_on"])
    was_built = manifest["step"] > 0 or any(each is optimizer and own is not None for each, own in stored)
    if optimizer is not None and not optimizer.built and was_built:
        optimizer.build(model.trainable_variables)
    build_optimizers(model, manifest["built_on"])
    seen = _check_fits(model, checkpoint, process)
    with raising_together(), contextlib.nullcontext() if _alone is None else _alone.local_assignments():
        problems: dict[int, tuple[Any, Exception]] = {}
        collected = {"visited_saveables": set(), "failed_saveables": set(), "error_msgs": problems}
        saving_lib._load_state(model, _Loaded(checkpoint), None, "", **collected)
        for _, problem in problems.values():
            raise problem
        if manifest["has_global_seed"]:
            global_seed(make=True)
        for path, variable in _extra_variables(model, seen):
            if path in checkpoint and checkpoint[path].shape == tuple(variable.shape):
                placement.assign_replica_values(variable, [np.asarray(checkpoint[path])])
    for part in cross_shards_of(model):
        part.pipeline.reset()
    for extension, name in extensions_of(model):
        extension.load_state([np.asarray(array) for array in _numbered(checkpoint, name)])
    for name, variables in carried_values(model).items():
        rows = list(_numbered(checkpoint, name))
        restore_carried(variables, [array.shape for array in rows], rows.__getitem__)
    set_random_state([each["random_state"] for each in manifest["processes"]], process)


def _extra_variables(model: Any, seen: set[int]) -> Iterator[tuple[str, Variable]]:
    """Yield (path, variable) for state that Keras' weights files lack. `seen`: ids of variables in such a file."""
    in_file = {id(v) for optimizer in optimizers_of(model) for v in _variables_in_file(optimizer)}
    extra = [v for v in saved_variables(model) if id(v) not in seen | in_file]
    yield from ((f"{_TRAINING}variables/{i}", variable) for i, variable in enumerate(extra))
    yield from ((f"{_TRAINING}global_seed/{i}", seed) for i, seed in enumerate(global_seed(make=False)))


def _variables_in_file(optimizer: Any) -> list[Variable]:
    if not isinstance(optimizer, OptimizerWrapper):
        return list(optimizer.variables)
    own = optimizer.wrapper_state
    return [*optimizer._inner_state, *([] if own is None else own.variables)]


def _numbered(checkpoint: Checkpoint, name: str) -> Iterator[StoredArray]:
    num = 0
    while (path := f"{_TRAINING}{name}/{num}") in checkpoint:
        yield checkpoint[path]
        num += 1


def _rows_of(variable: Variable, process: tuple[int, int]) -> OwnParts:
    """Return this process's part of an array with one row per replica: the rows of its replicas."""
    rows = [np.array(row) for row in placement.replica_values(variable)]
    counts = processes.gather_objects(len(rows))
    first = sum(counts[: process[1]])
    parts = [Part((first + i, *(0 for _ in row.shape)), row[None]) for i, row in enumerate(rows)]
    return OwnParts((sum(counts), *rows[0].shape), str(rows[0].dtype), parts, is_flat=False)


def _check_fits(model: Any, checkpoint: Checkpoint, process: tuple[int, int]) -> set[int]:
    """Raise ValueError unless the checkpoint fits the model. Return the ids of variables that Keras' saver stores."""
    store = _Saved(process, (), is_dry=True)
    saving_lib._save_state(model, store, None, "", set())
    has_optimizer = bool(optimizers_of(model))
    own = {path: source.own.shape for path, source in store.sources.items()}
    stored = {path: checkpoint[path].shape for path in checkpoint if not path.startswith(_TRAINING)}
    problems = []
    kinds = [kind_of(optimizer) for optimizer in optimizers_of(model)]
    if has_optimizer and kinds != checkpoint.manifest["optimizers"]:
        problems.append(
            f"state of {listed(checkpoint.manifest['optimizers']) or 'no optimizer'}, but the model has {listed(kinds)}"
        )
    for path in sorted(own.keys() | stored.keys()):
        is_optional = _WRAPPER_STATE in path or (path not in own and not has_optimizer)
        if path not in own or path not in stored:
            problems += (
                [] if is_optional else [f"`{path}` {'only in the model' if path in own else 'not in the model'}"]
            )
        elif own[path] not in (None, stored[path]):
            problems.append(f"`{path}` of shape {stored[path]}, but its shape in the model is {own[path]}")
    if problems:
        raise ValueError(
            f"The checkpoint must be of the same model and optimizer. Received: {checkpoint.folder!r}, with "
            f"{listed(problems)}.{_unbuilt(model, checkpoint.manifest)}"
        )
    loaded = _Loaded(checkpoint)
    for group, arrays in _groups({path: source.notes for path, source in store.sources.items()}).items():
        if group in loaded.groups:
            check_groups(*(types.SimpleNamespace(_h5_entry_group=each) for each in (arrays, loaded.groups[group])))
    return store.seen


def _unbuilt(model: Any, manifest: dict[str, Any]) -> str:
    """Return a hint for the error if only the saved optimizer or only the model's optimizer was built."""
    for optimizer, own in zip(optimizers_of(model), manifest["built_on"]):
        if optimizer.built and own is None and manifest["step"] == 0:
            return (
                f" The {kind_of(optimizer)} was saved before it was built, so the checkpoint holds no optimizer state. "
                "Load the checkpoint before the model's optimizer is built, or save after the first update."
            )
        if not optimizer.built and own is None and manifest["step"] > 0:
            return f" The model's {kind_of(optimizer)} is not built. Call `build` of this optimizer first."
    return ""


def _groups(notes: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the attributes of arrays, grouped by parent path, in the form of the groups of an HDF5 file."""
    groups: dict[str, dict[str, Any]] = {}
    for path, attributes in notes.items():
        group, _, key = path.rpartition("/")
        groups.setdefault(group, {})[key] = types.SimpleNamespace(attrs=attributes)
    return groups


class _Saved(saving_lib.H5IOStore):
    """A store for Keras' saver that collects the arrays that a process saves.

    Args:
        process: the number of processes, and the index of this one.
        unequal: the ids of variables that can differ between processes.
        is_dry: bool. True collects shapes only.
    """

    def __init__(self, process: tuple[int, int], unequal: Collection[int], is_dry: bool = False) -> None:
        self._process = process
        self._unequal = unequal
        self._is_dry = is_dry
        self.sources: dict[str, Source] = {}
        self.seen: set[int] = set()
        self._prefix = ""
        self._h5_entry_group: dict[str, Any] = {}

    def __bool__(self) -> bool:
        return True

    def process_for(self, variable: Variable) -> tuple[int, int]:
        """Return (number of processes, index) to divide a variable. If values differ, process 0 saves all of it."""
        num_processes, index = self._process
        return (sys.maxsize if id(variable) in self._unequal else num_processes, index)

    def make(self, path: str, metadata: dict[str, Any] | None = None) -> _Saved:
        self._prefix = f"{path}/vars/" if path else "vars/"
        self._h5_entry_group = {}  # a new dict per group, because optimizer wrappers set attributes in it
        return self

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(value, keras.Variable):
            self.seen.add(id(value))
            value = stored_parts.own_parts(value, self.process_for(value))
        elif not isinstance(value, OwnParts):
            value = even_parts(keras.ops.convert_to_numpy(value), self._process)
        source = Source(value._replace(parts=[]) if self._is_dry else value, {})
        self.sources[self._prefix + key] = source
        self._h5_entry_group[key] = types.SimpleNamespace(attrs=source.notes)


class _Loaded(saving_lib.H5IOStore):
    """A store for Keras' loader that reads arrays from a checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._h5_entry_group: dict[str, Any] = {}
        self.groups = _groups({path: checkpoint[path].notes for path in checkpoint})
        for path in checkpoint:
            group, _, key = path.rpartition("/")
            self.groups[group][key].array = checkpoint[path]

    def __bool__(self) -> bool:
        return True

    def get(self, path: str) -> _Loaded:
        self._h5_entry_group = self.groups.get(f"{path}/vars" if path else "vars", {})
        return self

    def has_path(self, path: str) -> bool:
        return any(group == path or group.startswith(f"{path}/") for group in self.groups)

    def stored(self, key: str) -> StoredArray:
        """Return the array of this name. Its values are read when they are used."""
        array: StoredArray = self._h5_entry_group[key].array
        return array

    def __getitem__(self, key: str) -> np.ndarray:
        return np.asarray(self.stored(key))
