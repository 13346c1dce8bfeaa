"""Processes that succeed or fail together: each error, and each value of rank 0, reaches all of them."""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_shardopt.backends.active import placement, processes


def raise_together(problem: Exception | None) -> None:
    """Raises an error on every process if any process passes one. All processes must call this function.

    A process that passes an error raises that error. Other processes raise the error of the lowest rank that has one.
    """
    gathered = processes.gather_objects(_described(problem))
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
    result, found = processes.gather_objects((result, _described(problem)))[0]
    if problem is not None:
        raise problem
    if found is not None:
        raise _error(*found)
    return result


def _described(problem: Exception | None) -> tuple[str, str] | None:
    """Return the class name and the text of an error, to send to other processes."""
    if problem is None:
        return None
    words = str(problem.args[0]) if isinstance(problem, KeyError) and problem.args else str(problem)
    return type(problem).__name__, words


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
