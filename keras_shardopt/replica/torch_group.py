"""Process groups of `torch.distributed` in which no rank waits for ever, and that say which rank is missing.

When a rank dies or stalls, the collective that needs it fails on some of the others, at once or when the time is up,
with an error that names a socket. So the first rank that notices closes its connections, which makes the collectives
of all others fail too; then each leaves a sign in the store in which the ranks met, and looks for those of the others.

Private names of PyTorch touched here: `torch.distributed.distributed_c10d._get_default_store` - the store in which the
ranks of the default group have met, whoever has opened it. (test_private_names.py holds it.)
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

ANSWER_SECONDS = 1.0
"""For how long a rank at least looks for signs of the others after a collective has failed."""

PATIENCE_SECONDS = 2.0
"""For how much longer it does where the collective has failed before its time, as others may be busy just then."""


class _Group:
    """The default process group, as opened here."""

    def __init__(self, store: dist.Store, timeout: datetime.timedelta | None) -> None:
        self.store = store
        self.timeout = timeout
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.has_left_word = False


# What is open, the store in which all groups of this program meet, and how many there have been.
_open: _Group | None = None
_store: dist.Store | None = None
_num_groups = 0


def open_group(backend: str, rank: int, size: int, timeout: datetime.timedelta | None) -> None:
    """Opens the default process group of the ranks that torchrun started.

    Args:
        backend: "gloo" or "nccl".
        rank: of this process, among `size`. Fewer ranks may meet the second time.
        size: how many processes meet.
        timeout: after how long a collective fails; None for PyTorch's own limit.

    Raises:
        RuntimeError: if some rank does not come in time.
    """
    global _open, _store, _num_groups
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
        _open = _Group(store, timeout)
    except RuntimeError as error:
        raise RuntimeError(
            f"All {size} ranks must meet before training{_within(timeout)}. Received on rank {rank}: "
            f"{_first_line(error)}. Were all of them started, with the same MASTER_ADDR and MASTER_PORT? "
            "Where some need longer, use `data_parallel(timeout=...)`."
        ) from error


def close_group() -> None:
    """Closes the default process group, if it is still open."""
    global _open
    group, _open = _open, None
    _num_meetings.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
    if group is not None and group.has_left_word and group.rank == 0 and _rank_0_serves():
        _ask(group, ANSWER_SECONDS, [])  # their collectives fail now, and they look for what was said


_num_meetings: dict[str, int] = {}


def meet(purpose: str, seconds: float, advice: str) -> None:
    """Waits until all ranks have come, without a collective, which others would take for one of their own.

    A rank that leaves because others have not come can come again. Those whose collectives fail because it has left
    say so, too.

    Args:
        purpose: what they come for.
        seconds: for how long to wait, where the group was opened without a `timeout`.
        advice: what to do about it.

    Raises:
        RuntimeError: after that time, with the ranks that have not come, and the advice; or if the store in which ranks
            meet is gone.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if _open is not None and _open.timeout is not None:
        seconds = _open.timeout.total_seconds()
    number = _num_meetings.get(purpose, 0)
    names = [f"keras_shardopt/meeting/{purpose}/{number}/{other}" for other in range(size)]
    limit = time.monotonic() + seconds
    try:
        store = distributed_c10d._get_default_store()
        store.set(names[rank], "1")
        while missing := [other for other, name in enumerate(names) if other != rank and not store.check([name])]:
            if time.monotonic() > limit:
                store.delete_key(names[rank])
                break
            time.sleep(0.005)
    except RuntimeError as error:  # of the connection to the store, which ends with the rank that serves it
        raise RuntimeError(
            f"All ranks must {purpose} together. Received on rank {rank}: the rank that holds the connections has "
            f"ended ({_first_line(error)}). {advice}"
        ) from error
    if missing:
        ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        words = (
            f"All ranks must {purpose} together. Received: no call on {ranks}, {seconds:g} s after the one on rank "
            f"{rank}. {advice}"
        )
        _leave_word(words)
        raise RuntimeError(words)
    _num_meetings[purpose] = number + 1
    _leave_word(None)


def _leave_word(words: str | None) -> None:
    """Lets ranks whose collectives fail later say why; None where all are together again."""
    if _open is not None and (words is not None or _open.has_left_word):
        with contextlib.suppress(RuntimeError):
            _open.store.delete_key(_WORD) if words is None else _open.store.set(_WORD, words)
            _open.has_left_word = words is not None


_WORD = "keras_shardopt/word"


@contextlib.contextmanager
def taking_part(under_way: list[Any] | None = None) -> Iterator[None]:
    """Put around every collective, and nothing else: what fails in it fails because of another rank.

    Args:
        under_way: the collectives that the caller has begun, in a list that is emptied when one fails.

    Raises:
        RuntimeError: if the collective fails, with the ranks that are missing where they can be told.
    """
    start = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        # What holds a collective holds the connections open: the caller's list, and the frames that have failed.
        if under_way is not None:
            under_way.clear()
        traceback.clear_frames(error.__traceback__)
        raise RuntimeError(_explained(error, time.monotonic() - start)) from error


def _explained(error: RuntimeError, waited: float) -> str:
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
    received = f"{_in_words(group, seconds, words)}, asked by rank {group.rank} of {group.size}{_within(group.timeout)}"
    return " ".join([f"{rule} Received: {received}. {cause}", *(f"Before that: {word}" for word in words), remedy])


def _in_words(group: _Group, seconds: float, words: list[str]) -> str:
    """Who is missing, as far as it can be told in some seconds; adds to `words` what a rank has said before it left."""
    if dist.is_initialized() and dist.get_backend() == "gloo":
        # The connections too: ranks further along a ring wait for this one, and would not look for signs in time.
        close_group()
    found: list[set[int]] = []
    # In a thread that may be left behind: a rank that serves the store and was stopped never answers.
    asking = threading.Thread(target=_ask, args=(group, seconds, found, words), daemon=True)
    asking.start()
    asking.join(seconds + 0.5)
    if not found:
        return "no answer from rank 0, which holds the store" if _rank_0_serves() else "no answer from torchrun's store"
    missing = sorted(set(range(group.size)) - found[-1])
    if not missing:
        return "an answer from every rank, but too late or over a broken connection"
    return f"no answer from rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"


def _ask(group: _Group, seconds: float, found: list[set[int]], words: list[str] | None = None) -> None:
    """Leaves this rank's sign, and adds to `found` the ranks that have left theirs, until all or the time is up."""
    limit = time.monotonic() + seconds
    with contextlib.suppress(RuntimeError):
        if words is not None and group.store.check([_WORD]):
            words.append(group.store.get(_WORD).decode())
        group.store.set(f"sign/{group.rank}", "1")
        signs = {group.rank}
        while True:
            others = set(range(group.size)) - signs
            signs |= {rank for rank in others if group.store.check([f"sign/{rank}"])}
            found.append(set(signs))
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
