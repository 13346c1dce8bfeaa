"""Saves models from several processes: all take part, rank 0 writes, and each file is replaced atomically."""

from __future__ import annotations

import contextlib
import contextvars
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_shardopt import arguments as check
from keras_shardopt.backends import for_backend
from keras_shardopt.backends.active import placement, processes
from keras_shardopt.backends.phases import timed
from keras_shardopt.checkpoint.atomic_file import Unfinished
from keras_shardopt.checkpoint.gathering import gather_despite_errors, join_gather, needs_all
from keras_shardopt.checkpoint.portable import make_portable
from keras_shardopt.checkpoint.together import communicating, is_chief, raise_together, raising_together
from keras_shardopt.checkpoint.training_state import before_reading

MODEL_SUFFIXES = (".keras", ".h5", ".hdf5")
WEIGHTS_SUFFIXES = (".weights.h5",)


@timed("saving")
def save_model(model: Any, filepath: str | os.PathLike[str], overwrite: bool = True, portable: bool = False) -> None:
    """Saves a model atomically from several processes.

    Every process calls it, at the same point of the program. Sharded state is gathered, rank 0 writes, and all
    processes return when the file exists. They wait for rank 0, so `data_parallel(timeout=...)` must exceed the time of
    the write.

    The file is written next to `filepath`, flushed to disk (`fsync`), and renamed. A killed program leaves the
    complete old file or the complete new one. It may also leave a folder `.keras_shardopt-*.unfinished`: the next
    save into the same folder removes it. `keras.saving.load_model` reads the file with any number of replicas and on
    any backend.

    With one process, this is an atomic `model.save`. After `close()` of the `data_parallel` scope, all processes but
    rank 0 return at once.

    Args:
        model: a `keras.Model`.
        filepath: str or path, ending in ".keras", or in ".h5" for Keras' older format. Its folder must exist. Only
            rank 0 uses it, so only rank 0 needs access to the file system.
        overwrite: bool. With False, an existing file raises an error (Keras would ask at the terminal).
        portable: bool. True writes a ".keras" file that Keras loads without this package, on any backend: with the
            optimizer inside all wrappers and its state, and with `synchronized=False` in `BatchNormalization`.

    Raises:
        TypeError: if `model` is not a `keras.Model`, `filepath` not a path, or another argument not a bool.
        ValueError: if `filepath` is not local or has another ending, or if Keras cannot store the model; with
            `portable`, also if the model has other classes of this package, such as a schedule.
        FileExistsError: if the file exists and `overwrite` is False.
        OSError: if the file cannot be written. The old file is unchanged.

    Each error is raised on every process.

    Example:
        >>> import keras, os, tempfile, keras_shardopt as ks
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(ks.CrossShard("adam"), "mse")
        >>> folder = tempfile.mkdtemp()
        >>> ks.save_model(model, os.path.join(folder, "model.keras"))
        >>> os.listdir(folder)
        ['model.keras']
        >>> keras.saving.load_model(os.path.join(folder, "model.keras")).optimizer
        CrossShard(Adam, reduction='mean')

    References:
        `keras.saving.save_model`. It also writes folders (`zipped=False`) and remote files; these cannot be replaced
        atomically.
    """
    _save(model, filepath, overwrite, MODEL_SUFFIXES, "save", portable)


@timed("saving")
def save_weights(model: Any, filepath: str | os.PathLike[str], overwrite: bool = True) -> None:
    """Saves weights and optimizer state atomically from several processes, without the architecture.

    See `save_model`; `model.load_weights` reads the file.

    Args:
        model: a `keras.Model` that is built.
        filepath: str or path, ending in ".weights.h5". Only rank 0 uses it.
        overwrite: bool. With False, an existing file raises an error.

    Raises:
        TypeError: if `model` is not a `keras.Model`, `filepath` not a path, or `overwrite` not a bool.
        ValueError: if `filepath` is not local or has another ending, or the model is not built.
        FileExistsError: if the file exists and `overwrite` is False.
        OSError: if the file cannot be written. The old file is unchanged.

    Each error is raised on every process.

    Example:
        >>> import keras, os, tempfile, keras_shardopt as ks
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> path = os.path.join(tempfile.mkdtemp(), "model.weights.h5")
        >>> ks.save_weights(model, path)
        >>> model.load_weights(path)

    References:
        `keras.Model.save_weights`. Its `max_shard_size` creates several files; these cannot be replaced atomically.
    """
    _save(model, filepath, overwrite, WEIGHTS_SUFFIXES, "save_weights")


def _save(
    model: Any, filepath: Any, overwrite: Any, suffixes: tuple[str, ...], method: str, portable: Any = False
) -> None:
    """Saves a model with Keras' `method`. All processes wait for each other before and after the file is written."""
    file: Unfinished | None = None
    problem: Exception | None = None
    try:  # outside of the strategy's scope, where TensorFlow's workers know which of them is the chief
        file = _file_to_write(model, filepath, overwrite, suffixes, method, portable)
    except Exception as error:
        problem = error
    try:
        with communicating(model):
            raise_together(problem)
            before_reading(model)
        try:
            _write_or_join(model, method, None if file is None else file.path)
            if file is not None:
                if portable:
                    make_portable(file.path)
                file.finish()
        except Exception as error:
            problem = error
        with communicating(model):
            raise_together(problem)
    finally:
        if file is not None:
            file.discard()


def _file_to_write(
    model: Any, filepath: Any, overwrite: Any, suffixes: tuple[str, ...], method: str, portable: Any
) -> Unfinished | None:
    """Checks the arguments. Returns the new file on rank 0, and None on other ranks."""
    check_model(model)
    check.flag("overwrite", overwrite)
    check.flag("portable", portable)
    if not is_chief():
        return None
    path = file_path(filepath, suffixes[:1] if portable else suffixes)
    is_divided = needs_all(model) or _reading_is_collective(model)
    if is_divided and method == "save" and not path.endswith(".keras"):
        raise ValueError(
            "`filepath` must end in '.keras' if each replica holds only a part of the optimizer state. The older '.h5' "
            f"format cannot store such state. Received: filepath={filepath!r}"
        )
    if not overwrite and os.path.exists(path):
        raise FileExistsError(f"`filepath` already exists, and `overwrite=False`. Received: {filepath!r}")
    return Unfinished(path)


# TensorFlow only (otherwise None): finds variables that only all processes together can read.
_collective_reads = for_backend({"tensorflow": "keras_shardopt.backends.tensorflow.placement"})


def _reading_is_collective(model: Any) -> bool:
    return _collective_reads is not None and bool(_collective_reads.reading_is_collective(model.variables))


def _write_or_join(model: Any, method: str, path: str | None) -> None:
    """Writes the file at `path`. If `path` is None (all ranks but 0), only takes part in gathering state."""
    if _reading_is_collective(model):
        # Let every process save to a temporary file, so all processes read the variables together, in Keras' order.
        with tempfile.TemporaryDirectory() as folder:
            own = os.path.join(folder, "model.weights.h5" if method == "save_weights" else "model.keras")
            with gather_despite_errors(model):
                _write_with_keras(model, method, own)
            if path is not None:
                with open(own, "rb") as read, open(path, "wb") as written:
                    shutil.copyfileobj(read, written, 2**24)
    elif path is not None:
        with gather_despite_errors(model):
            _write_with_keras(model, method, path)
    else:
        join_gather(model)


def _write_with_keras(model: Any, method: str, path: str) -> None:
    save = getattr(model.__class__, method)  # not the model's method, because `prepare` may have replaced it
    if processes.process()[0] == 1:
        save(model, path)
    else:
        placement.outside_strategy(lambda: save(model, path))


_together: contextvars.ContextVar[tuple[Any, list[str]] | None] = contextvars.ContextVar("together", default=None)


@contextlib.contextmanager
def saving_together(model: Any) -> Iterator[list[str]]:
    """In this block, make `save` and `save_weights` of a prepared model run on all processes together.

    Yields a list to which each call adds the name of its method.
    """
    begun: list[str] = []
    # Leave out methods that the user has set on the model.
    own = {name: vars(model).pop(name) for name in ("save", "save_weights") if name in vars(model)}
    token = _together.set((model, begun))
    try:
        yield begun
    finally:
        _together.reset(token)
        vars(model).update(own)


def save_prepared(
    model: Any, name: str, in_keras: Callable[..., None], filepath: Any, *args: Any, **kwargs: Any
) -> None:
    """Saves a model with `in_keras`, its method `name`: in `saving_together`, with all processes."""
    together = _together.get()
    if together is None or together[0] is not model:
        save_from_any_process(model, in_keras, filepath, *args, **kwargs)
        return
    together[1].append(name)
    if "://" not in os.fspath(filepath) or needs_all(model):
        (save_model if name == "save" else save_weights)(model, filepath)
        return
    with raising_together():  # let Keras write remote files, because these cannot be replaced atomically
        if is_chief():
            in_keras(filepath)


@timed("saving")
def save_from_any_process(model: Any, save: Callable[..., None], filepath: Any, *args: Any, **kwargs: Any) -> None:
    """Saves a model with `save`: its Keras method `save` or `save_weights`. Any number of processes can call it.

    Each calling process replaces its file atomically. Folders, remote paths and calls with further arguments are passed
    to Keras unchanged.
    """
    path = os.fspath(filepath) if isinstance(filepath, (str, os.PathLike)) else None
    is_file = isinstance(path, str) and "://" not in path and path.endswith((*MODEL_SUFFIXES, *WEIGHTS_SUFFIXES))
    if processes.process()[0] == 1 or not is_file or args or kwargs or os.path.isdir(filepath):
        save(filepath, *args, **kwargs)
        return
    file = Unfinished(str(path))
    try:
        # Keras' saver creates an optimizer. Leave the distribution on JAX, in which all processes would have to do so.
        with gather_despite_errors(model):
            placement.outside_strategy(lambda: save(file.path))
        file.finish()
    finally:
        file.discard()


def check_model(model: Any) -> None:
    """Raise TypeError unless the argument is a model."""
    if not isinstance(model, keras.Model):
        raise TypeError(f"`model` must be a `keras.Model`. Received: model={model!r} (of type {type(model).__name__})")


def check_built(model: Any) -> None:
    """Raise ValueError unless the model is built."""
    if not model.built:
        raise ValueError(
            f"A model must be built before it is saved or restored. Received: {model!r}. "
            "Add a `keras.Input`, or call the model on a batch of data."
        )


def file_path(filepath: Any, suffixes: tuple[str, ...]) -> str:
    """Return `filepath` as a str. Raise TypeError or ValueError unless it is a local path with one of the suffixes."""
    path = check.local_path("filepath", filepath, "file")
    if not path.endswith(suffixes):
        endings = " or ".join(repr(suffix) for suffix in suffixes[:2])
        raise ValueError(f"`filepath` must end in {endings}. Received: filepath={filepath!r}")
    return path
