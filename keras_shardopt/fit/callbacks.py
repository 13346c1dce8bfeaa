"""Callbacks of a prepared model on several processes: one decision, one file.

Every process has all callbacks. They see the logs of all replicas, and so make the same decision. Each process
would write the same file. So what only writes is called on the first process only; and where a callback saves the
model, all processes take part, as some of the state may be divided among them, and the first one writes.

Private names of Keras touched here (a test holds each of them):
    `ModelCheckpoint._save_model`, `BackupAndRestore._save_model` - call `save` or `save_weights` of the model.
    `BackupAndRestore._weights_path` - the file that is written there.
    `OrbaxCheckpoint._save_checkpoint` - reads the state of the model, and writes it.
    `Trainer._initial_epoch` - the epoch with which a running `fit` begins.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras.callbacks import Callback, CallbackList

from keras_shardopt.backends.active import processes
from keras_shardopt.backends.models import is_prepared, override_method
from keras_shardopt.checkpoint.saving import (
    ModelCheckpoint,
    is_chief,
    needs_all,
    raise_together,
    save_model,
    save_weights,
    write_apart,
)
from keras_shardopt.fit.overrides import reducers_in
from keras_shardopt.optimizers.cross_shard import cross_shards

_WRITERS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
"""What does nothing but write, print or send."""

_ORBAX: Any = getattr(keras.callbacks, "OrbaxCheckpoint", ())
"""Keras' callback that writes with Orbax, which older versions have not."""

_BLIND = (keras.callbacks.BackupAndRestore, keras.callbacks.History, keras.callbacks.ProgbarLogger)
"""What looks at no logs of batches, or (the bar) at those of some batches only."""

_CALLBACKS = "_keras_shardopt_callbacks"


def watch_saving(model: Any) -> None:
    """Lets what processes save at the same time, each by `model.save`, be whole. Doing it twice changes nothing."""
    override_method(model, "save", write_apart)
    override_method(model, "save_weights", write_apart)


def _watch_functions() -> None:
    """Lets `keras.saving.save_model(model, ...)` of a prepared model be its `save(...)`, and alike."""
    for module, name in itertools.product((keras.saving, keras.models), ("save_model", "save_weights")):
        function = getattr(module, name, None)
        if function is not None:
            setattr(module, name, functools.wraps(function)(functools.partial(_save, function, _METHODS[name])))


_METHODS = {"save_model": "save", "save_weights": "save_weights"}


def _save(in_keras: Callable[..., None], method: str, model: Any, *args: Any, **kwargs: Any) -> None:
    if method in vars(model):  # one of those that are watched
        getattr(model, method)(*args, **kwargs)
    else:
        in_keras(model, *args, **kwargs)


_watch_functions()


def watch_callbacks() -> None:
    """Lets the callbacks of prepared models come through here. Doing it twice changes nothing."""
    CallbackList.set_model = _set_model


_set_model_in_keras = CallbackList.set_model


def _set_model(callback_list: Any, model: Any) -> None:
    """Stands in for Keras' method, with which each list of callbacks begins."""
    if model is not None and is_prepared(model):
        if _are_several():
            callback_list.callbacks[:] = [each for each in callback_list.callbacks if _is_for_this_process(each)]
        object.__setattr__(model, _CALLBACKS, list(callback_list.callbacks))
    _set_model_in_keras(callback_list, model)


@contextlib.contextmanager
def callbacks_of_call(model: Any) -> Iterator[None]:
    """A call of `fit`, `evaluate` or `predict`, perhaps inside another one, that has callbacks of its own."""
    before = running_callbacks(model)
    try:
        yield
    finally:
        object.__setattr__(model, _CALLBACKS, before)


def running_callbacks(model: Any) -> list[Any]:
    """The callbacks of the call that runs, on this one of several processes."""
    return vars(model).get(_CALLBACKS, [])


BAR_SECONDS = 0.05
"""How often Keras' bar shows something new."""

_QUIET_SECONDS = 0.5
"""For how long nobody is said to look where nobody does."""


class BatchLogs:
    """The logs of batches that somebody looks at, which are to be those of all replicas.

    Each replica has metrics of its own, and to join them costs something. So this is done for callbacks that look at
    the logs of each batch, and for a bar when it shows something new; in between it gets what it has.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.is_fitting = False
        """Whether a `fit` is running."""
        self._shown: dict[bool, dict[str, Any]] = {}
        self._shown_at = 0.0

    def are_wanted(self, trains: bool) -> bool:
        """Whether somebody looks at those of the next batch, of a training or of a test."""
        if self._always(trains):
            return True
        if not self._has_bar() or (self.is_fitting and not trains):
            return False
        # What is no metric is that of one batch, and not to be had later.
        return trains not in self._shown or time.monotonic() - self._shown_at > BAR_SECONDS

    def seconds_unseen(self, trains: bool) -> float:
        """For how long nobody of this process looks."""
        if self._always(trains):
            return 0.0
        return 2 * BAR_SECONDS if self._has_bar() else _QUIET_SECONDS

    def _always(self, trains: bool) -> bool:
        return any(_looks_at_batches(callback, *_HOOKS[trains]) for callback in running_callbacks(self._model))

    def _has_bar(self) -> bool:
        bars = [each for each in running_callbacks(self._model) if isinstance(each, keras.callbacks.ProgbarLogger)]
        return any(bar.verbose == 1 for bar in bars)

    def last(self, trains: bool, logs: Any) -> Any:
        """What the bar has; `logs` before there was anything."""
        return self._shown.get(trains, logs)

    def show(self, trains: bool, metrics: dict[str, Any]) -> None:
        """Keeps the metrics of all replicas for it."""
        self._shown[trains], self._shown_at = metrics, time.monotonic()

    def forget(self) -> None:
        """Lets go of them: metrics begin anew."""
        self._shown.clear()


_HOOKS = {True: ("on_batch_end", "on_train_batch_end"), False: ("on_test_batch_end",)}
"""The methods of callbacks that get the logs of a batch, in training or not."""


def _looks_at_batches(callback: Any, *hooks: str) -> bool:
    """Whether a callback looks at the logs of each batch, in methods of these names."""
    if isinstance(callback, (keras.callbacks.ModelCheckpoint, _ORBAX)):
        return bool(callback.save_freq != "epoch")
    if isinstance(callback, keras.callbacks.TensorBoard):
        return bool(callback.update_freq != "epoch")
    if isinstance(callback, _BLIND) or type(callback).__module__.startswith("keras_shardopt."):
        return False
    return any(hook in vars(callback) or getattr(type(callback), hook) is not getattr(Callback, hook) for hook in hooks)


def _are_several() -> bool:
    return processes.process()[0] > 1 and processes.num_replicas() > 1


def _is_for_this_process(callback: Any) -> bool:
    """Whether a callback is called here; lets one that saves the model save it together with the other processes."""
    if isinstance(callback, _WRITERS) and not is_chief():
        return False
    if not is_chief() and type(callback).__module__.startswith("keras.") and vars(callback).get("verbose"):
        callback.verbose = 0
    if isinstance(callback, keras.callbacks.ModelCheckpoint) and not isinstance(callback, ModelCheckpoint):
        _stand_in(callback, "_save_model", _save_checkpoint)
    elif isinstance(callback, keras.callbacks.TerminateOnNaN) and not is_chief():
        _stand_in(callback, "on_batch_end", _stop_silently)
    elif isinstance(callback, keras.callbacks.BackupAndRestore):
        _stand_in(callback, "on_train_begin", _restore_backup)
        _stand_in(callback, "_save_model", _save_backup)
        _stand_in(callback, "on_train_end", _delete_backup)
    elif isinstance(callback, _ORBAX) and not callback.is_multihost_enabled():  # else Orbax knows the processes
        _stand_in(callback, "on_train_begin", _begin_with_orbax)
        _stand_in(callback, "_save_checkpoint", _save_with_orbax)
        _stand_in(callback, "on_train_end", _finish_together)
        _stand_in(callback, "wait_until_finished", _finish_together)
    return True


def _stand_in(callback: Any, name: str, function: Callable[..., Any]) -> None:
    if name not in vars(callback):
        setattr(callback, name, functools.partial(_together, function, callback, getattr(callback, name)))


def _together(function: Callable[..., Any], callback: Any, real: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Calls `function(callback, real, ...)` where the callback is that of several processes, else `real(...)`."""
    if is_prepared(callback.model) and _are_several():
        function(callback, real, *args, **kwargs)
    else:
        real(*args, **kwargs)


def _stop_silently(callback: Any, real: Callable[..., None], batch: int, logs: Any = None) -> None:
    """Does not print, as the first process does."""
    loss = (logs or {}).get("loss")
    if loss is None or np.isfinite(loss) or getattr(callback, "raise_error", False):
        real(batch, logs)
    else:
        callback.model.stop_training = True


def _save_checkpoint(callback: Any, real: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    with _saving_together(callback.model):
        real(*args, **kwargs)


def _save_backup(callback: Any, real: Callable[[], None]) -> None:
    if not is_chief():
        save_weights(callback.model, callback._weights_path)
        return
    with _saving_together(callback.model) as begun:
        try:
            real()
        except Exception as error:
            if not begun:  # the others wait for it
                raise_together(error)
            raise


def _begin_with_orbax(callback: Any, real: Callable[..., None], logs: Any = None) -> None:
    _check_whole(callback)
    real(logs)


def _check_whole(callback: Any) -> None:
    """Raises ValueError if an `OrbaxCheckpoint` of rank 0 would miss the other ranks' parts of the state."""
    if needs_all(callback.model) and not callback.save_weights_only:
        raise ValueError(
            "`OrbaxCheckpoint` cannot write optimizer state that is divided among processes. Received: "
            f"{callback.model.optimizer!r}. Use `keras_shardopt.callbacks.ModelCheckpoint` or `BackupAndRestore`, or "
            "`OrbaxCheckpoint(..., save_weights_only=True)`."
        )


def _save_with_orbax(callback: Any, real: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    _check_whole(callback)  # of optimizers that were not built when training began, too
    for reducer in reducers_in(callback.model, cross_shards):
        reducer.pipeline.before_look()
    problem = None
    if is_chief():
        try:
            real(*args, **kwargs)
        except Exception as error:
            problem = error
    raise_together(problem)


def _finish_together(callback: Any, real: Callable[..., None], *args: Any) -> None:
    """Leaves no process before the first one has written its files."""
    real(*args)
    raise_together(None)


def _restore_backup(callback: Any, real: Callable[..., None], logs: Any = None) -> None:
    problem = None
    try:
        real(logs)
    except Exception as error:
        problem = error
    raise_together(problem)
    epochs = processes.gather_objects(callback.model._initial_epoch)
    if any(epoch != epochs[0] for epoch in epochs):
        raise ValueError(
            "All processes must find the same backup. Received: training that goes on, by process, with the epochs "
            f"{epochs}. Use a `backup_dir` that all of them see, or `keras_shardopt.callbacks.BackupAndRestore`, which "
            "reads and writes on the first process only."
        )


def _delete_backup(callback: Any, real: Callable[..., None], logs: Any = None) -> None:
    if is_chief():
        real(logs)


@contextlib.contextmanager
def _saving_together(model: Any) -> Iterator[list[str]]:
    """Within it the model's `save` and `save_weights` are those of all processes. Yields what has begun, by name."""
    begun: list[str] = []

    def together(save: Callable[..., None], name: str, filepath: Any, overwrite: bool = True) -> None:
        begun.append(name)
        if "://" in os.fspath(filepath) and not needs_all(model):
            _save_elsewhere(functools.partial(getattr(type(model), name), model), filepath)
        else:
            save(model, filepath)

    before = {name: getattr(model, name) for name in ("save", "save_weights")}
    object.__setattr__(model, "save", functools.partial(together, save_model, "save"))
    object.__setattr__(model, "save_weights", functools.partial(together, save_weights, "save_weights"))
    try:
        yield begun
    finally:
        for name, method in before.items():
            object.__setattr__(model, name, method)


def _save_elsewhere(save: Callable[[Any], None], filepath: Any) -> None:
    """To another machine, where Keras can write, and no file can be replaced in one step."""
    problem = None
    if is_chief():
        try:
            save(filepath)
        except Exception as error:
            problem = error
    raise_together(problem)
