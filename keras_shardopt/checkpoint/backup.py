"""`BackupAndRestore`: resumes interrupted training, on all processes.

Private names of Keras touched here (a test holds each of them):
    `Trainer._initial_epoch` - the epoch with which a running `fit` begins.
    `epoch_iterator` and `initial_epoch` in `Trainer.fit` - where batches come from; the epoch that the caller gives.
    `ArrayDataAdapter._epoch` (Keras 3.16 and later) - how many epochs it has seen, by which it shuffles.
    `keras.src.random.seed_generator.global_seed_generator` - makes the seed of layers without their own.
    `keras.src.backend.common.global_state` - holds that as "global_seed_generator", once there is one.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import random
import zipfile
from typing import Any

import keras
import numpy as np
from keras.src.backend.common import global_state
from keras.src.random import seed_generator

from keras_shardopt import arguments as check
from keras_shardopt.backends import for_backend
from keras_shardopt.backends.active import placement, processes
from keras_shardopt.backends.keras_callers import running_local
from keras_shardopt.backends.models import buffers_of, optimizers_of
from keras_shardopt.backends.user_warnings import warn
from keras_shardopt.checkpoint.atomic_file import Unfinished
from keras_shardopt.checkpoint.saving import (
    gather_despite_errors,
    is_chief,
    join_gather,
    needs_all_processes,
    raise_together,
    saved_together,
)
from keras_shardopt.numerics import Optimizer
from keras_shardopt.optimizers.cross_shard import cross_shards
from keras_shardopt.wrapping.chain import kind_of, shared_variables


class BackupAndRestore(keras.callbacks.Callback):
    """Lets training that was killed go on where it was, bit for bit, on one process or several.

    At the end of each epoch rank 0 writes what training needs to continue: the model's variables (weights, moving
    statistics, seeds of `Dropout` layers), those of the optimizer, the number of epochs, Keras' global seed, and the
    state of the random numbers of Python, NumPy and PyTorch on each process (on another number of processes those of
    rank 0 go on). It writes one file, atomically: after a
    crash at any moment there is a whole backup, the new one or the one before. When a `fit` with the same directory
    begins, rank 0 reads it, and all processes continue with the same values from the next epoch. So a job that is
    started again (`torchrun --max-restarts 3 train.py`) ends with the weights of one that was never interrupted.

    `keras.callbacks.BackupAndRestore` has the same arguments and lets every process write the same files.

    Everything that is made anew in a restarted program has to come out the same: model, optimizer, data and arguments
    of `fit`. Data that `fit` shuffles has the same order again on PyTorch and JAX (from arrays); on TensorFlow use
    `shuffle=False` or a data set seeded by epoch. Other callbacks begin anew, as they do in Keras. What each replica
    keeps for itself, such as moving statistics without `prepare`, becomes that of rank 0. And a window of
    micro-batches (`CrossShard(gradient_accumulation_steps=k)`) that an epoch leaves unfinished begins anew, of which a
    warning says: have a multiple of k steps per epoch. With `CrossShard(shard_state=True)` a backup fits any number of
    replicas, also one.

    Args:
        backup_dir: str or path: a local directory, which is made if it is not there. Only rank 0 needs to see it.
            Not to be shared with another training run.
        save_freq: "epoch" (default). Backups in the middle of an epoch are not possible: Keras can begin a `fit` with
            another epoch, but not with another batch.
        double_checkpoint: bool. True also keeps the backup before the last, for disks that lose what was written.
        delete_checkpoint: bool. True (default) deletes the backups when training has come to its end.

    Raises:
        TypeError: if `backup_dir` is not a path, or a flag not a bool.
        ValueError: if `backup_dir` is empty or not local, or `save_freq` is not "epoch". When training begins, on every
            process, if the backup is one of another model or optimizer.
        OSError: from training, on every process, if a backup cannot be written or read.

    Example:
        >>> import keras, numpy as np, tempfile, keras_shardopt as ks
        >>> with ks.data_parallel() as replicas:
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile(ks.CrossShard("sgd"), "mse")
        >>> backup = ks.callbacks.BackupAndRestore(tempfile.mkdtemp())
        >>> x, y = np.ones((8, 4)), np.ones((8, 1))
        >>> history = model.fit(x, y, epochs=2, callbacks=[backup], verbose=0)
        >>> replicas.close()

    References:
        `keras.callbacks.BackupAndRestore`, which stores neither random numbers nor Keras' global seed.
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: str = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
    ) -> None:
        if not isinstance(backup_dir, (str, os.PathLike)):
            raise TypeError(f"`backup_dir` must be a path. Received: backup_dir={backup_dir!r}")
        path = os.fspath(backup_dir)
        if not isinstance(path, str) or not path or "://" in path or "\0" in path:
            raise ValueError(f"`backup_dir` must be the path of a local directory. Received: backup_dir={backup_dir!r}")
        if not isinstance(save_freq, str) or save_freq != "epoch":
            raise ValueError(
                '`save_freq` must be "epoch": Keras cannot begin in the middle of an epoch, so a backup from there '
                f"would train some batches twice. Received: save_freq={save_freq!r}. "
                "Make epochs shorter: `model.fit(..., steps_per_epoch=..., epochs=...)`."
            )
        for argument, value in (("double_checkpoint", double_checkpoint), ("delete_checkpoint", delete_checkpoint)):
            check.flag(argument, value)
        super().__init__()
        self.backup_dir = path
        self.save_freq = save_freq
        self.double_checkpoint = double_checkpoint
        self.delete_checkpoint = delete_checkpoint
        self._warned = False
        self._path = os.path.join(path, "backup.npz")
        self._previous_path = os.path.join(path, "previous.npz")

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Goes on from the backup, if there is one."""
        model = self.model
        model._initial_epoch = None
        if not model.built:
            raise ValueError(
                f"A model must be built before `BackupAndRestore` can restore it. Received: {model!r}. "
                "Give it a `keras.Input`, or call it on a batch of data."
            )
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        header, arrays, problem = None, None, None
        if is_chief():
            try:
                header, arrays = self._read()
            except Exception as error:
                problem = _for_all(error)
        header, problem = processes.gather_objects((header, problem))[0]
        if problem is not None:
            raise problem
        if header is not None:
            self._restore(header, arrays)

    def _restore(self, header: dict[str, Any], arrays: Any) -> None:
        """Give every process the state of a backup. Only rank 0 has its `arrays`."""
        model = self.model
        _build(model, header.get("built_on", []))
        self._check_fits(header)
        seed = _global_seed(header["has_global_seed"])
        if arrays is not None:
            for variable, array in zip([*_variables(model), *seed], arrays["variable"]):
                placement.assign_replica_values(variable, [array])
        placement.broadcast_state([*model.variables, *buffers_of(model), *seed], _optimizer_variables(model))
        for part, name in saved_together(model, _is_stored_whole):
            part.load_own_variables(_from_chief(None if arrays is None else arrays.get(name, [])))
        num_processes, process_id = processes.process()
        states = header["random_states"]
        is_own = len(states) == num_processes
        _set_random_state(states[process_id if is_own else 0], is_own)
        for part in _cross_shards(model):
            part.pipeline.reset()
        for extension, name in _extensions(model):
            extension.load_state(list(_from_chief(None if arrays is None else arrays.get(name, [])).values()))
        for name, variables in _carried(model).items():
            _restore_carried(variables, header.get(f"{name}s", []), None if arrays is None else arrays.get(name, []))
        model._initial_epoch = header["epoch"]
        _skip_epochs(header["epoch"])

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes a backup."""
        windows = [part.accumulation for part in _cross_shards(self.model) if part.accumulation is not None]
        if not self._warned and any(window.num_taken for window in windows):
            self._warned = True
            warn(
                f"Epoch {epoch} ended within a window of micro-batches, which no backup holds: training that is "
                "restored from it will differ from training that was never interrupted. Make the number of steps per "
                "epoch a multiple of `gradient_accumulation_steps`.",
            )
        random_states = processes.gather_objects(_random_state())
        model = self.model
        apart = {name: extension.save_state() for extension, name in _extensions(model)}
        carried = {k: [np.stack(_everyones(v)) for v in variables] for k, variables in _carried(model).items()}
        problem = None
        try:
            if is_chief():
                with gather_despite_errors(model):
                    self._write(epoch + 1, random_states, apart, carried)
            else:
                join_gather(model)
        except Exception as error:
            problem = _for_all(error)
        # All learn how it went, and nobody goes on before it is written.
        raise_together(problem)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Deletes the backups, unless they are to be kept."""
        self.model._initial_epoch = None
        if self.delete_checkpoint and is_chief():
            for path in (self._path, self._previous_path):
                with contextlib.suppress(FileNotFoundError):
                    os.remove(path)
            with contextlib.suppress(OSError):  # others have files there, or it was never made
                os.rmdir(self.backup_dir)

    def _write(
        self,
        epoch: int,
        random_states: list[Any],
        apart: dict[str, list[np.ndarray]],
        carried: dict[str, list[np.ndarray]],
    ) -> None:
        model = self.model
        seed = _global_seed(make=False)
        variables = _variables(model)
        header = {
            "epoch": epoch,
            "random_states": random_states,
            "has_global_seed": bool(seed),
            "shapes": [list(v.shape) for v in variables],
            "optimizers": [kind_of(optimizer) for optimizer in optimizers_of(model)],
            "built_on": _built_on(model),
            **{f"{name}s": [list(array.shape) for array in arrays] for name, arrays in carried.items()},
        }
        os.makedirs(self.backup_dir, exist_ok=True)
        unfinished = Unfinished(self._path)
        try:
            with zipfile.ZipFile(unfinished.path, "w") as archive:
                _Entries(archive)["header"] = np.frombuffer(json.dumps(header).encode(), "uint8")
                stored = _Entries(archive, "variable")
                for i, variable in enumerate([*variables, *seed]):
                    stored[str(i)] = keras.ops.convert_to_numpy(variable)
                for name, arrays in [*apart.items(), *carried.items()]:
                    entries = _Entries(archive, name)
                    for i, array in enumerate(arrays):
                        entries[str(i)] = array
                for part, name in saved_together(model, _is_stored_whole):
                    part.save_own_variables(_Entries(archive, name))
            unfinished.finish(keep_as=self._previous_path if self.double_checkpoint else None)
        finally:
            unfinished.discard()

    def _read(self) -> tuple[Any, dict[str, list[np.ndarray]] | None]:
        """The header and arrays of the last backup that can be read; (None, None) if there is none at all."""
        problem: Exception | None = None
        for path in (self._path, self._previous_path):
            try:
                with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
                    header = json.loads(stored["header"].tobytes())
                    kinds = collections.Counter(name.rstrip("0123456789") for name in stored.files if name != "header")
                    arrays = {kind: [stored[f"{kind}{i}"] for i in range(num)] for kind, num in kinds.items()}
                    return {**header, "path": path, "kinds": sorted(kinds)}, {"variable": [], **arrays}
            except FileNotFoundError:
                continue
            except Exception as error:  # a file that is no archive, or a damaged one, fails in many ways
                words = str(error) or type(error).__name__
                problem = problem or OSError(f"The backup {path!r} cannot be read: {words}")
        if problem is not None:
            raise problem
        return None, None

    def _check_fits(self, header: dict[str, Any]) -> None:
        """Refuses a backup of another model or optimizer; on all processes, which have the same header."""
        model, path = self.model, header["path"]
        whole = {name for _, name in saved_together(model, _is_stored_whole) if not name.endswith(_WRAPPER_STATE)}
        others = {
            "variable",
            *(kind for kind in header["kinds"] if f"{kind}s" in header),  # what was carried
            *(kind for kind in header["kinds"] if kind.endswith((_WRAPPER_STATE, _APART))),
        }
        stored = set(header["kinds"]) - others
        kinds = [kind_of(optimizer) for optimizer in optimizers_of(model)]
        shapes = [list(v.shape) for v in _variables(model)]
        remedy = "Use another directory, or delete it to begin anew."
        if stored != whole:
            was, now = ("whole", "in parts") if whole - stored else ("in parts", "whole")
            received = f"a state that was {was} on each replica, where the optimizer's is {now}"
            remedy = "Go on from a file of `keras_shardopt.save_model`, or delete the backup to begin anew."
        elif header.get("optimizers", kinds) != kinds:
            received = f"state of {', '.join(header['optimizers'])}, where the model has {', '.join(kinds)}"
        elif {kind for kind in header["kinds"] if kind.endswith(_APART)} != {name for _, name in _extensions(model)}:
            received = "a state of replicas that trained together, or apart, where they now do the other"
        elif header["shapes"] != shapes:
            received = f"variables of the shapes {header['shapes']}, where the model and its optimizer have {shapes}"
        else:
            return
        raise ValueError(
            "`backup_dir` must hold a backup of the same model and optimizer. "
            f"Received: {path!r}, with {received}. {remedy}"
        )


_WRAPPER_STATE = "wrapper_state"
_APART = "of_each_replica_"


def _built_on(model: Any) -> list[list[int] | None]:
    """For each of a model's optimizers the places of the variables that it was built on; None if it was not."""
    places = {id(v): i for i, v in enumerate(model.variables)}
    found: list[list[int] | None] = []
    for optimizer in optimizers_of(model):
        built_on = [places.get(id(v)) for v in getattr(optimizer, "_trainable_variables", [])]
        is_whole = optimizer.built and None not in built_on
        found.append([i for i in built_on if i is not None] if is_whole else None)
    return found


def _build(model: Any, built_on: list[list[int] | None]) -> None:
    """Builds optimizers that are no `model.optimizer`, which only a custom training step builds."""
    variables = model.variables
    for optimizer, places in zip(optimizers_of(model), built_on):
        if places is not None and not optimizer.built:
            optimizer.build([variables[i] for i in places])


def _for_all(error: Exception) -> Exception:
    """An error in a form that reaches all processes, which wait for the answer."""
    if isinstance(error, ValueError) or (isinstance(error, OSError) and type(error).__module__ == "builtins"):
        return error
    return OSError(": ".join(words for words in (type(error).__name__, str(error)) if words))


def _carried(model: Any) -> dict[str, list[keras.Variable]]:
    """What each replica carries from one reduction to the next, by name."""
    found: dict[str, list[keras.Variable]] = {}
    for part in _cross_shards(model):
        for name, variables in part.pipeline.transport.carried.items():
            found.setdefault(name, []).extend(variables)
    return found


def _everyones(variable: keras.Variable) -> list[np.ndarray]:
    """The values of a variable on all replicas. All processes call it together."""
    return [value for values in processes.gather_objects(placement.replica_values(variable)) for value in values]


def _restore_carried(variables: list[keras.Variable], shapes: list[list[int]], arrays: list[np.ndarray] | None) -> None:
    """Gives each replica what it carried; nothing where there are as many no more, or other variables."""
    here = [placement.replica_values(variable) for variable in variables]
    counts = processes.gather_objects(len(here[0]) if here else 0)
    if shapes != [[sum(counts), *rows[0].shape] for rows in here]:
        return
    start = sum(counts[: processes.process()[1]])
    for i, (variable, rows) in enumerate(zip(variables, here)):
        # One by one: they are gathered from all, although only rank 0 has any.
        everyones = processes.gather_objects(None if arrays is None else arrays[i])[0]
        placement.assign_replica_values(variable, list(everyones[start : start + len(rows)]))


def _is_stored_whole(optimizer: Optimizer) -> bool:
    """Whether a backup has the state as files have it; then it fits any number of replicas, also one."""
    return needs_all_processes(optimizer) or any(part.shard_state for part in cross_shards(optimizer))


def _from_chief(arrays: list[np.ndarray] | None) -> dict[str, np.ndarray]:
    """Rank 0's arrays, as a store to load from, on every process."""
    number = processes.gather_objects(None if arrays is None else len(arrays))[0]
    # One by one: they are gathered from all, although only rank 0 has any.
    mine = [None] * number if arrays is None else arrays
    return {str(i): processes.gather_objects(array)[0] for i, array in enumerate(mine)}


class _Entries:
    """A store of arrays in an archive as `numpy.savez` writes it, under names that begin alike."""

    def __init__(self, archive: zipfile.ZipFile, kind: str = "") -> None:
        self._archive = archive
        self._kind = kind

    def __setitem__(self, key: str, array: Any) -> None:
        with self._archive.open(f"{self._kind}{key}.npy", "w", force_zip64=True) as file:
            np.lib.format.write_array(file, _storable(np.asanyarray(array)), allow_pickle=False)


def _variables(model: Any) -> list[keras.Variable]:
    return [*model.variables, *buffers_of(model), *_optimizer_variables(model)]


def _optimizer_variables(model: Any) -> list[keras.Variable]:
    """Those of which every process has a copy."""
    return [variable for optimizer in optimizers_of(model) for variable in _variables_of(optimizer)]


def _variables_of(optimizer: Optimizer) -> list[keras.Variable]:
    if _is_stored_whole(optimizer):  # what no file holds: how many steps were skipped
        own = {id(v) for part in cross_shards(optimizer) for v in part._shared_own_variables}
        return [v for v in optimizer.variables if id(v) in own]
    extensions = [extension for part in cross_shards(optimizer) for extension in part.extension_stages]
    private = {id(v) for extension in extensions for v in extension.private}
    return [v for v in shared_variables(optimizer) if id(v) not in private]


def _extensions(model: Any) -> list[tuple[Any, str]]:
    """The extensions with state of each replica, and the name of this state in backups."""
    found = [extension for part in _cross_shards(model) for extension in part.extension_stages if extension.keeps_state]
    return [(extension, f"{'abcdefgh'[i]}_{_APART}") for i, extension in enumerate(found)]


def _cross_shards(model: Any) -> list[Any]:
    return [part for optimizer in optimizers_of(model) for part in cross_shards(optimizer)]


def _skip_epochs(epoch: int) -> None:
    """Lets the running `fit` shuffle arrays as if it had seen all epochs before this one."""
    adapter: Any = getattr(running_local("fit", "epoch_iterator"), "data_adapter", None)
    if hasattr(adapter, "_epoch"):
        adapter._epoch += epoch - (running_local("fit", "initial_epoch") or 0)


def _global_seed(make: bool) -> list[keras.Variable]:
    """Keras' global seed in a list, which is empty if there is none."""
    found = (
        seed_generator.global_seed_generator() if make else global_state.get_global_attribute("global_seed_generator")
    )
    return [] if found is None else [found.state]


def _storable(array: np.ndarray) -> np.ndarray:
    # NumPy's files know no bfloat16 and float8; float32 holds them to the last bit.
    return array if array.dtype.kind in "biufc" else array.astype("float32")


# Where the framework has global random numbers of its own.
_generators = for_backend({"torch": "keras_shardopt.backends.torch.random_numbers"})


def _random_state() -> dict[str, Any]:
    """The state of this process's global random numbers, as JSON has it."""
    kind, keys, *others = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *others],
        "framework": None if _generators is None else _generators.rng_state(),
    }


def _set_random_state(state: dict[str, Any], is_own: bool) -> None:
    """Takes back what `_random_state` returned; where there were as many processes, on this one."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(state["numpy"]))
    if _generators is not None:
        _generators.set_rng_state(state["framework"], is_own)
