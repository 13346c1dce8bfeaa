"""The control plane: the processes of a program, and what they exchange on the host.

Private names of Keras touched here (a test holds each of them):
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
    """Which replicas and processes this program consists of."""

    num_replicas: int = 1
    """How many replicas train together."""

    replica_id: int = 0
    """The first (on torch the only) replica that this process runs."""

    is_chief: bool = True
    """Whether this process is the one that prints and writes files."""

    num_processes: int = 1
    """How many processes load data."""

    process_id: int = 0
    """Which of these processes this is."""

    devices: Sequence[str] = ()
    """The devices of this process, of which each runs a replica: "cuda:0"."""

    persists: bool = False
    """Whether `model.fit` needs what was set up even when it is called after the `with` block."""

    forget: Callable[[], None] = lambda: None
    """Called when the scope is closed for good, and not only left: what comes next may be for one device."""


@contextlib.contextmanager
def seeding_without_tensorflow() -> Iterator[None]:
    """Within it `keras.utils.set_random_seed` imports no TensorFlow. It seeds one that the program has imported."""
    in_keras = rng_utils.tf
    if "tensorflow" not in sys.modules:
        rng_utils.tf = types.SimpleNamespace(available=False)
    try:
        yield
    finally:
        rng_utils.tf = in_keras


def unlike_calls(calls: dict[int, str], noun: str, more: str = "") -> str:
    """What to say where processes, or ranks, do different things: by their numbers, "rank 0 ..."."""
    received = ", ".join(f"{noun} {number} {call}" for number, call in sorted(calls.items()))
    return (
        f"All {plural(noun)} must make the same calls, with the same `epochs`, callbacks and validation, prepare the "
        f"same models, and stop together. Received: {received}{more}. "
        f"Let what stops training depend on an epoch's logs after `prepare`, which are equal on all {plural(noun)}."
    )


def plural(noun: str) -> str:
    """Of "process", or "rank"."""
    return f"{noun}{'es' if noun.endswith('s') else 's'}"


def check_same_calls(
    kinds: Iterable[int], call: str, gather_letters: Callable[[list[int]], list[list[int]]], noun: str
) -> None:
    """Raises ValueError, on all that ask, if not all have the same kind of call; then they exchange their words.

    Args:
        kinds: of each process or rank, a number that stands for its call.
        call: what this one does: "rank 0 ...".
        gather_letters: gives the letters of all of them, equally many.
        noun: "process" or "rank".
    """
    if len(set(kinds)) > 1:
        letters = gather_letters(list(call.encode()[:_NUM_LETTERS].ljust(_NUM_LETTERS)))
        calls = [bytes(row).decode(errors="replace").strip() for row in letters]
        raise ValueError(unlike_calls(dict(enumerate(calls)), noun))


_NUM_LETTERS = 120


def gather_pickled(
    value: Any, gather: Callable[[np.ndarray], np.ndarray], gather_length: Callable[[int], list[int]] | None = None
) -> list[Any]:
    """The values of all processes, whatever they are, over a gather of arrays that have one shape.

    Args:
        value: anything that can be pickled.
        gather: gives the arrays of all processes.
        gather_length: the same of a number, which comes first; None for `gather`.

    Returns:
        The values of all processes.
    """

    def gathered() -> list[Any]:
        mine = np.frombuffer(pickle.dumps(value), "uint8")
        if gather_length is None:
            lengths = [int(length.item()) for length in gather(np.array([len(mine)], "int32"))]
        else:
            lengths = gather_length(len(mine))
        padded = np.zeros(max(lengths), "uint8")
        padded[: len(mine)] = mine
        rows = [np.asarray(row).astype("uint8") for row in gather(padded)]
        return [pickle.loads(row[:length].tobytes()) for row, length in zip(rows, lengths)]

    # In a thread of its own, which knows nothing of a replica, or a trace that is going on, in this one.
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(gathered).result()


num_barriers: dict[str, int] = {}
"""By purpose how often all have come."""


class MissingCallError(RuntimeError):
    """Some processes have not come to a barrier in time."""


def wait_in(store: Any, process: tuple[int, int], noun: str, purpose: str, seconds: float, advice: str) -> None:
    """Waits as `Processes.barrier` does, without a collective, which others would take for one of their own.

    Args:
        store: that of all processes, with `set`, `check` and `delete_key` of `torch.distributed.Store`.
        process: how many they are, and which of them this is.
        noun: "process" or "rank".
        purpose: what they come for.
        seconds: for how long to wait.
        advice: what to do about it.

    Raises:
        MissingCallError: if some have not come in time; this one can come again.
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
                f"{noun if len(missing) == 1 else plural(noun)} {', '.join(map(str, missing))}, {seconds:g} s after "
                f"the one on {noun} {mine}. {advice}"
            )
        time.sleep(0.005)
    num_barriers[purpose] = number + 1


class Processes:
    """The processes of a program, on the host. The defaults are those of one process with one replica.

    A new backend with several replicas writes `open`, `num_replicas` and `versions`. If they can be in several
    processes, it also writes `process`, `gather_objects` (`gather_pickled` does most of it), `barrier` (`wait_in` does)
    and two facts: whether processes make variables together, and whether each starts with weights of its own. Nothing
    here is only speed.
    """

    needs_initial_broadcast: bool = False
    """Whether each of several processes makes weights of its own, to be made equal by `Placement.broadcast_state`."""

    def creates_variables_collectively(self) -> bool:
        """Whether all processes make each variable together, so that different optimizers would hang."""
        return False

    def num_replicas(self) -> int:
        """The number of replicas of a training step that is made here."""
        return 1

    def barrier(self, purpose: str, seconds: float, advice: str) -> None:
        """Waits until all processes have come for this purpose. One that leaves in vain can come again.

        Raises:
            RuntimeError: with the advice, if some have not come after so many seconds.
        """
        del purpose, seconds, advice

    def versions(self) -> dict[str, str]:
        """The version of the framework by its name, which processes must agree on."""
        return {}

    def process(self) -> tuple[int, int]:
        """The number of processes that load data, and which of them this is, also outside of `open`."""
        return 1, 0

    @contextlib.contextmanager
    def open(self, num_replicas: int | None, timeout: datetime.timedelta | None = None) -> Iterator[World]:
        """Sets up replicas, and takes them down again. See `keras_shardopt.data_parallel`."""
        if num_replicas not in (None, 1):
            raise ValueError(
                "This Keras backend runs one replica only. "
                f"Received: num_replicas={num_replicas}. Use the tensorflow, jax or torch backend."
            )
        yield World()

    def gather_objects(self, value: Any) -> list[Any]:
        """The values of all processes, in their order. All call it together, perhaps while a step is being traced."""
        return [value]
