"""Sharded checkpoints: each process writes and reads its own part, and training continues while files are written."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from keras_shardopt import arguments as check
from keras_shardopt.backends.active import processes
from keras_shardopt.backends.user_warnings import warn
from keras_shardopt.checkpoint.saving import check_built, check_model
from keras_shardopt.checkpoint.sharded.pieces import Checkpoint
from keras_shardopt.checkpoint.sharded.saves import Save, complete_saves, is_complete
from keras_shardopt.checkpoint.sharded.state import restore
from keras_shardopt.checkpoint.together import communicating, from_rank_0, raise_together, raising_together


class Position(NamedTuple):
    """The position in training that a checkpoint was saved at."""

    step: int
    """The number of optimizer updates."""

    epoch: int
    """The number of finished epochs; 0 if `save_sharded` wrote the checkpoint."""


def save_sharded(model: Any, directory: str | os.PathLike[str]) -> str:
    """Save the training state of a model as a new checkpoint to which each process writes its part.

    Every process must call it, at the same point of the program. No process gathers the state of other processes:
    each writes its slices of sharded state, and an equal share of values that all processes have, such as weights. The
    checkpoint contains all that `BackupAndRestore` restores: weights, optimizer state, moving statistics, seeds, random
    number states, and compression errors (for `error_feedback`). All processes must have access to the directory.

    A checkpoint is a folder in `directory`. Its manifest is written last, in one step. Readers ignore a folder without
    a manifest, such as that of a killed job. No locks are used.

    `callbacks.ShardedCheckpoint` saves during `fit`, in the background.

    Args:
        model: a built `keras.Model`.
        directory: str or path. Created if missing. It may hold other checkpoints.

    Returns:
        The path of the new checkpoint.

    Raises:
        TypeError: if `model` is not a `keras.Model`, or `directory` not a path.
        ValueError: if `directory` is not local, or the model is not built.
        ModuleNotFoundError: if `safetensors` is not installed.
        OSError: if a process cannot write, or has no access to the directory.

    Each error is raised on every process.

    Example:
        >>> import keras, numpy as np, tempfile, keras_shardopt as ks
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(ks.CrossShard("adam"), "mse")
        >>> directory = tempfile.mkdtemp()
        >>> history = model.fit(np.ones((8, 4)), np.ones((8, 1)), batch_size=4, verbose=0)
        >>> path = ks.save_sharded(model, directory)
        >>> ks.load_sharded(model, directory)
        Position(step=2, epoch=0)

    References:
        `torch.distributed.checkpoint` (PyTorch) and Orbax (JAX) have similar checkpoints for one framework.
    """
    with communicating(model), raising_together():
        check_arguments(model, directory)
    save = Save(model, os.fspath(directory), {"epoch": 0})
    save.check(wait=True)
    return save.folder


def load_sharded(model: Any, path: str | os.PathLike[str]) -> Position:
    """Restore a model, its optimizer and random number states from a sharded checkpoint.

    Every process must call it, at the same point of the program. The checkpoint may have been saved on another backend,
    by another number of processes, and with or without `shard_state`. Each process reads the values that it needs, and
    checks them against their hashes. With the same number of processes, each gets its random number states and
    per-replica values. Otherwise all processes use those of process 0, and compression errors start at 0.

    Args:
        model: a built `keras.Model`. If it is not compiled, its optimizer state is left out.
        path: str or path: a checkpoint, or a directory of checkpoints. The newest complete one in a directory is
            restored, whatever its step. If it is damaged, the checkpoint before it is restored, with a warning.

    Returns:
        A `Position`: `step` is the number of updates, `epoch` the number of finished epochs, for `initial_epoch` of
        `fit`.

    Raises:
        TypeError: if `model` is not a `keras.Model`, or `path` not a path.
        ValueError: if the checkpoint is of another model or optimizer. The model is unchanged.
        FileNotFoundError: if no complete checkpoint exists.
        OSError: if the given checkpoint, or each one in the directory, is damaged.

    Each error is raised on every process.

    Example:
        >>> import keras, tempfile, keras_shardopt as ks
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> path = ks.save_sharded(model, tempfile.mkdtemp())
        >>> ks.load_sharded(model, path)
        Position(step=0, epoch=0)

    References:
        `torch.distributed.checkpoint` (PyTorch) and Orbax (JAX) have similar checkpoints for one framework.
    """
    with communicating(model), raising_together():
        check_arguments(model, path, "path")
    manifest = restore_newest(model, os.fspath(path))
    if manifest is None:
        raise FileNotFoundError(f"`path` must have a complete sharded checkpoint. Received: path={os.fspath(path)!r}")
    return Position(manifest["step"], manifest["epoch"])


def restore_newest(model: Any, path: str) -> dict[str, Any] | None:
    """Restore the newest intact checkpoint. Return its manifest, or None if no checkpoint exists."""
    with communicating(model):
        return _restore_newest(model, path)


def _restore_newest(model: Any, path: str) -> dict[str, Any] | None:
    folders = from_rank_0(lambda: [path] if is_complete(path) else complete_saves(path)[::-1])
    process = processes.process()
    for folder in folders:
        checkpoint, problem = None, None
        try:
            checkpoint = Checkpoint(folder)
            checkpoint.verify(process)
        except (OSError, ValueError) as error:
            problem = error
        try:
            raise_together(problem)
        except OSError as error:
            if folder == folders[-1]:
                raise
            if process[1] == 0:
                warn(f"A damaged checkpoint is skipped: {error} The previous checkpoint is used instead.")
            continue
        assert checkpoint is not None
        restore(model, checkpoint, process)
        return checkpoint.manifest
    return None


def check_arguments(model: Any, directory: Any, name: str = "directory") -> None:
    """Raise TypeError or ValueError, which calls `directory` by the name `name`, if an argument is invalid."""
    check_model(model)
    check_built(model)
    check_safetensors()
    check.local_path(name, directory)


def check_safetensors() -> None:
    """Raise ModuleNotFoundError unless `safetensors` is installed."""
    try:
        import safetensors as _  # noqa: F401
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "Sharded checkpoints need safetensors, which is not installed. Run `pip install safetensors`.",
            name="safetensors",
        ) from None
