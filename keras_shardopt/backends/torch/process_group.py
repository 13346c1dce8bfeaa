"""Process groups of `torch.distributed` with timeouts, and errors that name the missing rank.

If a rank dies or stalls, PyTorch's collectives fail on some other ranks, with an error that names only a socket. The
first rank with an error closes its connections, so collectives fail on all ranks. Each rank then writes a sign of life
to the key-value store of the job, and reads the signs of the other ranks to find the missing rank.

If ranks made different calls, such as `fit` and `save`, they would send tensors of different sizes, and "gloo" would
abort the process. So each rank first sends a fixed-size announcement of its call (`announce`). A rank that leaves `fit`
with an error writes a note to the store. Waiting ranks read the store from time to time (`wait_for`).

Private names of PyTorch touched here: `torch.distributed.distributed_c10d._get_default_store` - the store of the
default group. (test_private_names.py checks that it exists.)
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import threading
import time
import traceback
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from keras_shardopt.backends import phases
from keras_shardopt.backends.processes import (
    MissingCallError,
    check_same_calls,
    different_calls_message,
    gather_pickled,
    num_barriers,
    wait_in,
)

ANSWER_SECONDS = 1.0
"""The minimum time that a rank waits for signs of life of other ranks after a failed collective."""

GRACE_SECONDS = 2.0
"""The additional waiting time if a collective fails before its timeout, because other ranks may be busy."""

POLL_SECONDS = 1.0
"""The interval at which a waiting rank reads the notes that other ranks have written to the key-value store."""

AWAY_SECONDS = 4.0
"""How long a waiting rank ignores a note that another rank has left a step: that rank may have completed the step."""


class _Group:
    """A default process group that `open_group` has opened, and counts of the calls that this rank has announced."""

    def __init__(self, store: dist.Store, timeout: datetime.timedelta | None) -> None:
        self.store = store
        self.timeout = timeout
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.is_gloo = dist.get_backend() == "gloo"
        self.has_left_message = False
        self.num_announced = 0
        self.num_due = 0
        self.announced_at_error = -1
        self.store_thread: threading.Thread | None = None


# The open group, the key-value store for all groups of this program, and the number of groups opened so far.
_open: _Group | None = None
_store: dist.Store | None = None
_num_groups = 0

# The group in which ranks announce their next calls. None means the default group. Keep no other reference, or the
# group could not end.
_announcements: Any = None

# The group for layers' statistics. Keep a weak reference, because the group must end together with the default group.
_statistics: weakref.ref[Any] | None = None


def job_of_environment(needs_address: bool = False) -> tuple[int, int]:
    """Return the number of ranks that the launcher started, and the rank of this process.

    Raises:
        ValueError: if the launcher's variables are invalid. Also if `needs_address` is true and the address is missing.
    """
    received = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    size, rank = (received.get(name, default) for name, default in (("WORLD_SIZE", "1"), ("RANK", "0")))
    are_numbers = size.isdecimal() and rank.isdecimal() and int(rank) < int(size)
    if not are_numbers or (needs_address and int(size) > 1 and not all(received.get(name) for name in _VARIABLES)):
        raise ValueError(
            f"A launcher of ranks must set {', '.join(_VARIABLES[:-1])} and {_VARIABLES[-1]}. Received: "
            f"{', '.join(f'{name}={value!r}' for name, value in received.items())}. Start the program with "
            "`python -m keras_shardopt.launch` or `torchrun`; for one process, unset these variables."
        )
    return int(size), int(rank)


_VARIABLES = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")


def open_group(backend: str, rank: int, size: int, timeout: datetime.timedelta | None) -> None:
    """Open the default process group ("gloo" or "nccl") of the ranks that torchrun started.

    After `close_group`, the next group can have fewer ranks. `timeout` limits each collective. None means the default.

    Raises:
        ValueError: if the launcher did not set the address of rank 0.
        RuntimeError: if a rank does not arrive in time.
    """
    global _open, _store, _num_groups, _announcements
    job_of_environment(needs_address=True)
    limit = {} if timeout is None else {"timeout": timeout}
    _num_groups += 1
    try:
        # Use one store for all groups. If rank 0 hosted a store per group, ranks could connect to an earlier store.
        if _store is None:
            _store, _, _ = next(rendezvous("env://", **limit))
        # Use keys with a prefix per group, or ranks would read addresses of the previous group. The prefix includes the
        # number of restarts, because torchrun's store outlives ranks that torchrun restarts.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"keras_shardopt/{attempt}/{_num_groups}", _store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, **limit)
        # Use gloo on the host, so the ranks' announcements of their next calls never wait for a device.
        _announcements = dist.new_group(backend="gloo", **limit)
        _open = _Group(store, timeout)
    except RuntimeError as error:
        raise RuntimeError(
            f"All {size} ranks must be started before training{_time_limit(timeout)}. Received on rank {rank}: "
            f"{_first_line(error)}. Start all ranks with the same MASTER_ADDR and MASTER_PORT. If some ranks need "
            "longer, use `data_parallel(timeout=...)`."
        ) from error


def statistics_group() -> Any:
    """Return the process group of all ranks for statistics of layers such as `BatchNormalization`.

    All ranks must make the first call together. Gradients use another group, so their order relative to statistics can
    differ between ranks.
    """
    global _statistics
    group = None if _statistics is None else _statistics()
    if group is None:
        group = another_group()
        _statistics = weakref.ref(group)
    return group


def another_group() -> Any:
    """Create a process group of all ranks. All ranks must call this together. Keep only a weak reference to it."""
    limit = {} if _open is None or _open.timeout is None else {"timeout": _open.timeout}
    with naming_missing_ranks():
        return dist.new_group(**limit)


def exchanges_statistics() -> bool:
    """Return whether layers, such as a synchronized `BatchNormalization`, use `statistics_group`."""
    return _statistics is not None and _statistics() is not None


def close_group(has_failed: bool = False) -> None:
    """Close the default process group if it is open. After a failure, do not wait until pending collectives end."""
    global _open, _announcements, _statistics
    is_open = dist.is_initialized()
    held = [dist.group.WORLD, _announcements, _statistics and _statistics()] if has_failed and is_open else []
    group, _open, _announcements, _statistics = _open, None, None, None
    num_barriers.clear()
    if is_open:
        dist.destroy_process_group()
    if held:
        # Release the groups in a thread, because a release waits for pending collectives. The wait may never end: a
        # process forked from a failed rank keeps that rank's connections open, so the collectives do not fail.
        releasing = threading.Thread(target=held.clear, daemon=True)
        releasing.start()
        releasing.join(POLL_SECONDS)
    if group is not None and group.has_left_message and group.rank == 0 and _rank_0_hosts_store():
        # Keep the store open for a while, because other ranks fail now and read this rank's message in the store.
        _collect_signs(group, ANSWER_SECONDS, "has left", [])


def job_store() -> Any:
    """Return the key-value store of the default group."""
    return distributed_c10d._get_default_store()


def meet(purpose: str, seconds: float, advice: str) -> None:
    """Wait until all ranks have made this call. The limit is the timeout of the group, or `seconds` if it has none.

    Raises:
        RuntimeError: with `purpose` and `advice`, if a rank is late, or the rank that hosts the store has ended.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if _open is not None and _open.timeout is not None:
        seconds = _open.timeout.total_seconds()
    try:
        wait_in(job_store(), (size, rank), "rank", purpose, seconds, advice)
    except MissingCallError as error:
        _leave_message(str(error))
        raise
    except RuntimeError as error:  # the store ends with the rank that hosts it
        raise RuntimeError(
            f"All ranks must {purpose} together. Received on rank {rank}: the rank that hosts the store has ended "
            f"({_first_line(error)}). {advice}"
        ) from error
    _leave_message(None)


def _leave_message(words: str | None) -> None:
    """Write the message `words` to the store. Other ranks add it to their errors. None deletes the message."""
    if _open is not None and (words is not None or _open.has_left_message):
        with contextlib.suppress(RuntimeError):
            _open.store.delete_key(_MESSAGE) if words is None else _open.store.set(_MESSAGE, words)
            _open.has_left_message = words is not None


_MESSAGE = "keras_shardopt/word"


# PyTorch 2.13 renamed this function, and the old name warns.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def announce(call: str, *numbers: int) -> list[list[int]]:
    """Announce the next call to all ranks, which must make the same call. Return each rank's two `numbers`.

    `call` describes the call, such as "saves a model". Omitted `numbers` are 0.

    Raises:
        ValueError: on every rank, if the `call` of some ranks differs.
    """
    return announce_async(call, *numbers)()


def announce_async(call: str, *numbers: int) -> Callable[[], list[list[int]]]:
    """Like `announce`, but return a function that waits for the other ranks, and then returns or raises."""
    wait_for_all = _announce([zlib.crc32(call.encode()), *numbers, 0, 0][:3], call)

    def wait() -> list[list[int]]:
        rows = wait_for_all()
        kinds = [kind for kind, *_ in rows]
        try:
            check_same_calls(kinds, call, lambda letters: _announce(letters, call)(), "rank")
        except ValueError:
            if _open is not None:
                _open.announced_at_error = _open.num_announced
            if any(zlib.crc32(each.encode()) in kinds for each in (_STEP, UPDATE, EXCHANGE)):
                # Close the group, or a rank's pending collective would match another rank's next collective.
                close_group(has_failed=True)
            raise
        return [numbers for _, *numbers in rows]

    return wait


_STEP = "makes a step of a prepared model"
UPDATE = "reduces the gradients of an update"
EXCHANGE = "exchanges tensors"
"""Descriptions of calls for errors, as in "rank 0 exchanges tensors"."""


def can_promise_steps() -> bool:
    """Return whether ranks can announce several steps at once. Not with NCCL: waiting ranks could not read errors."""
    return _open is not None and _open.is_gloo


def add_promised_steps(num_steps: int) -> None:
    """Add `num_steps` to the number of steps that this rank has announced and not completed."""
    if _open is not None:
        _open.num_due += num_steps


def note_error(words: str) -> None:
    """Write a note for waiting ranks: this rank has left a call of all ranks, such as `fit`, with the error `words`."""
    if _open is not None:
        _open.announced_at_error = _open.num_announced
        _write_note(_open, _ERROR, _open.num_announced, f"rank {_open.rank} has left with {words}")


def wait_for(work: Any, announcement: int = 0, call: str = "") -> None:
    """Wait for a collective, and check from time to time whether another rank has left with an error.

    Before most collectives, ranks announce their calls to compare them. `announcement` is the number of this rank's
    announcement if `work` sends one, otherwise 0. `call` describes a collective that was not announced, as in a custom
    loop.

    Raises:
        RuntimeError: if the collective fails, or another rank has left `fit` with an error.
        ValueError: on every rank, if ranks make different calls. The group is then already closed.
    """
    away_since = None
    while can_promise_steps() if not announcement else _open is not None:
        with contextlib.suppress(RuntimeError):
            work.wait(datetime.timedelta(seconds=POLL_SECONDS))
            return
        if work.is_completed():
            break  # the collective has failed, and `wait` below raises an error
        assert _open is not None
        if announcement:
            _write_note(_open, _AWAY, announcement)
        found = _error_elsewhere(_open, announcement, bool(call))
        if found is None:
            away_since = None
        elif away_since is None:
            away_since = time.monotonic()
        elif time.monotonic() - away_since >= AWAY_SECONDS:
            if found:
                raise RuntimeError(found)
            announce(_STEP if _open.num_due else call)
    work.wait()


_AWAY, _ERROR = "away", "error"


def _write_note(group: _Group, key: str, num_announced: int, words: str = "") -> None:
    def leave() -> None:
        if _read_note(group, key)[0] < num_announced:
            group.store.set(key, f"{num_announced} {words}")

    _use_store(group, leave)


def _read_note(group: _Group, key: str) -> tuple[int, str]:
    """Return a note in the store: how many calls its rank had announced, and the text. -1 and "" without a note."""
    number, _, words = (group.store.get(key).decode() if group.store.check([key]) else "-1").partition(" ")
    return int(number), words


def _error_elsewhere(group: _Group, announcement: int, is_of_all: bool) -> str | None:
    """Return the error with which another rank left `fit`, or "" if a rank has announced a later call, or None."""
    found: list[str] = []

    def read_notes() -> None:
        # If this is a step of all ranks, a rank that has announced a later call has left the step.
        is_joint = not announcement and (is_of_all or group.num_due)
        if is_joint and _read_note(group, _AWAY)[0] > group.num_announced:
            found.append("")
        number, words = _read_note(group, _ERROR)
        # Ignore errors that this rank also had, and errors from before the last call that all ranks have announced.
        if number > max(group.announced_at_error, group.num_announced - (2 if announcement else 1)):
            found.append(words)

    _use_store(group, read_notes)
    return min(list(found), default=None)


def _use_store(group: _Group, function: Callable[[], None]) -> None:
    """Run `function`, which may wait for the store. Skip it while an earlier function still waits."""
    if group.store_thread is not None and group.store_thread.is_alive():
        return

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            function()

    # Use a thread, because the function never returns if the rank that hosts the store has stopped.
    group.store_thread = threading.Thread(target=run, daemon=True)
    group.store_thread.start()
    group.store_thread.join(POLL_SECONDS)


def gather_objects(value: Any, call: str) -> list[Any]:
    """Return the picklable values of all ranks, in order. `call` describes the purpose, such as "saves a model"."""

    def gather(padded: np.ndarray) -> np.ndarray:
        mine = torch.from_numpy(padded).to(_announcement_device())
        gathered = mine.new_empty(dist.get_world_size() * len(mine))
        with naming_missing_ranks(call=call):
            _all_gather(gathered, mine, group=_announcements)
        rows: np.ndarray = gathered.view(-1, len(mine)).cpu().numpy()
        return rows

    def lengths(length: int) -> list[int]:  # not `dist.all_gather_object`, which gathers the lengths after `announce`
        return [each for each, _ in announce(call, length)]

    return gather_pickled(value, gather, lengths, in_thread=False)


def _announcement_device() -> str:
    # Announcements use the default group if the user's program has opened it. NCCL then needs tensors on the GPU.
    return "cuda" if _announcements is None and dist.get_backend() == "nccl" else "cpu"


def _announce(numbers: list[int], call: str) -> Callable[[], list[list[int]]]:
    """Start to gather equal-length lists (`numbers`) from all ranks. Return a function that waits for these lists."""
    number = 0
    if _open is not None:
        number = _open.num_announced = _open.num_announced + 1
    mine = torch.tensor(numbers, device=_announcement_device())
    gathered = mine.new_empty(mine.numel() * dist.get_world_size())
    under_way: list[Any] = []
    with naming_missing_ranks(under_way, call):
        under_way.append(_all_gather(gathered, mine, group=_announcements, async_op=True))

    def wait() -> list[list[int]]:
        with naming_missing_ranks(under_way, call):
            wait_for(under_way[0], number)
        rows: list[list[int]] = gathered.view(-1, len(numbers)).tolist()
        return rows

    return wait


class naming_missing_ranks:
    """Context manager that adds the missing ranks to the error of a failed collective. Wrap exactly one collective.

    `under_way` is the caller's list of pending collectives, cleared on failure. `call` describes the purpose.

    Raises:
        RuntimeError: if the collective fails. Names the missing ranks if possible.
    """

    # A class is faster than `contextlib.contextmanager`, and some steps enter it ten times.
    def __init__(self, under_way: list[Any] | None = None, call: str = EXCHANGE) -> None:
        self._under_way, self._call = under_way, call
        self._start = time.monotonic()

    def __enter__(self) -> None:
        phases.change("waiting")

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        phases.change(None)
        if not isinstance(error, RuntimeError):
            return
        # Drop references to collectives in the caller's list and in failed frames, because they keep connections open.
        if self._under_way is not None:
            self._under_way.clear()
        traceback.clear_frames(trace)
        raise RuntimeError(_explained(error, time.monotonic() - self._start, self._call)) from error


def _explained(error: RuntimeError, waited: float, call: str) -> str:
    rule = "All ranks must take part in each step, but at least one rank is gone or stuck."
    cause = f"The exchange failed with: {_first_line(error)}."
    remedy = (
        "Read that rank's output for the cause. If a rank needs longer, use `data_parallel(timeout=...)`. Restart the "
        "job: `keras_shardopt.callbacks.BackupAndRestore` resumes from the last backup."
    )
    if _open is None:
        where = f"on rank {dist.get_rank()} of {dist.get_world_size()}" if dist.is_initialized() else "here"
        return f"{rule} Received: a failed exchange {where}. {cause} {remedy}"
    group = _open
    rest = math.inf if group.timeout is None else group.timeout.total_seconds() - waited
    seconds = ANSWER_SECONDS + max(0.0, min(GRACE_SECONDS, rest))
    words: list[str] = []
    calls, received = _answers(group, seconds, call, words)
    before = "".join(f" Before that: {word}" for word in words)
    if len(set(calls.values())) > 1:
        longer = "If a rank only needs more time, use `data_parallel(timeout=...)`."
        return f"{different_calls_message(calls, 'rank', _time_limit(group.timeout))} {longer} {cause}{before}"
    received = f"{received}, checked by rank {group.rank} of {group.size}{_time_limit(group.timeout)}"
    return f"{rule} Received: {received}. {cause}{before} {remedy}"


def _answers(group: _Group, seconds: float, call: str, words: list[str]) -> tuple[dict[int, str], str]:
    """Return each rank's call ({} unless all answer in time), and the cause. Append messages of ranks to `words`."""
    if dist.is_initialized() and dist.get_backend() == "gloo":
        # Close the connections, so collectives fail on ranks that wait for this rank. Those ranks answer only then.
        close_group(has_failed=True)
    found: list[dict[int, str]] = []
    # Read the store in a thread, because a read never returns if the rank that hosts the store has stopped.
    collecting = threading.Thread(target=_collect_signs, args=(group, seconds, call, found, words), daemon=True)
    collecting.start()
    collecting.join(seconds + 0.5)
    if not found:
        where = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        who = "rank 0, which hosts the store" if _rank_0_hosts_store() else f"the launcher's store at {where}"
        return {}, f"no answer from {who}"
    missing = sorted(set(range(group.size)) - set(found[-1]))
    if not missing:
        return found[-1], "answers from every rank, but too late or over a broken connection"
    return {}, f"no answer from rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"


def _collect_signs(
    group: _Group, seconds: float, call: str, found: list[dict[int, str]], words: list[str] | None = None
) -> None:
    """Write `call` as this rank's sign of life. Append those found to `found`, until all are there or time is up."""
    limit = time.monotonic() + seconds
    with contextlib.suppress(RuntimeError):
        if words is not None and group.store.check([_MESSAGE]):
            words.append(group.store.get(_MESSAGE).decode())
        group.store.set(f"sign/{group.rank}", call)
        signs = {group.rank: call}
        while True:
            for rank in set(range(group.size)) - set(signs):
                if group.store.check([f"sign/{rank}"]):
                    signs[rank] = group.store.get(f"sign/{rank}").decode()
            found.append(dict(signs))
            # The rank that hosts the store stays until the time is over, so other ranks can read the store.
            have_all = len(signs) == group.size and not (group.rank == 0 and _rank_0_hosts_store())
            if have_all or time.monotonic() > limit:
                return
            time.sleep(0.02)


def _rank_0_hosts_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _time_limit(timeout: datetime.timedelta | None) -> str:
    return "" if timeout is None else f" within {timeout.total_seconds():g} s"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].partition(". This is typically")[0].rstrip(".")
