"""Random numbers with which data is drawn: those of process 0, on every process.

Private names of Keras touched here (a test holds them):
    `PyDatasetAdapter.enqueuer`, and its `start`, `is_running`, `run_thread`, `shuffle` and `indices` - the workers of a
        `PyDataset`, the thread that gives them work, and the order of batches that it has drawn.
"""

from __future__ import annotations

import random
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from keras_shardopt.backends.active import processes

_num_calls = 0
"""How many calls of `fit`, `evaluate` and `predict`, of all processes together, have ended."""


def note_end_of_call() -> None:
    """Says that all processes have ended a call that has drawn, perhaps: those around it go on behind that."""
    global _num_calls
    _num_calls += 1


class SharedDraws:
    """Lets data be drawn alike on all processes, each of which has global random numbers of its own.

    Inside `drawing()`, and nowhere else, Python's, NumPy's and PyTorch's global random numbers are those that process 0
    had when the epoch began. So the order of rows is that which one process draws. A process whose own numbers were the
    same goes on behind what was drawn, as one process does; others get their own back.
    """

    def __init__(self) -> None:
        self._states: dict[str, Any] | None = None
        self._is_drawing = False
        self._num_calls = 0

    def forget(self) -> None:
        """Lets the next epoch begin with what process 0 has then."""
        self._states = None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """A block in which data is drawn. All processes enter the first one of an epoch together; it may be nested."""
        if self._is_drawing:
            yield
            return
        if self._states is None or self._num_calls != _num_calls:
            self._states, self._num_calls = _take_from_first(), _num_calls
        before = self._states
        own = {name: _GENERATORS[name][0]() for name in before}
        _set(before)
        self._is_drawing = True
        try:
            yield
        finally:
            self._is_drawing = False
            self._states = {name: _GENERATORS[name][0]() for name in before}
            _set({name: self._states[name] if own[name] == before[name] else own[name] for name in before})


def draw_before_going_on(adapter: Any) -> None:
    """Lets who starts the workers of a `PyDataset` wait until their thread has drawn the order of batches.

    Keras may go on with a batch left over, and leave the block in which data is drawn, while the thread draws.
    """
    enqueuer = getattr(adapter, "enqueuer", None)
    if enqueuer is None or not enqueuer.shuffle or adapter.num_batches is None:
        return
    start = enqueuer.start

    def start_and_wait(*args: Any, **kwargs: Any) -> None:
        if enqueuer.is_running():
            return
        enqueuer.indices = None
        start(*args, **kwargs)  # the epoch, from Keras 3.16 on
        while enqueuer.indices is None and enqueuer.run_thread.is_alive():
            time.sleep(0.0005)

    enqueuer.start = start_and_wait


def _take_from_first() -> dict[str, Any]:
    """The states of process 0, of generators whose numbers differ between processes, or will."""
    states = {name: state for name, (get, _) in _GENERATORS.items() if (state := get()) is not None}
    # PyTorch's differs from the first step on, as dropout without a seed draws from it.
    of_torch = states.pop("torch", None)
    prints = {name: zlib.crc32(repr(state).encode()) for name, state in states.items()}
    is_first = processes.process()[1] == 0
    everyones = processes.gather_objects((prints, of_torch if is_first else None))
    given = everyones[0][1]  # none where some program does not use PyTorch
    taken: dict[str, Any] = {} if of_torch is None or given is None else {"torch": given}
    names = [name for name in states if any(each[name] != everyones[0][0][name] for each, _ in everyones)]
    if names:
        taken |= processes.gather_objects({name: states[name] for name in names} if is_first else None)[0]
    return taken


def _set(states: dict[str, Any]) -> None:
    for name, state in states.items():
        _GENERATORS[name][1](state)


def _numpy_state() -> Any:
    kind, keys, *others = np.random.get_state()
    return kind, np.asarray(keys).tobytes(), *others


def _set_numpy_state(state: Any) -> None:
    kind, keys, *others = state
    np.random.set_state((kind, np.frombuffer(keys, "uint32"), *others))


def _torch_state() -> bytes | None:
    torch = sys.modules.get("torch")
    return None if torch is None else torch.get_rng_state().numpy().tobytes()


def _set_torch_state(state: bytes) -> None:
    torch = sys.modules["torch"]
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


_GENERATORS: dict[str, tuple[Any, Any]] = {
    "python": (random.getstate, random.setstate),
    "numpy": (_numpy_state, _set_numpy_state),
    "torch": (_torch_state, _set_torch_state),
}
"""What global random numbers there are: how their state is taken, and put back."""
