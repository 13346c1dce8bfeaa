"""The processes of a job, and the Python objects that they exchange on the host, outside training steps.

Private names of Keras touched here (a test checks that each exists):
    `keras.src.utils.rng_utils.tf` - the TensorFlow that `keras.utils.set_random_seed` imports and seeds.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import datetime
import pickle
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from keras.src.utils import rng_utils


@dataclasses.dataclass(frozen=True)
class World:
    """The replicas and processes of this job."""

    num_replicas: int = 1
    replica_id: int = 0
    """The first replica that this process runs. On PyTorch, the only one."""

    is_chief: bool = True
    """Whether this process prints and writes files."""

    num_processes: int = 1
    process_id: int = 0
    devices: Sequence[str] = ()
    """The devices of this process, one per replica, such as "cuda:0"."""

    persists: bool = False
    """Whether models made in the `with` block of `data_parallel()` still need this setup after the block."""

    forget: Callable[[], None] = lambda: None
    """Resets the recorded number of replicas. Called by `close()` of `data_parallel()`, but not when its block ends."""


@contextlib.contextmanager
def seeding_without_tensorflow() -> Iterator[None]:
    """Keep `keras.utils.set_random_seed` from importing TensorFlow, unless the program has imported it already."""
    in_keras = rng_utils.tf
    if "tensorflow" not in sys.modules:
        rng_utils.tf = types.SimpleNamespace(available=False)
    try:
        yield
    finally:
        rng_utils.tf = in_keras


def different_calls_message(calls: dict[int, str], noun: str, more: str = "") -> str:
    """Return the error message for different `calls` of processes or ranks (`noun`). `more` ends the list of calls."""
    received = ", ".join(f"{noun} {number} {call}" for number, call in sorted(calls.items()))
    return (
        f"All {plural(noun)} must make the same calls, with the same `epochs`, callbacks and validation, and stop "
        f"together. All must pass the same models to `keras_shardopt.prepare`. Received: {received}{more}. A callback "
        "must use the logs of an epoch to decide whether to stop, because `prepare` makes these logs equal on all "
        f"{plural(noun)}."
    )


def plural(noun: str) -> str:
    """Return the plural of "process" or "rank"."""
    return f"{noun}{'es' if noun.endswith('s') else 's'}"


def check_same_calls(
    kinds: Iterable[int], call: str, gather_letters: Callable[[list[int]], list[list[int]]], noun: str
) -> None:
    """Raise ValueError on all processes if they make different calls. `kinds` has a hash of each process's call.

    `call` and `noun` are words for the error message: this process's call, such as "saves a model", and "process" or
    "rank". `gather_letters` gathers equal-length lists of character codes from all processes.
    """
    if len(set(kinds)) > 1:
        letters = gather_letters(list(call.encode()[:_NUM_LETTERS].ljust(_NUM_LETTERS)))
        calls = [bytes(row).decode(errors="replace").strip() for row in letters]
        raise ValueError(different_calls_message(dict(enumerate(calls)), noun))


_NUM_LETTERS = 120


def gather_pickled(
    value: Any,
    gather: Callable[[np.ndarray], np.ndarray],
    gather_length: Callable[[int], list[int]],
    in_thread: bool = True,
) -> list[Any]:
    """Gather picklable objects from all processes.

    `gather_length` gathers the number of bytes of each process's object, and `gather` the bytes, in equal-sized arrays.
    With `in_thread`, they run in a new thread, because this thread can be inside a replica context or a trace.
    """

    def gathered() -> list[Any]:
        mine = np.frombuffer(pickle.dumps(value), "uint8")
        lengths = gather_length(len(mine))
        padded = np.zeros(max(lengths), "uint8")
        padded[: len(mine)] = mine
        rows = [np.asarray(row).astype("uint8", copy=False) for row in gather(padded)]
        return [pickle.loads(row[:length].tobytes()) for row, length in zip(rows, lengths)]

    if not in_thread:
        return gathered()
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(gathered).result()


num_barriers: dict[str, int] = {}
"""The number of completed barriers for each purpose."""


class MissingCallError(RuntimeError):
    """Raised if some processes do not reach a barrier in time."""


def wait_in(store: Any, process: tuple[int, int], noun: str, purpose: str, seconds: float, advice: str) -> None:
    """Wait until all processes have made this call. They communicate only through a key-value store.

    `store` has the methods `set`, `check` and `delete_key` of a `torch.distributed.Store`. `process` is (number of
    processes, this process's index). `noun` ("process" or "rank"), `purpose` and `advice` are for the error message.

    Raises:
        MissingCallError: if some processes do not arrive within `seconds`. This process may call again.
    """
    (size, mine), number, limit = process, num_barriers.get(purpose, 0), time.monotonic() + seconds
    keys = [f"keras_shardopt/barrier/{purpose}/{number}/{other}" for other in range(size)]
    store.set(keys[mine], "1")
    missing = [other for other in range(size) if other != mine]
    while missing := [other for other in missing if not store.check([keys[other]])]:
        if time.monotonic() > limit:
            store.delete_key(keys[mine])
            raise MissingCallError(
                f"All {plural(noun)} must {purpose} together. Received: no call on "
                f"{noun if len(missing) == 1 else plural(noun)} {', '.join(map(str, missing))} within {seconds:g} s "
                f"after {noun} {mine} called. {advice}"
            )
        time.sleep(0.005)
    num_barriers[purpose] = number + 1


class Processes:
    """The processes of a job, on the host. The defaults fit one process with one replica.

    A new backend with several replicas implements `open`, `num_replicas` and `versions`. If replicas run in several
    processes, it also implements `process`, `gather_objects` (using `gather_pickled`) and `barrier` (using `wait_in`).
    It then sets two facts: `creates_variables_collectively` and `needs_initial_broadcast`.
    """

    needs_initial_broadcast: bool = False
    """Whether processes can initialize different weights. `Placement.broadcast_state` then makes them equal."""

    def creates_variables_collectively(self) -> bool:
        """Return whether processes communicate to create a variable. Processes with different optimizers then hang."""
        return False

    def num_replicas(self) -> int:
        """Return the number of replicas of a training step that is built in the current scope."""
        return 1

    def barrier(self, purpose: str, seconds: float, advice: str) -> None:
        """Wait until all processes have made this call with this purpose. After a timeout, a process may call again.

        Raises:
            RuntimeError: with `advice`, if a process does not arrive within `seconds`.
        """
        del purpose, seconds, advice

    def versions(self) -> dict[str, str]:
        """Return the framework's version, keyed by the framework's name. All processes must have the same version."""
        return {}

    def process(self) -> tuple[int, int]:
        """Return the number of processes that load data, and this process's index."""
        return 1, 0

    @contextlib.contextmanager
    def open(self, num_replicas: int | None, timeout: datetime.timedelta | None = None) -> Iterator[World]:
        """Set up replicas, and restore the earlier setup on exit. See `keras_shardopt.data_parallel`."""
        if num_replicas not in (None, 1):
            raise ValueError(
                "This Keras backend runs one replica only. "
                f"Received: num_replicas={num_replicas}. Use the tensorflow, jax or torch backend."
            )
        yield World()

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the values of all processes, ordered by process. All processes must call this together."""
        return [value]
