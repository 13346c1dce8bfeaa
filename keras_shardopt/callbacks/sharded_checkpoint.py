"""A callback that saves sharded checkpoints during `fit`, in the background."""

from __future__ import annotations

import os
from typing import Any

import keras

from keras_shardopt import arguments as check
from keras_shardopt.backends import stored_parts
from keras_shardopt.backends.user_warnings import warn
from keras_shardopt.checkpoint.sharded import check_arguments, check_safetensors
from keras_shardopt.checkpoint.sharded.saves import (
    Save,
    complete_saves,
    delete,
    delete_abandoned,
    step_of,
    step_of_model,
)
from keras_shardopt.checkpoint.together import communicating, from_rank_0, is_chief
from keras_shardopt.checkpoint.training_state import extensions_of, is_inside_window


class ShardedCheckpoint(keras.callbacks.Callback):
    """Saves the training state as sharded checkpoints: each process writes its part of the state to its own files.

    See `save_sharded` for the contents, and `load_sharded` to restore them. Training waits while each process copies
    its part to host memory. A thread writes the files while training continues. At most one save is in progress: the
    next save waits until it is complete. `fit` returns when the last save is complete. Each process keeps the host
    memory of its part for the next save until `fit` returns, because copies to new memory take longer.

    All processes need this callback, with the same arguments.

    Args:
        directory: str or path. Created if missing. All processes must be able to read and write it.
        save_freq: "epoch" (default), or int >= 1: the number of batches between saves.
            With `gradient_accumulation_steps`, a save waits until the accumulated gradients are applied.
        keep: int >= 1, or None for all. The number of checkpoints to keep: older ones are deleted when a save is
            complete. Not deleted: checkpoints that another job writes meanwhile, and checkpoints with more updates
            than the model has when training begins. Default: 3.
        background: bool. If False, training waits until each save is complete. Default: True.

    Raises:
        TypeError: if `directory` is not a path, or another argument has the wrong type.
        ValueError: if an argument is out of range. From `fit`: if the model is not built, or
            `save_freq` is an int and the optimizer keeps per-replica weights between its updates.
        ModuleNotFoundError: if `safetensors` is not installed.
        OSError: from `fit`, on every process after the same batch, if a process cannot write its part.

    Example:
        >>> import keras, numpy as np, os, tempfile, keras_shardopt as ks
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(ks.CrossShard("sgd"), "mse")
        >>> directory = tempfile.mkdtemp()
        >>> save = ks.callbacks.ShardedCheckpoint(directory, keep=2)
        >>> x, y = np.ones((8, 4)), np.ones((8, 1))
        >>> history = model.fit(x, y, epochs=3, callbacks=[save], verbose=0)
        >>> len(os.listdir(directory)), ks.load_sharded(model, directory)
        (2, Position(step=3, epoch=3))

    References:
        Orbax's `CheckpointManager` and `torch.distributed.checkpoint.async_save`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        save_freq: str | int = "epoch",
        keep: int | None = 3,
        background: bool = True,
    ) -> None:
        if not isinstance(save_freq, str):
            save_freq = check.integer("save_freq", save_freq, fix='Pass a number of batches, or "epoch".')
        elif save_freq != "epoch":
            raise ValueError(f'`save_freq` must be "epoch" or a number of batches. Received: save_freq={save_freq!r}')
        if keep is not None:
            keep = check.integer("keep", keep, fix="Pass None to keep all checkpoints.")
        check.flag("background", background)
        check_safetensors()
        super().__init__()
        self.directory = check.local_path("directory", directory)
        self.save_freq = save_freq
        self.keep = keep
        self.background = background
        self._epoch = 0
        self._last_batch = -1
        self._num_batches = 0
        self._save: Save | None = None
        self._complete: list[str] = []

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Lists the checkpoints of earlier runs, and deletes unfinished saves that are older than an hour."""
        model = self.model
        check_arguments(model, self.directory)
        if self.save_freq != "epoch" and extensions_of(model):
            raise ValueError(
                "A checkpoint holds the mean of all replicas' weights, but replicas compute this mean only at the end "
                f"of each epoch. Received: save_freq={self.save_freq!r}, and an optimizer with per-replica weights: "
                f'{extensions_of(model)[0][0]!r}. Use `save_freq="epoch"`.'
            )
        self._num_batches = 0
        self._check(wait=True)  # finish a save that an interrupted `fit` began
        with communicating(model):
            step = step_of_model(model)
            folders = from_rank_0(self._list)
        self._complete = [folder for folder in folders if step_of(folder) <= step]
        later = [folder for folder in folders if step_of(folder) > step]
        if later:
            warn(
                "The directory of a `ShardedCheckpoint` should hold checkpoints of one training run. Received: "
                f"{self.directory!r}, with {os.path.basename(later[-1])!r}, but the model made only {step} updates. "
                "Call `load_sharded` before `fit` to resume, or use another directory. Otherwise, `load_sharded` will "
                f"restore what this `fit` saves last, and `keep` deletes no old checkpoint after update {step}."
            )

    def _list(self) -> list[str]:
        delete_abandoned(self.directory)
        return complete_saves(self.directory)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Stores the epoch number for the checkpoints saved in this epoch."""
        self._epoch = epoch
        self._last_batch = -1

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Raises an error if the save in progress has failed. Begins a save after every `save_freq` batches."""
        self._check(wait=False)
        if self.save_freq != "epoch":
            self._num_batches += batch - self._last_batch
            self._last_batch = batch
            if self._num_batches >= int(self.save_freq) and not is_inside_window(self.model):
                self._num_batches = 0
                self._begin(self._epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begins a save if `save_freq` is "epoch"."""
        if self.save_freq == "epoch":
            self._begin(epoch + 1)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Waits until the last save is complete, and frees the host memory that is kept between saves."""
        try:
            self._check(wait=True)
        finally:
            stored_parts.free_buffers()

    def _begin(self, epoch: int) -> None:
        self._check(wait=True)
        self._save = Save(self.model, self.directory, {"epoch": epoch}, keeps_buffers=True)
        self._check(wait=not self.background)

    def _check(self, wait: bool) -> None:
        save = self._save
        if save is None:
            return
        try:
            is_complete = save.check(wait)
        except BaseException:
            self._save = None
            raise
        if is_complete:
            self._save = None
            self._complete.append(save.folder)
            while self.keep is not None and is_chief() and len(self._complete) > self.keep:
                delete(self._complete.pop(0))
