"""Which optimizers get gradients that are reduced already."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

_claims_lock = threading.Lock()


_CLAIMS = "_keras_shardopt_claims"


_DIFFERING_ALONG = "_keras_shardopt_differing_along"


_HOLDS_SLICES = "_keras_shardopt_holds_slices"


@contextlib.contextmanager
def claim_reduction(optimizers: Sequence[Any], differing_along: str | None = None) -> Iterator[None]:
    """Says, for the time of the block, that gradients are global and these optimizers may not reduce them again.

    With groups they are those of a group only: then `differing_along` names the axis of the replicas.

    Counted on each optimizer rather than once per thread: MirroredStrategy runs every replica in a thread of its
    own, switches between them in the middle of an update, and continues parts of it in further threads. Replicas
    enter and leave together, so while any of them is inside, all of them are.
    """
    if differing_along is not None:
        for optimizer in optimizers:
            optimizer.__dict__[_DIFFERING_ALONG] = differing_along
    _add_claim(optimizers, 1)
    try:
        yield
    finally:
        _add_claim(optimizers, -1)


def _add_claim(optimizers: Sequence[Any], count: int) -> None:
    with _claims_lock:
        for optimizer in optimizers:
            optimizer.__dict__[_CLAIMS] = optimizer.__dict__.get(_CLAIMS, 0) + count


def reduction_is_claimed(optimizer: Any) -> bool:
    """Whether an optimizer around this one has reduced its gradients."""
    return bool(optimizer.__dict__.get(_CLAIMS, 0))


def hold_slices(optimizers: Sequence[Any]) -> None:
    """Says that from now on these optimizers see gradients of this replica's slices only."""
    for optimizer in optimizers:
        optimizer.__dict__[_HOLDS_SLICES] = True


def holds_slices(optimizer: Any) -> bool:
    """Whether it sees a part of all gradients, so that what it finds must be joined over replicas."""
    return bool(optimizer.__dict__.get(_HOLDS_SLICES))


def differing_along(optimizer: Any) -> str | None:
    """The axis along which reduced gradients still differ, because replicas reduce in groups; None where all agree."""
    axis_name: str | None = optimizer.__dict__.get(_DIFFERING_ALONG)
    return axis_name
