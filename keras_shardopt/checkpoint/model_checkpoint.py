"""The callback `ModelCheckpoint` for several processes.

Private names of Keras touched here (a test checks that each exists):
    `ModelCheckpoint._save_model` - writes a checkpoint.
    `ModelCheckpoint._get_file_path`, `_should_save_model` - the path, and whether to save.
"""

from __future__ import annotations

import os
from typing import Any

import keras

from keras_shardopt import arguments as check
from keras_shardopt.checkpoint.saving import MODEL_SUFFIXES, WEIGHTS_SUFFIXES, file_path, save_model, save_weights
from keras_shardopt.checkpoint.together import communicating, from_rank_0, is_chief


class ModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """`keras.callbacks.ModelCheckpoint` for several processes, with files that appear atomically.

    Saves with `save_model` or `save_weights`. Rank 0 decides for all processes, from its logs, whether to save and
    under which name. (With `prepare(model)`, the logs cover all processes.) The folder is created if it is missing.

    Every process needs this callback, with the same `save_freq`.

    Args:
        filepath: str or path. `{epoch}`, `{batch}` and names of logs are filled in, as in
            "{epoch:02d}-{val_loss:.2f}.keras". Ends in ".keras" or ".h5", or in ".weights.h5" if `save_weights_only`.
        monitor: str. The name of the monitored log.
        verbose: 0 or 1. With 1, rank 0 prints each saved file.
        save_best_only: bool. Saves only if the monitored value improved.
        save_weights_only: bool. Selects `save_weights` instead of `save_model`.
        mode: "auto", "min" or "max": the direction of improvement. "auto" derives it from the name.
        save_freq: "epoch", or int >= 1: the number of batches between saves.
        initial_value_threshold: float or None. The value that the first save must improve on.

    Raises:
        TypeError: if an argument has a wrong type.
        ValueError: if `filepath` is not local or has another ending, or an argument is out of range.
        OSError: from training, on every process, if a file cannot be written.
        KeyError: from training, on every process, if `filepath` names a log that does not exist.

    Example:
        >>> import keras, numpy as np, os, tempfile, keras_shardopt as ks
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(ks.CrossShard("sgd"), "mse")
        >>> folder = tempfile.mkdtemp()
        >>> save = ks.callbacks.ModelCheckpoint(os.path.join(folder, "{epoch:02d}.keras"), "loss")
        >>> x, y = np.ones((8, 4)), np.ones((8, 1))
        >>> history = model.fit(x, y, epochs=2, callbacks=[save], verbose=0)
        >>> sorted(os.listdir(folder))
        ['01.keras', '02.keras']

    References:
        `keras.callbacks.ModelCheckpoint`. There, every process writes the same file and decides by its own logs.
    """

    best: Any

    def __init__(
        self,
        filepath: str | os.PathLike[str],
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        initial_value_threshold: float | None = None,
    ) -> None:
        for argument, value in (("save_best_only", save_best_only), ("save_weights_only", save_weights_only)):
            check.flag(argument, value)
        path = file_path(filepath, WEIGHTS_SUFFIXES if save_weights_only else MODEL_SUFFIXES[:2])
        if not isinstance(monitor, str):
            raise TypeError(f"`monitor` must be the name of a logged value. Received: monitor={monitor!r}")
        check.one_of("mode", mode, ("auto", "min", "max"))
        if not isinstance(save_freq, str):
            save_freq = check.integer("save_freq", save_freq, fix='Pass a number of batches, or "epoch".')
        elif save_freq != "epoch":
            raise ValueError(f'`save_freq` must be "epoch" or a number of batches. Received: save_freq={save_freq!r}')
        if initial_value_threshold is not None:
            initial_value_threshold = check.real("initial_value_threshold", initial_value_threshold, finite=False)
        # Keras accepts a bool for this argument, so accept it too.
        verbose = int(verbose) if isinstance(verbose, bool) else check.integer("verbose", verbose, at_least=0)
        super().__init__(
            path, monitor, verbose, save_best_only, save_weights_only, mode, save_freq, initial_value_threshold
        )

    def _save_model(self, epoch: int, batch: int | None, logs: dict[str, Any] | None) -> None:
        # All processes must read `self.model`, because on JAX this copies the training state of `fit` to the variables.
        model = self.model
        with communicating(model):
            # `from_rank_0` returns None on other ranks if the connection between processes was closed.
            path, self.best = from_rank_0(lambda: self._decide(epoch, batch, logs or {})) or (None, self.best)
        if path is None:
            return
        (save_weights if self.save_weights_only else save_model)(model, path)
        if self.verbose > 0 and is_chief():
            print(f"\nEpoch {epoch + 1}: finished saving model to {path}")

    def _decide(self, epoch: int, batch: int | None, logs: dict[str, Any]) -> tuple[str | None, Any]:
        """Returns the path of the file to write, or None if no save is due, and the best monitored value so far."""
        path = self._get_file_path(epoch, batch, logs)
        wanted = self._should_save_model(epoch, batch, logs, path)
        if wanted:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        # Convert tensors to Python floats, because the result is sent to other processes.
        best = self.best if self.best is None else float(keras.ops.convert_to_numpy(self.best))
        return path if wanted else None, best
