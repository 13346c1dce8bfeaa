"""Makes all processes draw the order of the data with the random numbers of process 0.

Private names of Keras touched here (a test checks that each exists):
    `PyDatasetAdapter.enqueuer`, and its `start`, `is_running`, `run_thread`, `shuffle` and `indices` - the workers that
        load batches of a `PyDataset`, the thread that feeds them, and the order of batches that this thread draws.
"""

from __future__ import annotations

import random
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

from keras_shardopt.backends.active import processes

_num_calls = 0
"""The number of `fit`, `evaluate` and `predict` calls that have ended, the same on all processes."""


def count_call() -> None:
    """Counts that a `fit`, `evaluate` or `predict` call has ended on all processes.

    If a callback of `fit` makes such a call, processes may draw different random numbers in it. So after the call, that
    `fit` takes the random state of process 0 again.
    """
    global _num_calls
    _num_calls += 1


class SharedDraws:
    """Makes all processes draw the same order of data, although each has its own global random numbers.

    Inside `drawing()`, the global random numbers of Python, NumPy and PyTorch begin with the state that process 0 had
    at the start of the epoch. So the rows have the order that process 0 draws. After the block, a process that had the
    same state as process 0 keeps the state after the draws, as with one process. Other processes restore their states.

    With `is_shared=False`, each process draws its own order, and `drawing()` has no effect.
    """

    def __init__(self, is_shared: bool = True) -> None:
        self._is_shared = is_shared
        self._states: dict[str, Any] | None = None
        self._is_drawing = False
        self._num_calls = 0

    def forget(self) -> None:
        """Drops the states of this epoch, so the next `drawing()` takes the current states of process 0."""
        self._states = None

    def drawing(self, draws: bool = True) -> AbstractContextManager[None]:
        """Opens a block that draws the order of data. All processes must enter the first block of an epoch together.

        With `draws=False`, the block has no effect.
        """
        is_off = self._is_drawing or not (self._is_shared and draws)
        return nullcontext() if is_off else self._drawing_as_process_0()

    @contextmanager
    def _drawing_as_process_0(self) -> Iterator[None]:
        if self._states is None or self._num_calls != _num_calls:
            self._states, self._num_calls = _states_of_process_0(), _num_calls
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


def wait_for_batch_order(adapter: Any) -> None:
    """Makes the start of a `PyDataset`'s workers wait until their thread has drawn the order of batches.

    Keras starts the workers in `SharedDraws.drawing()`. After that block, the thread's draw would differ by process.
    """
    enqueuer = getattr(adapter, "enqueuer", None)
    if enqueuer is None or not enqueuer.shuffle or adapter.num_batches is None:
        return
    start = enqueuer.start

    def start_and_wait(*args: Any, **kwargs: Any) -> None:
        if enqueuer.is_running():
            return
        enqueuer.indices = None
        start(*args, **kwargs)  # from Keras 3.16 on, `start` has the epoch as an argument
        while enqueuer.indices is None and enqueuer.run_thread.is_alive():
            time.sleep(0.0005)

    enqueuer.start = start_and_wait


def _states_of_process_0() -> dict[str, Any]:
    """Returns process 0's states of those global random generators that may differ between processes, by name."""
    states = {name: state for name, (get, _) in _GENERATORS.items() if (state := get()) is not None}
    # Always send PyTorch's state, because it differs between processes once unseeded dropout has drawn from it.
    of_torch = states.pop("torch", None)
    prints = {name: zlib.crc32(repr(state).encode()) for name, state in states.items()}
    is_first = processes.process()[1] == 0
    everyones = processes.gather_objects((prints, of_torch if is_first else None))
    given = everyones[0][1]  # None if process 0 does not use PyTorch
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
"""For each library with global random numbers, the functions that read and set their state."""
