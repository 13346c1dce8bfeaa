"""Saving as a call of all processes: rank 0 writes, and every file is whole at any moment.

Hides who has to be there: a state of which each replica holds a part needs all of them, whatever becomes of the file,
so if rank 0 fails it keeps taking part, and reports its error when all are through.

Private names of Keras touched here (a test holds each of them):
    `ModelCheckpoint._save_model` - writes a checkpoint; called with what `_get_file_path` and `_should_save_model` get.
    `ModelCheckpoint._get_file_path`, `_should_save_model` - where to, and whether.
    `keras.src.saving.saving_lib._save_state` - goes through all that is saved, in order; without a store it only goes.
    `keras.src.saving.saving_lib.H5IOStore` - a kind of store.
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
from keras_shardopt.checkpoint.atomic_file import Unfinished
from keras_shardopt.numerics import Optimizer
from keras_shardopt.wrapping.chain import descendants
from keras_shardopt.wrapping.wrapper import OptimizerWrapper

_MODEL_SUFFIXES = (".keras", ".h5", ".hdf5")
_WEIGHTS_SUFFIXES = (".weights.h5",)


def save_model(model: Any, filepath: str | os.PathLike[str], overwrite: bool = True) -> None:
    """`model.save(filepath)` for several processes, with a file that is whole at any moment.

    Every process calls it, at the same point of the program. Sharded state is gathered, and rank 0 writes. All return
    when the file is there; if writing fails, all raise rank 0's error. The file appears in one step: it is written
    next to `filepath`, flushed to disk (`fsync`) and renamed, so a program that is killed at any moment leaves the old
    file or the new one, each whole. Remains of a killed program (a folder `.keras_shardopt-*.unfinished`) are removed
    by the next save into the same folder.

    With one process it is `model.save` with a file that is whole at any moment. `keras.saving.load_model` reads the
    file, with any number of replicas and on any backend.

    The other processes wait while rank 0 writes, so `data_parallel(timeout=...)` must be longer than that takes. After
    `close()` of the scope they return at once.

    Args:
        model: a `keras.Model`.
        filepath: str or path, ending in ".keras", or in ".h5" for Keras' older format. Only rank 0's
            counts, and only rank 0 needs to see the file system. Its folder must exist.
        overwrite: bool. False makes a file that is there already an error; Keras would ask at the terminal.

    Raises:
        TypeError: if `model` is not a `keras.Model`, `filepath` not a path, or `overwrite` not a bool.
        ValueError: if `filepath` is not local or has another ending; if Keras cannot store the model.
        FileExistsError: if the file is there already and `overwrite` is False.
        OSError: if the file cannot be written. The one before is still there.

    All of them are raised on every process.

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
        `keras.saving.save_model`. It also writes folders (`zipped=False`) and to other machines, which cannot be
        replaced in one step.
    """
    _save(model, filepath, overwrite, _MODEL_SUFFIXES, "save")


def save_weights(model: Any, filepath: str | os.PathLike[str], overwrite: bool = True) -> None:
    """`model.save_weights(filepath)` for several processes, with a file that is whole at any moment.

    Weights and optimizer state, without the architecture. Otherwise see `save_model`.

    Args:
        model: a `keras.Model` that is built.
        filepath: str or path, ending in ".weights.h5". Only rank 0's counts.
        overwrite: bool. False makes a file that is there already an error.

    Raises:
        TypeError: if `model` is not a `keras.Model`, `filepath` not a path, or `overwrite` not a bool.
        ValueError: if `filepath` is not local or has another ending, or the model is not built.
        FileExistsError: if the file is there already and `overwrite` is False.
        OSError: if the file cannot be written. The one before is still there.

    All of them are raised on every process.

    Example:
        >>> import keras, os, tempfile, keras_shardopt as ks
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> path = os.path.join(tempfile.mkdtemp(), "model.weights.h5")
        >>> ks.save_weights(model, path)
        >>> model.load_weights(path)

    References:
        `keras.Model.save_weights`. Its `max_shard_size` makes several files, which cannot be replaced in one step.
    """
    _save(model, filepath, overwrite, _WEIGHTS_SUFFIXES, "save_weights")


class ModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """`keras.callbacks.ModelCheckpoint` for several processes, with files that are whole at any moment.

    Saves with `save_model` or `save_weights`: all processes take part, rank 0 writes, and all continue when the file
    is there. Rank 0 decides by its logs, for all of them, whether to save and under which name; those of
    a prepared model are of all processes. The folder is made if it is not there.

    Every process needs this callback, with the same `save_freq`.

    Args:
        filepath: str or path, in which `{epoch}`, `{batch}` and the names of logs are filled in, such as
            "{epoch:02d}-{val_loss:.2f}.keras". Ends in ".keras" or ".h5", or in ".weights.h5" if `save_weights_only`.
        monitor: str. The name of the value to watch.
        verbose: 0 or 1. 1 lets rank 0 print what it does.
        save_best_only: bool. Only save when the value that is watched is better than ever before.
        save_weights_only: bool. Use `save_weights`, or else `save_model`.
        mode: "auto", "min" or "max". What is better; "auto" goes by the name.
        save_freq: "epoch", or int >= 1: after how many batches.
        initial_value_threshold: float or None. What the value must be better than at first.

    Raises:
        TypeError: if `filepath` is not a path, `monitor` not a str, or another argument not what it should be.
        ValueError: if `filepath` is not local or has another ending, or an argument is out of range.
        OSError: from training, on every process, if a file cannot be written.
        KeyError: from training, on every process, if `filepath` names a log that is not there.

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
        `keras.callbacks.ModelCheckpoint`, which lets every process write the same file, each by its own logs.
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
        path = _local_path(filepath, _WEIGHTS_SUFFIXES if save_weights_only else _MODEL_SUFFIXES[:2])
        if not isinstance(monitor, str):
            raise TypeError(f"`monitor` must be the name of a logged value. Received: monitor={monitor!r}")
        check.one_of("mode", mode, ("auto", "min", "max"))
        if not isinstance(save_freq, str):
            save_freq = check.integer("save_freq", save_freq, fix='Give it in batches, or "epoch".')
        elif save_freq != "epoch":
            raise ValueError(f'`save_freq` must be "epoch" or a number of batches. Received: save_freq={save_freq!r}')
        if initial_value_threshold is not None:
            initial_value_threshold = check.real("initial_value_threshold", initial_value_threshold, finite=False)
        # A bool is a fair way to say this one.
        verbose = int(verbose) if isinstance(verbose, bool) else check.integer("verbose", verbose, at_least=0)
        super().__init__(
            path, monitor, verbose, save_best_only, save_weights_only, mode, save_freq, initial_value_threshold
        )

    def _save_model(self, epoch: int, batch: int | None, logs: dict[str, Any] | None) -> None:
        # Read once, on every process alike: on JAX this takes the state out of the training step.
        model = self.model
        with _among(model):
            # Nothing from nobody: a process of a job whose processes do not reach each other (any more).
            path, self.best = from_chief(lambda: self._decided(epoch, batch, logs or {})) or (None, self.best)
        if path is None:
            return
        (save_weights if self.save_weights_only else save_model)(model, path)
        if self.verbose > 0 and is_chief():
            print(f"\nEpoch {epoch + 1}: finished saving model to {path}")

    def _decided(self, epoch: int, batch: int | None, logs: dict[str, Any]) -> tuple[str | None, Any]:
        """The file to write (None for nothing), and the best value so far."""
        path = self._get_file_path(epoch, batch, logs)
        wanted = self._should_save_model(epoch, batch, logs, path)
        if wanted:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        # A plain number: tensors of logs would not travel.
        best = self.best if self.best is None else float(keras.ops.convert_to_numpy(self.best))
        return path if wanted else None, best


def _save(model: Any, filepath: Any, overwrite: Any, suffixes: tuple[str, ...], method: str) -> None:
    """A barrier before anything is gathered, and one when the file is there; in between all gather alike."""
    file: Unfinished | None = None
    problem: Exception | None = None
    try:
        _check_model(model)
        check.flag("overwrite", overwrite)
        if is_chief():
            path = _local_path(filepath, suffixes)
            in_parts = needs_all(model) or _is_read_together(model)
            if in_parts and method == "save" and not path.endswith(".keras"):
                raise ValueError(
                    "`filepath` must end in '.keras' where replicas hold parts of what is saved, of which Keras' older "
                    f"format knows nothing. Received: filepath={filepath!r}"
                )
            if not overwrite and os.path.exists(path):
                raise FileExistsError(
                    f"`filepath` must not be there yet with `overwrite=False`. Received: filepath={filepath!r}"
                )
            file = Unfinished(path)
    except Exception as error:
        problem = error
    try:
        with _among(model):
            raise_together(problem)
            _before_look(model)
        try:
            _take_part(model, method, None if file is None else file.path)
            if file is not None:
                file.finish()
        except Exception as error:
            problem = error
        with _among(model):
            raise_together(problem)
    finally:
        if file is not None:
            file.discard()


def _before_look(model: Any) -> None:
    """Tell the optimizers that somebody reads weights. All processes call it together."""
    for optimizer in optimizers_of(model):
        for part in [optimizer, *descendants(optimizer)]:
            if isinstance(part, OptimizerWrapper) and hasattr(part, "pipeline"):
                part.pipeline.before_look()


# Where a variable can be one whose value all processes find together.
_together = for_backend({"tensorflow": "keras_shardopt.backends.tensorflow.placement"})


def _is_read_together(model: Any) -> bool:
    return _together is not None and bool(_together.reading_is_collective(model.variables))


def _take_part(model: Any, method: str, path: str | None) -> None:
    """What each process has to do for a file at `path`, which is rank 0's; None on the others."""
    if _is_read_together(model):
        # All read in the order in which Keras saves, and into a file of their own: nothing that happens to rank 0's
        # can come in between.
        with tempfile.TemporaryDirectory() as folder:
            own = os.path.join(folder, "model.weights.h5" if method == "save_weights" else "model.keras")
            with gather_despite_errors(model):
                _write_alone(model, method, own)
            if path is not None:
                _copy(own, path)
    elif path is not None:
        with gather_despite_errors(model):
            _write_alone(model, method, path)
    else:
        join_gather(model)


def _write_alone(model: Any, method: str, path: str) -> None:
    """Lets Keras write a file while other processes do something else."""
    save = getattr(model.__class__, method)  # not what a prepared model has in its place
    if processes.process()[0] == 1:
        save(model, path)
    else:
        placement.outside_strategy(lambda: save(model, path))


def write_apart(model: Any, save: Callable[..., None], filepath: Any, *args: Any, **kwargs: Any) -> None:
    """Keras' `save` or `save_weights` on one of several processes that perhaps all write this file, or perhaps not.

    Each writes a file of its own, which takes its name in one step. What cannot be replaced so is left to Keras.
    """
    path = os.fspath(filepath) if isinstance(filepath, (str, os.PathLike)) else None
    is_file = isinstance(path, str) and "://" not in path and path.endswith((*_MODEL_SUFFIXES, *_WEIGHTS_SUFFIXES))
    if processes.process()[0] == 1 or not is_file or args or kwargs or os.path.isdir(filepath):
        save(filepath, *args, **kwargs)
        return
    file = Unfinished(str(path))
    try:
        # Outside, as Keras makes an optimizer to see what it has: on JAX all processes would have to.
        with gather_despite_errors(model):
            placement.outside_strategy(lambda: save(file.path))
        file.finish()
    finally:
        file.discard()


def join_gather(model: Any) -> None:
    """What a process that writes nothing does while another one writes `gather_despite_errors`."""
    if needs_all(model):
        with _among(model):
            for part, _ in saved_together(model):
                part.save_own_variables(NullStore())


def _copy(source: str, target: str) -> None:
    with open(source, "rb") as read, open(target, "wb") as written:
        while block := read.read(2**24):
            written.write(block)


def needs_all(model: Any) -> bool:
    """Whether every process must be there when the state of one of the model's optimizers is saved."""
    return any(needs_all_processes(optimizer) for optimizer in optimizers_of(model))


def needs_all_processes(optimizer: Optimizer) -> bool:
    """Whether every process must be there when this optimizer's state is saved."""
    chain = [optimizer, *descendants(optimizer)]
    return any(o._saving_needs_all_replicas for o in chain if isinstance(o, OptimizerWrapper))


def saved_together(model: Any, which: Callable[[Any], bool] = needs_all_processes) -> list[tuple[Any, str]]:
    """What writes and reads the state of the optimizers of a model that are chosen, in Keras' order, and names.

    Each of the state of which replicas hold a part needs all processes, so all must go through them in this order.
    """
    chosen = [(i, optimizer) for i, optimizer in enumerate(optimizers_of(model)) if which(optimizer)]
    if len(chosen) > 1:
        order = _Order()
        saving_lib._save_state(model, NoStore(), None, "", order)
        chosen.sort(key=lambda each: order.place_of(each[1]))
    found = []
    for i, optimizer in chosen:
        prefix = "" if optimizer is getattr(model, "optimizer", None) else f"optimizer{i}_"
        own = optimizer.wrapper_state if isinstance(optimizer, OptimizerWrapper) else None
        found += [(optimizer, f"{prefix}state"), *([] if own is None else [(own, f"{prefix}wrapper_state")])]
    return found


class NoStore(saving_lib.H5IOStore):
    """Lets the saver go through a model and save nothing. Keras asks for a store of its own kind."""

    def __init__(self) -> None:
        pass

    def __bool__(self) -> bool:
        return False


class _Order:
    """Takes the place of the set of what the saver has been to, and remembers the order."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._places

    def add(self, key: int) -> None:
        self._places[key] = len(self._places)

    def place_of(self, thing: Any) -> int:
        return self._places.get(id(thing), len(self._places))


class NullStore:
    """A store for a process that takes part in saving and writes nothing."""

    def __setitem__(self, key: str, value: Any) -> None:
        pass


class _Steady:
    """A store that fails when everything has been given to it, and not before."""

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
    """A block in which state in parts is gathered once, and to the end, whatever happens to the file."""
    parts = [part for part, _ in saved_together(model)]
    if not parts:
        yield
        return
    waiting = {id(part): part.save_own_variables for part in parts}

    def gather(part: Any, store: Any) -> None:
        real = waiting.pop(id(part))
        steady = _Steady(store)
        try:
            with _among(model):
                real(steady)
        except Exception:
            waiting.clear()  # the others have failed here, too
            raise
        if steady.problem is not None:
            raise steady.problem

    # On the instances, past Keras' attribute tracking, for the time of the block.
    for part in parts:
        object.__setattr__(part, "save_own_variables", functools.partial(gather, part))
    try:
        yield
    finally:
        for part in parts:
            object.__delattr__(part, "save_own_variables")
        for part in parts:
            if id(part) in waiting:
                gather(part, NullStore())  # the others have begun already


# -- what processes exchange -----------------------------------------------------------------------------------------


def raise_together(problem: Exception | None) -> None:
    """Raises on every process if there is a problem on one. All call it together.

    A process with a problem raises it; the others raise the first process's, with the same words.
    """
    mine = None if problem is None else (type(problem).__name__, _words(problem))
    everyones = processes.gather_objects(mine)
    if problem is not None:
        raise problem
    found = next((theirs for theirs in everyones if theirs is not None), None)
    if found is not None:
        raise _error(*found)


@contextlib.contextmanager
def raising_together() -> Iterator[None]:
    """Raises on every process what one raises in this block."""
    problem = None
    try:
        yield
    except Exception as error:
        problem = error
    raise_together(problem)


def from_chief(function: Callable[[], Any]) -> Any:
    """What `function()` returns on rank 0, or the error that it raises there, on every process."""
    result, problem = None, None
    if is_chief():
        try:
            result = function()
        except Exception as error:
            problem = error
    mine = None if problem is None else (type(problem).__name__, _words(problem))
    result, found = processes.gather_objects((result, mine))[0]
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
    except TypeError:  # no name of a class, or one that wants more than words
        return other


def is_chief() -> bool:
    """Whether this process is the one that writes."""
    return processes.process()[1] == 0


def _among(model: Any) -> contextlib.AbstractContextManager[Any]:
    """A scope in which processes can reach each other, also outside the one in which the model was made."""
    variables = model.variables if isinstance(model, keras.Model) else []
    return placement.colocate_with(variables[0]) if variables else contextlib.nullcontext()


# -- arguments -------------------------------------------------------------------------------------------------------


def _check_model(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(f"`model` must be a `keras.Model`. Received: model={model!r} (of type {type(model).__name__})")


def _local_path(filepath: Any, suffixes: tuple[str, ...]) -> str:
    if not isinstance(filepath, (str, os.PathLike)):
        raise TypeError(f"`filepath` must be a path. Received: filepath={filepath!r}")
    path = os.fspath(filepath)
    if not isinstance(path, str) or "://" in path or "\0" in path:
        raise ValueError(f"`filepath` must be the path of a local file. Received: filepath={filepath!r}")
    if not path.endswith(suffixes):
        endings = " or ".join(repr(suffix) for suffix in suffixes[:2])
        raise ValueError(f"`filepath` must end in {endings}. Received: filepath={filepath!r}")
    return path
