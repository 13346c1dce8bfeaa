"""Process groups of `torch.distributed` with timeouts, whose errors name the rank that is missing.

When a rank dies or stalls, the collective that needs it fails on some of the others, at once or when the time is up,
with an error that names a socket. So the first rank that notices closes its connections, which makes the collectives
of all others fail too; then each leaves a sign in the store that the ranks share, and looks for those of the others.

Ranks that make different calls must not send each other tensors of different sizes, as "gloo" then ends the process. So
before ranks begin something together, each announces it to the others, in a message of one size and in a separate group
(`tell`): a rank that does so never receives the gradients of one that does not. Ranks may announce several steps at a
time. One that does something else instead says so in the store, as soon as it waits for a second, and so does one that
an error takes out of `fit`. Those that wait for it look there now and then (`wait_for`).

Private names of PyTorch touched here: `torch.distributed.distributed_c10d._get_default_store` - the store in which the
ranks of the default group have met, whoever has opened it. (test_private_names.py holds it.)
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import pickle
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

from keras_shardopt.backends.processes import MissingCallError, check_same_calls, num_barriers, unlike_calls, wait_in

ANSWER_SECONDS = 1.0
"""For how long a rank at least looks for signs of the others after a collective has failed."""

PATIENCE_SECONDS = 2.0
"""For how much longer it does where the collective has failed before its time, as others may be busy just then."""

LOOK_SECONDS = 1.0
"""How often a rank that waits in a step looks whether another rank does something else."""

AWAY_SECONDS = 4.0
"""For how long it must have seen that: the other one may have come from the same step, which is slow to end here. An
error may come on all ranks, on some of them later."""


class _Group:
    """The default process group, as opened here."""

    def __init__(self, store: dist.Store, timeout: datetime.timedelta | None) -> None:
        self.store = store
        self.timeout = timeout
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.is_gloo = dist.get_backend() == "gloo"
        self.has_left_word = False
        self.num_told = 0
        self.num_due = 0
        self.told_at_error = -1
        self.looking: threading.Thread | None = None


# What is open, the store in which all groups of this program meet, and how many there have been.
_open: _Group | None = None
_store: dist.Store | None = None
_num_groups = 0

# What messages travel in: None for the default group. Nothing else may hold it, as it must end with that.
_messages: Any = None

# What layers exchange statistics in. Held weakly, as it must end with the default group.
_statistics: weakref.ref[Any] | None = None


def job_of_environment(needs_address: bool = False) -> tuple[int, int]:
    """How many ranks the launcher has started, and which of them this is.

    Args:
        needs_address: whether they are about to meet.

    Raises:
        ValueError: if its variables hold no such numbers, or some of them are missing.
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
    """Opens the default process group of the ranks that torchrun started.

    Args:
        backend: "gloo" or "nccl".
        rank: of this process, among `size`. Fewer ranks may join the second time.
        size: how many processes there are.
        timeout: after how long a collective fails; None for PyTorch's own limit.

    Raises:
        ValueError: if the launcher has not said where they meet.
        RuntimeError: if some rank does not come in time.
    """
    global _open, _store, _num_groups, _messages
    job_of_environment(needs_address=True)
    limit = {} if timeout is None else {"timeout": timeout}
    _num_groups += 1
    try:
        # One store for all meetings of this program: rank 0 may serve it, and others would ask the one before.
        if _store is None:
            _store, _, _ = next(rendezvous("env://", **limit))
        # Under a name of its own: ranks that meet a second time would else read the addresses of the first. The store
        # may be torchrun's, which outlives them when it starts them again.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"keras_shardopt/{attempt}/{_num_groups}", _store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, **limit)
        # On the host, whatever the tensors are on: so nobody waits for a device.
        _messages = dist.new_group(backend="gloo", **limit)
        _open = _Group(store, timeout)
    except RuntimeError as error:
        raise RuntimeError(
            f"All {size} ranks must be started before training{_within(timeout)}. Received on rank {rank}: "
            f"{_first_line(error)}. Were all of them started, with the same MASTER_ADDR and MASTER_PORT? "
            "Where some need longer, use `data_parallel(timeout=...)`."
        ) from error


def statistics_group() -> Any:
    """A process group of all ranks in which layers exchange statistics; all ranks make the first call together.

    A group of its own: which of its collectives come before which gradients is each rank's own affair then, unless
    one gradient waits for another.
    """
    global _statistics
    group = None if _statistics is None else _statistics()
    if group is None:
        limit = {} if _open is None or _open.timeout is None else {"timeout": _open.timeout}
        with explaining_failures():
            group = dist.new_group(**limit)
        _statistics = weakref.ref(group)
    return group


def exchanges_statistics() -> bool:
    """Whether layers do so: equal on all ranks."""
    return _statistics is not None and _statistics() is not None


def close_group(has_failed: bool = False) -> None:
    """Closes the default process group, if it is still open.

    Args:
        has_failed: whether collectives may be under way that never end.
    """
    global _open, _messages, _statistics
    is_open = dist.is_initialized()
    held = [dist.group.WORLD, _messages, _statistics and _statistics()] if has_failed and is_open else []
    group, _open, _messages, _statistics = _open, None, None, None
    num_barriers.clear()
    if is_open:
        dist.destroy_process_group()
    if held:
        # A group ends with the last reference, and waits for its collectives. They fail when others close their
        # connections, but only in time where a process that one of these has forked keeps them open.
        letting_go = threading.Thread(target=held.clear, daemon=True)
        letting_go.start()
        letting_go.join(LOOK_SECONDS)
    if group is not None and group.has_left_word and group.rank == 0 and _rank_0_serves():
        _ask(group, ANSWER_SECONDS, "has left", [])  # their collectives fail now, and they look for what was said


def meet(purpose: str, seconds: float, advice: str) -> None:
    """`Processes.barrier`, with the time limit of the group; ranks whose collectives fail later say who left, too.

    Raises:
        RuntimeError: as there; or if the store is gone.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if _open is not None and _open.timeout is not None:
        seconds = _open.timeout.total_seconds()
    try:
        wait_in(distributed_c10d._get_default_store(), (size, rank), "rank", purpose, seconds, advice)
    except MissingCallError as error:
        _leave_word(str(error))
        raise
    except RuntimeError as error:  # of the connection to the store, which ends with the rank that serves it
        raise RuntimeError(
            f"All ranks must {purpose} together. Received on rank {rank}: the rank that holds the connections has "
            f"ended ({_first_line(error)}). {advice}"
        ) from error
    _leave_word(None)


def _leave_word(words: str | None) -> None:
    """Lets ranks whose collectives fail later say why; None where all are together again."""
    if _open is not None and (words is not None or _open.has_left_word):
        with contextlib.suppress(RuntimeError):
            _open.store.delete_key(_WORD) if words is None else _open.store.set(_WORD, words)
            _open.has_left_word = words is not None


_WORD = "keras_shardopt/word"


def say_failure(number: str, words: str) -> None:
    """Leaves an error, under a number of its own, for ranks that look for it."""
    with contextlib.suppress(RuntimeError):
        store = distributed_c10d._get_default_store()
        store.set(_FAILURE, f"{number} {words}")
        store.check([_FAILURE])  # setting alone does not wait until it is there


def failure() -> tuple[str, str] | None:
    """The number and the words of the error that was left last; None if there is none."""
    with contextlib.suppress(RuntimeError):
        store = distributed_c10d._get_default_store()
        if store.check([_FAILURE]):
            number, _, words = store.get(_FAILURE).decode().partition(" ")
            return number, words
    return None


_FAILURE = "keras_shardopt/failure"


# The name since PyTorch 2.13, which warns about the older one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def tell(call: str, *numbers: int) -> list[list[int]]:
    """Tells all ranks what this one is about to do together with them, and up to two numbers.

    Args:
        call: what it does, in words that are equal where it is the same: "rank 0 ...".
        numbers: ints.

    Returns:
        The numbers of each rank, filled up with zeros.

    Raises:
        ValueError: on every rank, if some are about to do something else.
    """
    return tell_soon(call, *numbers)()


def tell_soon(call: str, *numbers: int) -> Callable[[], list[list[int]]]:
    """As `tell`, but without waiting for the others: calling what it returns waits, and gives or raises the same."""
    told = _telling([zlib.crc32(call.encode()), *numbers, 0, 0][:3], call)

    def wait() -> list[list[int]]:
        rows = told()
        kinds = [kind for kind, *_ in rows]
        try:
            check_same_calls(kinds, call, lambda letters: _telling(letters, call)(), "rank")
        except ValueError:
            if _open is not None:
                _open.told_at_error = _open.num_told
            if zlib.crc32(_STEP.encode()) in kinds:
                close_group(has_failed=True)  # or what these ranks have begun would meet what others begin next
            raise
        return [numbers for _, *numbers in rows]

    return wait


_STEP = "makes a step of a prepared model"


def can_promise() -> bool:
    """Whether ranks may promise their next steps: where those that wait can look whether others make them."""
    return _open is not None and _open.is_gloo


def owe_steps(num_steps: int) -> None:
    """Notes that this rank is in so many more steps that all ranks make, or fewer (< 0): it has made them."""
    if _open is not None:
        _open.num_due += num_steps


def note_error(words: str) -> None:
    """Lets ranks that wait for this one find the error that has taken it out of a call of all ranks."""
    if _open is not None:
        _open.told_at_error = _open.num_told
        _leave(_open, _ERROR, _open.num_told, f"rank {_open.rank} has left with {words}")


def wait_for(work: Any, told: int = 0) -> None:
    """Waits for a collective, which other ranks may never begin although they have promised to.

    Args:
        work: the collective.
        told: which message it is; 0 for a collective of a step.

    Raises:
        RuntimeError: if the collective fails, or an error has taken another rank out of `fit`.
        ValueError: on every rank, if some do something else. The group is closed then.
    """
    away_since = None
    while can_promise() if not told else _open is not None:
        with contextlib.suppress(RuntimeError):
            work.wait(datetime.timedelta(seconds=LOOK_SECONDS))
            return
        if work.is_completed():
            break  # or it has failed
        assert _open is not None
        if told:
            _leave(_open, _AWAY, told)
        found = _others_elsewhere(_open, told)
        if found is None:
            away_since = None
        elif away_since is None:
            away_since = time.monotonic()
        elif time.monotonic() - away_since >= AWAY_SECONDS:
            if found:
                raise RuntimeError(found)
            tell(_STEP)
    work.wait()


_AWAY, _ERROR = "away", "error"


def _leave(group: _Group, key: str, num_told: int, words: str = "") -> None:
    """Leaves a note for all ranks, unless there is one from after more messages."""

    def leave() -> None:
        if _note(group, key)[0] < num_told:
            group.store.set(key, f"{num_told} {words}")

    _in_thread(group, leave)


def _note(group: _Group, key: str) -> tuple[int, str]:
    """After how many messages a rank has left a note (-1: there is none), and its words."""
    number, _, words = (group.store.get(key).decode() if group.store.check([key]) else "-1").partition(" ")
    return int(number), words


def _others_elsewhere(group: _Group, told: int) -> str | None:
    """The error that has taken another rank out of `fit`; "" if one tells something that this one has not come to."""
    found: list[str] = []

    def look() -> None:
        # In a step of all ranks only: those of one group may tell something while another group trains.
        if not told and group.num_due and _note(group, _AWAY)[0] > group.num_told:
            found.append("")
        number, words = _note(group, _ERROR)
        # Not an error that has come on this rank too, or from which all have come together again.
        if number > max(group.told_at_error, group.num_told - (2 if told else 1)):
            found.append(words)

    _in_thread(group, look)
    return min(list(found), default=None)


def _in_thread(group: _Group, function: Callable[[], None]) -> None:
    """Calls a function that asks the store, unless the last one has no answer yet."""
    if group.looking is not None and group.looking.is_alive():
        return

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            function()

    # It may be left behind, as for `_ask`.
    group.looking = threading.Thread(target=run, daemon=True)
    group.looking.start()
    group.looking.join(LOOK_SECONDS)


def gather_objects(value: Any, call: str) -> list[Any]:
    """The values of all ranks, which may be of different lengths. `call` is as in `tell`."""
    # Not `dist.all_gather_object`, which asks for the lengths once more.
    mine = np.frombuffer(pickle.dumps(value), "uint8")
    lengths = [length for length, _ in tell(call, len(mine))]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(mine)] = torch.from_numpy(mine.copy())
    padded = padded.to(_device_of_messages())
    everyones = padded.new_empty(len(lengths) * max(lengths))
    with explaining_failures(call=call):
        _all_gather(everyones, padded, group=_messages)
    rows = everyones.view(len(lengths), -1).cpu().numpy()
    return [pickle.loads(row[:length].tobytes()) for row, length in zip(rows, lengths)]


def _device_of_messages() -> str:
    # In a group that somebody else has opened everything travels on its device.
    return "cuda" if _messages is None and dist.get_backend() == "nccl" else "cpu"


def _telling(numbers: list[int], call: str) -> Callable[[], list[list[int]]]:
    """Begins to gather the numbers of all ranks, which tell equally many; calling what it returns waits for them."""
    number = 0
    if _open is not None:
        number = _open.num_told = _open.num_told + 1
    mine = torch.tensor(numbers, device=_device_of_messages())
    everyones = mine.new_empty(mine.numel() * dist.get_world_size())
    under_way: list[Any] = []
    with explaining_failures(under_way, call):
        under_way.append(_all_gather(everyones, mine, group=_messages, async_op=True))

    def wait() -> list[list[int]]:
        with explaining_failures(under_way, call):
            wait_for(under_way[0], number)
        rows: list[list[int]] = everyones.view(-1, len(numbers)).tolist()
        return rows

    return wait


class explaining_failures:
    """Put around every collective, and nothing else: what fails in it fails because of another rank.

    Args:
        under_way: the collectives that the caller has begun, in a list that is emptied when one fails.
        call: what they are for: "rank 0 ...".

    Raises:
        RuntimeError: if the collective fails, with the ranks that are missing where they can be told.
    """

    # Not by `contextlib.contextmanager`, which makes twice as many calls, some ten times in each step.
    def __init__(self, under_way: list[Any] | None = None, call: str = "exchanges tensors") -> None:
        self._under_way, self._call = under_way, call
        self._start = time.monotonic()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, RuntimeError):
            return
        # What holds a collective holds the connections open: the caller's list, and the frames that have failed.
        if self._under_way is not None:
            self._under_way.clear()
        traceback.clear_frames(trace)
        raise RuntimeError(_explained(error, time.monotonic() - self._start, self._call)) from error


def _explained(error: RuntimeError, waited: float, call: str) -> str:
    rule = "All ranks must take part in each step, and one of them is gone or stuck."
    cause = f"The exchange failed with: {_first_line(error)}."
    remedy = (
        "That rank's own output says why; where a rank may take longer, use `data_parallel(timeout=...)`. Start the "
        "job again: with `keras_shardopt.callbacks.BackupAndRestore` it goes on from its last backup."
    )
    if _open is None:
        where = f"on rank {dist.get_rank()} of {dist.get_world_size()}" if dist.is_initialized() else "here"
        return f"{rule} Received: a failed exchange {where}. {cause} {remedy}"
    group = _open
    rest = math.inf if group.timeout is None else group.timeout.total_seconds() - waited
    seconds = ANSWER_SECONDS + max(0.0, min(PATIENCE_SECONDS, rest))
    words: list[str] = []
    calls, received = _in_words(group, seconds, call, words)
    before = "".join(f" Before that: {word}" for word in words)
    if len(set(calls.values())) > 1:
        longer = "Where one of them only takes longer, use `data_parallel(timeout=...)`."
        return f"{unlike_calls(calls, 'rank', _within(group.timeout))} {longer} {cause}{before}"
    received = f"{received}, asked by rank {group.rank} of {group.size}{_within(group.timeout)}"
    return f"{rule} Received: {received}. {cause}{before} {remedy}"


def _in_words(group: _Group, seconds: float, call: str, words: list[str]) -> tuple[dict[int, str], str]:
    """What the ranks do, if all answer, and who is missing, as far as it can be told in some seconds.

    Adds to `words` what a rank has said before it left.
    """
    if dist.is_initialized() and dist.get_backend() == "gloo":
        # The connections too: ranks further along a ring wait for this one, and would not look for signs in time.
        close_group(has_failed=True)
    found: list[dict[int, str]] = []
    # In a thread that may be left behind: a rank that serves the store and was stopped never answers.
    asking = threading.Thread(target=_ask, args=(group, seconds, call, found, words), daemon=True)
    asking.start()
    asking.join(seconds + 0.5)
    if not found:
        where = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        who = "rank 0, which holds the store" if _rank_0_serves() else f"the launcher's store at {where}"
        return {}, f"no answer from {who}"
    missing = sorted(set(range(group.size)) - set(found[-1]))
    if not missing:
        return found[-1], "an answer from every rank, but too late or over a broken connection"
    return {}, f"no answer from rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"


def _ask(group: _Group, seconds: float, call: str, found: list[dict[int, str]], words: list[str] | None = None) -> None:
    """Leaves this rank's sign, and adds to `found` what the ranks do that have left theirs, until all or time is up."""
    limit = time.monotonic() + seconds
    with contextlib.suppress(RuntimeError):
        if words is not None and group.store.check([_WORD]):
            words.append(group.store.get(_WORD).decode())
        group.store.set(f"sign/{group.rank}", call)
        signs = {group.rank: call}
        while True:
            for rank in set(range(group.size)) - set(signs):
                if group.store.check([f"sign/{rank}"]):
                    signs[rank] = group.store.get(f"sign/{rank}").decode()
            found.append(dict(signs))
            # The rank that serves the store stays, or it would be gone before all have looked.
            have_all = len(signs) == group.size and not (group.rank == 0 and _rank_0_serves())
            if have_all or time.monotonic() > limit:
                return
            time.sleep(0.02)


def _rank_0_serves() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _within(timeout: datetime.timedelta | None) -> str:
    return "" if timeout is None else f" within {timeout.total_seconds():g} s"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].partition(". This is typically")[0].rstrip(".")
