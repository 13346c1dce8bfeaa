"""`BackupAndRestore`: resumes interrupted training on all processes.

Private names of Keras touched here (a test checks that each exists):
    `Trainer._initial_epoch` - the first epoch of the running `fit`.
    `epoch_iterator` and `initial_epoch` in `Trainer.fit` - local variables: the source of batches; the first epoch.
    `ArrayDataAdapter._epoch` (Keras 3.16 and later) - the number of past epochs, part of the seed that shuffles.
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any

import keras
import numpy as np

from keras_shardopt import arguments as check
from keras_shardopt.backends.active import placement, processes
from keras_shardopt.backends.keras_callers import running_local
from keras_shardopt.backends.models import buffers_of, optimizers_of
from keras_shardopt.backends.phases import timed
from keras_shardopt.backends.user_warnings import warn
from keras_shardopt.checkpoint import backup_file
from keras_shardopt.checkpoint.gathering import gather_despite_errors, join_gather, saved_together
from keras_shardopt.checkpoint.saving import check_built
from keras_shardopt.checkpoint.sharded import check_safetensors, restore_newest
from keras_shardopt.checkpoint.sharded.saves import Save, complete_saves, delete, delete_abandoned
from keras_shardopt.checkpoint.together import from_rank_0, is_chief, raise_together
from keras_shardopt.checkpoint.training_state import (
    REPLICA_STATE,
    before_reading,
    build_optimizers,
    built_on,
    carried_values,
    cross_shards_of,
    extensions_of,
    global_seed,
    is_inside_window,
    is_stored_whole,
    optimizer_variables,
    random_state,
    restore_carried,
    saved_variables,
    set_random_state,
)
from keras_shardopt.wrapping.chain import kind_of


class BackupAndRestore(keras.callbacks.Callback):
    """Resumes interrupted training, on one process or several, with the same result as without the interruption.

    At the end of each epoch, rank 0 writes one file, atomically. It holds:

    - the model's variables: weights, moving statistics, seeds of `Dropout` layers;
    - the optimizer's variables, the number of epochs, and Keras' global seed;
    - the random number states of Python, NumPy and PyTorch, for each process. With another number of processes, all
      continue with the states of rank 0.

    The next `fit` with this directory restores the state on all processes and continues with the next epoch. A
    restarted job (`torchrun --max-restarts 3 train.py`) ends with the weights of an uninterrupted job if it uses the
    same model, optimizer, data and arguments of `fit`. With `shard_state=True`, a backup fits any number of replicas.

    Limits:

    - On TensorFlow, use `shuffle=False` or a data set seeded by epoch. On PyTorch and JAX, `fit` shuffles
      arrays in the same order as the interrupted `fit`.
    - Other callbacks start anew, as in Keras.
    - Per-replica state, such as moving statistics without `prepare(model)`, becomes the state of rank 0.
    - Gradients that `CrossShard(gradient_accumulation_steps=k)` has accumulated for an unfinished update are lost, with
      a warning. Use a multiple of k steps per epoch.

    Args:
        backup_dir: str or path: a local directory, created if missing. Only rank 0 needs access to it. Each training
            run needs its own directory.
        save_freq: "epoch" (default), the only value: Keras can start a `fit` at a later epoch, but not at a later
            batch.
        double_checkpoint: bool. True also keeps the previous backup, for disks that lose written data.
        delete_checkpoint: bool. True (default) deletes the backups when training ends.
        sharded: bool. True writes each backup as a sharded checkpoint (`save_sharded`): every process writes its part
            to `backup_dir`, a folder that all processes can access. Default: False.

    Raises:
        TypeError: if `backup_dir` is not a path, or a flag not a bool.
        ValueError: if `backup_dir` is empty or not local, or `save_freq` is not "epoch". When training begins, on
            every process, if the backup is of another model or optimizer.
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
        `keras.callbacks.BackupAndRestore` has the same arguments. There, every process writes the same files, without
        random number states and Keras' global seed.
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: str = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
        sharded: bool = False,
    ) -> None:
        path = check.local_path("backup_dir", backup_dir)
        if not isinstance(save_freq, str) or save_freq != "epoch":
            raise ValueError(
                '`save_freq` must be "epoch". Keras cannot resume in the middle of an epoch, so `fit` would train some '
                f"batches twice after such a backup. Received: save_freq={save_freq!r}. Use shorter epochs: "
                "`model.fit(..., steps_per_epoch=..., epochs=...)`."
            )
        for argument, value in (
            ("double_checkpoint", double_checkpoint),
            ("delete_checkpoint", delete_checkpoint),
            ("sharded", sharded),
        ):
            check.flag(argument, value)
        if sharded:
            check_safetensors()
        super().__init__()
        self.backup_dir = path
        self.save_freq = save_freq
        self.double_checkpoint = double_checkpoint
        self.delete_checkpoint = delete_checkpoint
        self.sharded = sharded
        self._warned = False
        self._path = os.path.join(path, "backup.npz")
        self._previous_path = os.path.join(path, "previous.npz")

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Restores the backup if one exists."""
        model = self.model
        model._initial_epoch = None
        check_built(model)
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        from_rank_0(self._check_kind)
        if self.sharded:
            manifest = restore_newest(model, self.backup_dir)
            if manifest is not None:
                model._initial_epoch = manifest["epoch"]
                _skip_epochs(manifest["epoch"])
            return
        header, arrays, problem = None, None, None
        if is_chief():
            try:
                header, arrays = backup_file.read_newest(self._path, self._previous_path)
            except Exception as error:
                problem = _sendable(error)
        header, problem = processes.gather_objects((header, problem))[0]
        if problem is not None:
            raise problem
        if header is not None:
            self._restore(header, arrays)

    def _check_kind(self) -> None:
        """Raise ValueError if all backups have another value of `sharded`. Delete unfinished saves of killed jobs."""
        whole, sharded = os.path.exists(self._path), bool(complete_saves(self.backup_dir))
        if whole != sharded and sharded != self.sharded:
            raise ValueError(
                f"`backup_dir` must hold backups that were written with `sharded={self.sharded}`. "
                f"Received: {self.backup_dir!r}, with backups of `sharded={sharded}`. Pass `sharded={sharded}`, or use "
                "another directory."
            )
        if self.sharded:
            delete_abandoned(self.backup_dir)

    def _restore(self, header: dict[str, Any], arrays: Any) -> None:
        """Restores the state of a backup on every process. `arrays` is None on all ranks but 0."""
        model = self.model
        build_optimizers(model, header.get("built_on", []))
        self._check_fits(header)
        seed = global_seed(header["has_global_seed"])
        if arrays is not None:
            for variable, array in zip([*saved_variables(model), *seed], arrays["variable"]):
                placement.assign_replica_values(variable, [array])
        placement.broadcast_state([*model.variables, *buffers_of(model), *seed], optimizer_variables(model))
        for part, name in saved_together(model, is_stored_whole):
            part.load_own_variables(_from_chief(None if arrays is None else arrays.get(name, [])))
        set_random_state(header["random_states"], processes.process())
        for part in cross_shards_of(model):
            part.pipeline.reset()
        for extension, name in extensions_of(model):
            extension.load_state(list(_from_chief(None if arrays is None else arrays.get(name, [])).values()))
        for name, variables in carried_values(model).items():
            own = None if arrays is None else arrays.get(name, [])
            restore_carried(variables, header.get(f"{name}s", []), functools.partial(_of_chief, own))
        model._initial_epoch = header["epoch"]
        _skip_epochs(header["epoch"])

    @timed("saving")
    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes a backup."""
        model = self.model
        if not self._warned and is_inside_window(model):
            self._warned = True
            warn(
                f"Epoch {epoch} ended with accumulated gradients that no update has used, and a backup does not store "
                "these gradients. Training restored from this backup will differ from uninterrupted training. Make the "
                "number of steps per epoch a multiple of `gradient_accumulation_steps`.",
            )
        if self.sharded:
            Save(model, self.backup_dir, {"epoch": epoch + 1}).check(wait=True)
            if is_chief():
                for folder in complete_saves(self.backup_dir)[: -2 if self.double_checkpoint else -1]:
                    delete(folder)
            return
        random_states = processes.gather_objects(random_state())
        before_reading(model)
        replica_states = {name: extension.save_state() for extension, name in extensions_of(model)}
        carried = {
            k: [np.stack(_all_replica_values(v)) for v in variables] for k, variables in carried_values(model).items()
        }
        problem = None
        try:
            if is_chief():
                with gather_despite_errors(model):
                    self._write(epoch + 1, random_states, replica_states, carried)
            else:
                join_gather(model)
        except Exception as error:
            problem = _sendable(error)
        # `raise_together` also makes all processes wait until rank 0 has written the backup.
        raise_together(problem)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Deletes the backups unless `delete_checkpoint` is False."""
        self.model._initial_epoch = None
        if self.delete_checkpoint and is_chief():
            for folder in complete_saves(self.backup_dir) if self.sharded else ():
                delete(folder)
            for path in (self._path, self._previous_path):
                with contextlib.suppress(FileNotFoundError):
                    os.remove(path)
            with contextlib.suppress(OSError):  # the folder has other files, or does not exist
                os.rmdir(self.backup_dir)

    def _write(
        self,
        epoch: int,
        random_states: list[Any],
        replica_states: dict[str, list[np.ndarray]],
        carried: dict[str, list[np.ndarray]],
    ) -> None:
        model = self.model
        seed = global_seed(make=False)
        variables = saved_variables(model)
        header = {
            "epoch": epoch,
            "random_states": random_states,
            "has_global_seed": bool(seed),
            "shapes": [list(v.shape) for v in variables],
            "optimizers": [kind_of(optimizer) for optimizer in optimizers_of(model)],
            "built_on": built_on(model),
            **{f"{name}s": [list(array.shape) for array in arrays] for name, arrays in carried.items()},
        }
        values = (keras.ops.convert_to_numpy(variable) for variable in [*variables, *seed])
        previous = self._previous_path if self.double_checkpoint else None
        arrays = {"variable": values, **replica_states, **carried}
        backup_file.write(self._path, header, arrays, saved_together(model, is_stored_whole), previous)

    def _check_fits(self, header: dict[str, Any]) -> None:
        """Raises ValueError if the backup is of another model or optimizer. All processes must pass the same header."""
        model, path = self.model, header["path"]
        whole = {name for _, name in saved_together(model, is_stored_whole) if not name.endswith(_WRAPPER_STATE)}
        ignored = {
            "variable",
            *(kind for kind in header["kinds"] if f"{kind}s" in header),  # compression errors, which may differ
            *(kind for kind in header["kinds"] if kind.endswith((_WRAPPER_STATE, REPLICA_STATE))),
        }
        stored = set(header["kinds"]) - ignored
        kinds = [kind_of(optimizer) for optimizer in optimizers_of(model)]
        shapes = [list(v.shape) for v in saved_variables(model)]
        remedy = "Use another directory, or delete this directory to start anew."
        if stored != whole:
            was, now = ("not sharded", "sharded") if whole - stored else ("sharded", "not sharded")
            received = f"optimizer state that is {was}, but the model's optimizer state is {now}"
            remedy = "Load a file of `keras_shardopt.save_model` instead, or delete the backup to start anew."
        elif header.get("optimizers", kinds) != kinds:
            received = f"state of {', '.join(header['optimizers'])}, but the model has {', '.join(kinds)}"
        elif {k for k in header["kinds"] if k.endswith(REPLICA_STATE)} != {name for _, name in extensions_of(model)}:
            received = "per-replica state (as of local SGD) in the backup but not in the optimizer, or the reverse"
        elif header["shapes"] != shapes:
            received = f"variables of shapes {header['shapes']}, but the model and its optimizer have {shapes}"
        else:
            return
        raise ValueError(
            "`backup_dir` must hold a backup of the same model and optimizer. "
            f"Received: {path!r}, with {received}. {remedy}"
        )


_WRAPPER_STATE = "wrapper_state"


def _sendable(error: Exception) -> Exception:
    """Returns the error, or an OSError with its text if other processes could lack the class of the error."""
    if isinstance(error, ValueError) or (isinstance(error, OSError) and type(error).__module__ == "builtins"):
        return error
    return OSError(": ".join(words for words in (type(error).__name__, str(error)) if words))


def _all_replica_values(variable: keras.Variable) -> list[np.ndarray]:
    """Returns the values of a variable on all replicas. All processes must call this together."""
    return [value for values in processes.gather_objects(placement.replica_values(variable)) for value in values]


def _from_chief(arrays: list[np.ndarray] | None) -> dict[str, np.ndarray]:
    """Sends rank 0's arrays to every process. Returns them in the form that Keras's `load_own_variables` takes."""
    num_arrays = processes.gather_objects(None if arrays is None else len(arrays))[0]
    return {str(i): _of_chief(arrays, i) for i in range(num_arrays)}


def _of_chief(arrays: list[np.ndarray] | None, i: int) -> np.ndarray:
    """Sends one of rank 0's arrays to every process. One array per call saves memory, because sending makes copies."""
    return processes.gather_objects(None if arrays is None else arrays[i])[0]


def _skip_epochs(epoch: int) -> None:
    """Sets the epoch counter that seeds the shuffling of arrays in the running `fit`, which resumes at `epoch`."""
    adapter: Any = getattr(running_local("fit", "epoch_iterator"), "data_adapter", None)
    if hasattr(adapter, "_epoch"):
        adapter._epoch += epoch - (running_local("fit", "initial_epoch") or 0)
