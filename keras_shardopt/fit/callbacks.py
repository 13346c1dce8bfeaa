"""Adapts the callbacks of `fit` to several processes: all make the same decision, and one process writes.

Callbacks that only write run on the first process, all others on every process. Logs cover all replicas, so a callback
makes the same decision on every process. If it saves the model, all processes take part, because state may be sharded
among them, and the first process writes.

Private names of Keras touched here (a test checks that each exists):
    `ModelCheckpoint._save_model`, `BackupAndRestore._save_model` - call `save` or `save_weights` of the model.
    `BackupAndRestore._weights_path` - the file of that callback.
    `OrbaxCheckpoint._save_checkpoint` - reads and writes the state of the model.
    `Trainer._initial_epoch` - the epoch with which a running `fit` begins.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras.callbacks import Callback

from keras_shardopt.backends.active import processes
from keras_shardopt.backends.models import is_prepared, mix_in, take_out
from keras_shardopt.checkpoint.gathering import needs_all
from keras_shardopt.checkpoint.model_checkpoint import ModelCheckpoint
from keras_shardopt.checkpoint.saving import save_weights, saving_together
from keras_shardopt.checkpoint.together import is_chief, raise_together, raising_together
from keras_shardopt.fit.calls import before_reading, cross_shards_in_step

_WRITERS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
"""Classes of callbacks that only write files, print or send. They run on the first process only."""

ORBAX: Any = getattr(keras.callbacks, "OrbaxCheckpoint", ())
"""Keras's `OrbaxCheckpoint` callback; an empty tuple in Keras versions without this callback."""

_CALLBACKS = "_keras_shardopt_callbacks"


def saving_complete_files(in_keras: Callable[..., None]) -> Callable[..., None]:
    """Return a replacement of Keras's `save_model` or `save_weights` that includes optimizer state of all processes."""
    if hasattr(in_keras, "saves_complete_files"):
        return in_keras

    @functools.wraps(in_keras)
    def save(model: Any, *args: Any, **kwargs: Any) -> None:
        if not is_prepared(model):
            in_keras(model, *args, **kwargs)
        elif in_keras.__name__ == "save_model":
            model.save(*args, **kwargs)
        else:
            model.save_weights(*args, **kwargs)

    vars(save)["saves_complete_files"] = True
    for name, module in list(sys.modules.items()):
        # Do not replace the function inside `keras.src`: `model.save` calls it there, so `save` would call itself.
        if isinstance(module, types.ModuleType) and not name.startswith("keras.src"):
            for attribute in [key for key, value in list(vars(module).items()) if value is in_keras]:
                setattr(module, attribute, save)
    return save


def setting_model(in_keras: Callable[..., None]) -> Callable[..., None]:
    """Return a replacement of `CallbackList.set_model` that adapts callbacks to training on several processes."""

    @functools.wraps(in_keras)
    def set_model(callback_list: Any, model: Any) -> None:
        for callback in callback_list.callbacks:
            take_out(callback)  # an earlier `fit`, perhaps of another model, can have adapted the callback
        if model is not None and is_prepared(model):
            if _are_several():
                callback_list.callbacks[:] = [each for each in callback_list.callbacks if _is_for_this_process(each)]
            object.__setattr__(model, _CALLBACKS, list(callback_list.callbacks))
        in_keras(callback_list, model)

    return set_model


@contextlib.contextmanager
def callbacks_of_call(model: Any) -> Iterator[None]:
    """At the end of this block, restore the model's list of callbacks from before the block."""
    before = running_callbacks(model)
    try:
        yield
    finally:
        object.__setattr__(model, _CALLBACKS, before)


def running_callbacks(model: Any) -> list[Any]:
    """Return the callbacks of the running `fit`, `evaluate` or `predict` on this process."""
    return vars(model).get(_CALLBACKS, [])


def _are_several() -> bool:
    return processes.process()[0] > 1 and processes.num_replicas() > 1


def _is_for_this_process(callback: Any) -> bool:
    """Return whether a callback runs on this process. Adapt Keras's own callbacks to several processes."""
    if isinstance(callback, _WRITERS) and not is_chief():
        return False
    if not is_chief() and type(callback).__module__.startswith("keras.") and vars(callback).get("verbose"):
        callback.verbose = 0
    is_collective = isinstance(callback, ModelCheckpoint)
    is_collective |= isinstance(callback, ORBAX) and callback.is_multihost_enabled()
    for kind, mixin in _TOGETHER.items():
        if isinstance(callback, kind) and not is_collective:
            mix_in(callback, mixin)
    return True


class _SavesTogether(keras.callbacks.ModelCheckpoint):
    def _save_model(self, *args: Any, **kwargs: Any) -> None:
        with saving_together(self.model):
            super()._save_model(*args, **kwargs)


class _StopsSilently(keras.callbacks.TerminateOnNaN):
    """Stops training on all processes, and prints the reason on the first process only."""

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        loss = (logs or {}).get("loss")
        if is_chief() or loss is None or np.isfinite(loss) or getattr(self, "raise_error", False):
            super().on_batch_end(batch, logs)
        else:
            self.model.stop_training = True


class _BacksUpTogether(keras.callbacks.BackupAndRestore):
    """Saves the model with all processes, and checks that all processes restore the same backup."""

    def on_train_begin(self, logs: Any = None) -> None:
        with raising_together():
            super().on_train_begin(logs)
        epochs = processes.gather_objects(self.model._initial_epoch)
        if any(epoch != epochs[0] for epoch in epochs):
            raise ValueError(
                f"All processes must find the same backup. Received: training would continue at the epochs {epochs}, "
                "by process. Use a `backup_dir` that all processes can read, or "
                "`keras_shardopt.callbacks.BackupAndRestore`, which reads and writes on the first process only."
            )

    def _save_model(self) -> None:
        if not is_chief():
            save_weights(self.model, self._weights_path)
            return
        with saving_together(self.model) as begun:
            try:
                super()._save_model()
            except Exception as error:
                if not begun:  # the other processes still wait in `save_weights`: end their wait
                    raise_together(error)
                raise

    def on_train_end(self, logs: Any = None) -> None:
        if is_chief():  # because Keras's `on_train_end` deletes the backup
            super().on_train_end(logs)


class _WritesTogether(Callback):
    """Writes with Orbax on the first process while the other processes wait."""

    def on_train_begin(self, logs: Any = None) -> None:
        _check_whole(self)
        super().on_train_begin(logs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        _check_whole(self)  # again, for optimizers that were not built when training began
        before_reading(cross_shards_in_step(self.model))
        with raising_together():
            if is_chief():
                super()._save_checkpoint(*args, **kwargs)

    def on_train_end(self, logs: Any = None) -> None:
        super().on_train_end(logs)
        raise_together(None)

    def wait_until_finished(self) -> None:
        super().wait_until_finished()
        raise_together(None)


_TOGETHER = {
    keras.callbacks.ModelCheckpoint: _SavesTogether,
    keras.callbacks.TerminateOnNaN: _StopsSilently,
    keras.callbacks.BackupAndRestore: _BacksUpTogether,
    ORBAX: _WritesTogether,
}
"""For each callback class of Keras, the class that is mixed into its instances on several processes."""


def _check_whole(callback: Any) -> None:
    """Raise ValueError if optimizer state is sharded, because `OrbaxCheckpoint` would write only rank 0's shard."""
    if needs_all(callback.model) and not callback.save_weights_only:
        raise ValueError(
            "`OrbaxCheckpoint` cannot write optimizer state that is divided among processes. Received: "
            f"{callback.model.optimizer!r}. Use `keras_shardopt.callbacks.ModelCheckpoint` or `BackupAndRestore`, or "
            "`OrbaxCheckpoint(..., save_weights_only=True)`."
        )
