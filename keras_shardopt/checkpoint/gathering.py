"""Gathers optimizer state that is divided among processes, while Keras' saver writes a file on one of them.

All processes gather the state of the same objects, in the order of Keras' saver. If the process that writes has an
error, the gathering still runs to its end, so no process waits for it.

Private names of Keras touched here (a test checks that each exists):
    `keras.src.saving.saving_lib._save_state` - visits all objects that a file would hold, in order.
    `keras.src.saving.saving_lib.H5IOStore` - the class of stores that `_save_state` accepts.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from keras.src.saving import saving_lib

from keras_shardopt.backends.models import optimizers_of
from keras_shardopt.checkpoint.together import communicating
from keras_shardopt.numerics import Optimizer
from keras_shardopt.wrapping.chain import chain_of
from keras_shardopt.wrapping.wrapper import OptimizerWrapper


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
        chosen.sort(key=lambda each: order.get(id(each[1]), len(order)))
    found = []
    for i, optimizer in chosen:
        prefix = "" if optimizer is getattr(model, "optimizer", None) else f"optimizer{i}_"
        own = optimizer.wrapper_state if isinstance(optimizer, OptimizerWrapper) else None
        found += [(optimizer, f"{prefix}state"), *([] if own is None else [(own, f"{prefix}wrapper_state")])]
    return found


def join_gather(model: Any) -> None:
    """Sends this process's part of divided optimizer state to the process that writes the file."""
    if needs_all(model):
        with communicating(model):
            for part, _ in saved_together(model):
                part.save_own_variables(NullStore())


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


class NoStore(saving_lib.H5IOStore):
    """Makes Keras' saver visit the objects of a model and save nothing. The saver requires this base class."""

    def __init__(self) -> None:
        pass

    def __bool__(self) -> bool:
        return False


class _VisitOrder(dict[int, int]):
    """A set for the ids of objects that Keras' saver visits. It also has the place of each in the order of visits."""

    def add(self, key: int) -> None:
        self[key] = len(self)


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
