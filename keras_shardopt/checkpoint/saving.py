"""Saves models from several processes: all take part, rank 0 writes, and each file is replaced atomically.

All processes gather optimizer state that is divided among them, in the same order. If rank 0 has an error, the
gathering still runs to its end, so no process waits for rank 0. Then every process raises the error.

Private names of Keras touched here (a test checks that each exists):
    `ModelCheckpoint._save_model` - writes a checkpoint.
    `ModelCheckpoint._get_file_path`, `_should_save_model` - the path, and whether to save.
    `keras.src.saving.saving_lib._save_state` - visits all objects that a file would hold, in order.
    `keras.src.saving.saving_lib.H5IOStore` - the class of stores that `_save_state` accepts.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.saving import saving_lib

from keras_shardopt import arguments as check
from keras_shardopt.backends import for_backend
from keras_shardopt.backends.active import placement, processes
from keras_shardopt.backends.models import optimizers_of
from keras_shardopt.backends.phases import timed
from keras_shardopt.checkpoint.atomic_file import Unfinished
from keras_shardopt.checkpoint.portable import make_portable
from keras_shardopt.numerics import Optimizer
from keras_shardopt.wrapping.chain import chain_of
from keras_shardopt.wrapping.wrapper import OptimizerWrapper

_MODEL_SUFFIXES = (".keras", ".h5", ".hdf5")
_WEIGHTS_SUFFIXES = (".weights.h5",)


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
    _save(model, filepath, overwrite, _MODEL_SUFFIXES, "save", portable)


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
    _save(model, filepath, overwrite, _WEIGHTS_SUFFIXES, "save_weights")


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
        path = file_path(filepath, _WEIGHTS_SUFFIXES if save_weights_only else _MODEL_SUFFIXES[:2])
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


def _save(
    model: Any, filepath: Any, overwrite: Any, suffixes: tuple[str, ...], method: str, portable: Any = False
) -> None:
    """Saves a model with Keras' `method`. All processes wait for each other before and after the file is written."""
    file: Unfinished | None = None
    problem: Exception | None = None
    try:
        check_model(model)
        check.flag("overwrite", overwrite)
        check.flag("portable", portable)
        if is_chief():
            path = file_path(filepath, suffixes[:1] if portable else suffixes)
            is_divided = needs_all(model) or _reading_is_collective(model)
            if is_divided and method == "save" and not path.endswith(".keras"):
                raise ValueError(
                    "`filepath` must end in '.keras' if each replica holds only a part of the optimizer state. The "
                    f"older '.h5' format cannot store such state. Received: filepath={filepath!r}"
                )
            if not overwrite and os.path.exists(path):
                raise FileExistsError(f"`filepath` already exists, and `overwrite=False`. Received: {filepath!r}")
            file = Unfinished(path)
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


def before_reading(model: Any) -> None:
    """Assigns the mean over replicas to weights that differ because of local SGD. All processes must call this."""
    for optimizer in optimizers_of(model):
        for part in chain_of(optimizer):
            if isinstance(part, OptimizerWrapper) and hasattr(part, "pipeline"):
                part.pipeline.before_reading()


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
                _copy(own, path)
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


@timed("saving")
def save_from_any_process(model: Any, save: Callable[..., None], filepath: Any, *args: Any, **kwargs: Any) -> None:
    """Saves a model with `save`: its Keras method `save` or `save_weights`. Any number of processes can call it.

    Each calling process replaces its file atomically. Folders, remote paths and calls with further arguments are passed
    to Keras unchanged.
    """
    path = os.fspath(filepath) if isinstance(filepath, (str, os.PathLike)) else None
    is_file = isinstance(path, str) and "://" not in path and path.endswith((*_MODEL_SUFFIXES, *_WEIGHTS_SUFFIXES))
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


def join_gather(model: Any) -> None:
    """Sends this process's part of divided optimizer state to the process that writes the file."""
    if needs_all(model):
        with communicating(model):
            for part, _ in saved_together(model):
                part.save_own_variables(NullStore())


def _copy(source: str, target: str) -> None:
    with open(source, "rb") as read, open(target, "wb") as written:
        while block := read.read(2**24):
            written.write(block)


def needs_all(model: Any) -> bool:
    """Whether the state of one of the model's optimizers can only be saved by all processes together."""
    return any(saves_collectively(optimizer) for optimizer in optimizers_of(model))


def saves_collectively(optimizer: Optimizer) -> bool:
    """Whether the state of this optimizer can only be saved by all processes together."""
    chain = chain_of(optimizer)
    return any(o._saving_needs_all_replicas for o in chain if isinstance(o, OptimizerWrapper))


def saved_together(model: Any, which: Callable[[Any], bool] = saves_collectively) -> list[tuple[Any, str]]:
    """Returns the objects that save the state of optimizers selected by `which`, each with its name in backups.

    The order is that of Keras' saver. Saving an object gathers its divided state from all processes, so all processes
    must save the objects in this order.
    """
    chosen = [(i, optimizer) for i, optimizer in enumerate(optimizers_of(model)) if which(optimizer)]
    if len(chosen) > 1:
        order = _VisitOrder()
        saving_lib._save_state(model, NoStore(), None, "", order)
        chosen.sort(key=lambda each: order.place_of(each[1]))
    found = []
    for i, optimizer in chosen:
        prefix = "" if optimizer is getattr(model, "optimizer", None) else f"optimizer{i}_"
        own = optimizer.wrapper_state if isinstance(optimizer, OptimizerWrapper) else None
        found += [(optimizer, f"{prefix}state"), *([] if own is None else [(own, f"{prefix}wrapper_state")])]
    return found


class NoStore(saving_lib.H5IOStore):
    """Makes Keras' saver visit the objects of a model and save nothing. The saver requires this base class."""

    def __init__(self) -> None:
        pass

    def __bool__(self) -> bool:
        return False


class _VisitOrder:
    """A set that Keras' saver uses for visited objects. It records the order of the visits."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._places

    def add(self, key: int) -> None:
        self._places[key] = len(self._places)

    def place_of(self, thing: Any) -> int:
        return self._places.get(id(thing), len(self._places))


class NullStore:
    """A store that discards values, for a process that only takes part in gathering."""

    def __setitem__(self, key: str, value: Any) -> None:
        pass


class _DelayedErrors:
    """Wraps a store to keep its first error and ignore later values, so all processes can finish gathering."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.problem: Exception | None = None

    def __setitem__(self, key: str, value: Any) -> None:
        if self.problem is None:
            try:
                self._store[key] = value
            except Exception as error:
                self.problem = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@contextlib.contextmanager
def gather_despite_errors(model: Any) -> Iterator[None]:
    """Makes the block, which saves the model, gather all state even after an error, so other processes do not hang."""
    parts = [part for part, _ in saved_together(model)]
    if not parts:
        yield
        return
    waiting = {id(part): part.save_own_variables for part in parts}

    def gather(part: Any, store: Any) -> None:
        real = waiting.pop(id(part))
        delayed = _DelayedErrors(store)
        try:
            with communicating(model):
                real(delayed)
        except Exception:
            waiting.clear()  # all processes have failed, so gather nothing more
            raise
        if delayed.problem is not None:
            raise delayed.problem

    # Use `gather` as `save_own_variables` in this block. `object.__setattr__` avoids Keras' tracking of attributes.
    for part in parts:
        object.__setattr__(part, "save_own_variables", functools.partial(gather, part))
    try:
        yield
    finally:
        for part in parts:
            object.__delattr__(part, "save_own_variables")
        for part in parts:
            if id(part) in waiting:
                gather(part, NullStore())  # nothing is saved, but all processes must gather


# -- errors and values across processes ------------------------------------------------------------------------------


def raise_together(problem: Exception | None) -> None:
    """Raises an error on every process if any process passes one. All processes must call this function.

    A process that passes an error raises that error. Other processes raise the error of the lowest rank that has one.
    """
    own = None if problem is None else (type(problem).__name__, _words(problem))
    gathered = processes.gather_objects(own)
    if problem is not None:
        raise problem
    first = next((each for each in gathered if each is not None), None)
    if first is not None:
        raise _error(*first)


@contextlib.contextmanager
def raising_together() -> Iterator[None]:
    """Raises an error of this block on every process. All processes must run the block."""
    problem = None
    try:
        yield
    except Exception as error:
        problem = error
    raise_together(problem)


def from_rank_0(function: Callable[[], Any]) -> Any:
    """Calls `function` on rank 0. Returns the result, or raises the error, on every process."""
    result, problem = None, None
    if is_chief():
        try:
            result = function()
        except Exception as error:
            problem = error
    own = None if problem is None else (type(problem).__name__, _words(problem))
    result, found = processes.gather_objects((result, own))[0]
    if problem is not None:
        raise problem
    if found is not None:
        raise _error(*found)
    return result


def _words(problem: Exception) -> str:
    return str(problem.args[0]) if isinstance(problem, KeyError) and problem.args else str(problem)


def _error(kind: str, words: str) -> Exception:
    known = getattr(builtins, kind, None)
    other = RuntimeError(f"{kind}: {words}" if words else kind)
    try:
        return known(words) if issubclass(known, Exception) else other  # type: ignore
    except TypeError:  # the class is not built in, or needs more arguments
        return other


def is_chief() -> bool:
    """Whether this process is rank 0, which writes files."""
    return processes.process()[1] == 0


def communicating(model: Any) -> contextlib.AbstractContextManager[Any]:
    """Returns a scope in which processes can communicate, even if the model's `data_parallel` block has ended."""
    variables = model.variables if isinstance(model, keras.Model) else []
    return placement.colocate_with(variables[0]) if variables else contextlib.nullcontext()


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
