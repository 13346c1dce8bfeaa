"""Random numbers that differ between ranks in training steps, drawn from equal seeds.

All ranks have equal seeds, so their models start equal. Each rank would then draw the same dropout mask and noise for
its own rows. In training steps, a multiple of the rank is therefore added to every seed drawn from a generator. A
training step is `train_step` in `fit` and `train_on_batch`, a step of `optimize_loss`, or the call of a layer in
training mode. Elsewhere, ranks draw equal numbers: they must divide rows in one order, for example. Integer seeds are
unchanged, because initializers of weights have them.

Generator states remain equal on all ranks, so files and backups hold the states of a single process, for any number of
ranks. Rank 0 draws the numbers of a single process. PyTorch's own generator, used by Keras' dropout without a seed,
gets a different seed on each rank, everywhere.

If batches are split into parts (`VirtualReplicas`), the number of the part replaces the rank.

Private names of Keras touched here (a test checks that each exists):
    `draw_seed` in `keras.src.backend.torch.random` and `.image` - returns the seed for each draw.
    `keras.src.backend.common.global_state`, "current_call_ctx", `CallContext.training` - whether a layer is called, and
        in training mode.
    `keras.src.random.seed_generator.global_seed_generator` - the generator for calls without a seed.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import torch
from keras.src.backend.common import global_state
from keras.src.backend.torch import random as torch_random
from keras.src.random.seed_generator import global_seed_generator

from keras_shardopt.backends.models import mix_in
from keras_shardopt.backends.patches import install
from keras_shardopt.numerics import FunctionT

_BETWEEN_RANKS = 0x9E3779B1

_draw_seed_in_keras = torch_random.draw_seed

# The ranks that draw different random numbers, the seed that PyTorch's generator got on this rank, and whether this
# thread is in a training step.
_ranks: Any = None
_seeded_with: int | None = None
_is_in_step: contextvars.ContextVar[bool] = contextvars.ContextVar("is_in_step", default=False)

# The part of a batch that this thread computes, if batches are split into parts.
_part: contextvars.ContextVar[int | None] = contextvars.ContextVar("part", default=None)


def seed_per_rank(ranks: Any, models: Sequence[Any]) -> None:
    """Make each of `ranks` draw different random numbers in training steps of `models`. Idempotent."""
    global _ranks
    _ranks = ranks
    install("randomness")
    for model in models:
        mix_in(model, _DrawsPerRank)
    # Rank 0 keeps its seed. Give the generator of each other rank a new seed once, unless a backup has restored one.
    if ranks.replica_id and torch.initial_seed() != _seeded_with:
        torch.manual_seed((torch.initial_seed() + ranks.replica_id * _BETWEEN_RANKS) % 2**63)
        note_seed()


def note_seed() -> None:
    """Record that PyTorch's generator has a seed for this rank, so `seed_per_rank` does not seed it again."""
    global _seeded_with
    _seeded_with = torch.initial_seed()


def rng_state() -> Any:
    """Return the states of PyTorch's generators, as lists of ints for JSON."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [state.tolist() for state in [torch.get_rng_state(), *devices]]


def set_rng_state(state: Any, is_own: bool = True) -> None:
    """Restore PyTorch's generators to a `rng_state` of this rank (`is_own`) or of rank 0."""
    global _seeded_with
    on_cpu, *on_devices = [torch.tensor(each, dtype=torch.uint8) for each in state]
    torch.set_rng_state(on_cpu)
    if on_devices and len(on_devices) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(on_devices)
    note_seed()
    if not is_own:
        _seeded_with = None  # `seed_per_rank` then seeds again, so ranks differ


@contextlib.contextmanager
def as_parts() -> Iterator[Callable[[int, Sequence[int]], None]]:
    """Make random numbers in the block depend on the part of a batch instead of the rank.

    Yield a function to call before each part, with the number of the part, and ints that identify the batch.
    """
    install("randomness")
    rank = _ranks.replica_id if _ranks is not None and _ranks.are_current() else 0
    seed = (torch.initial_seed() - rank * _BETWEEN_RANKS) % 2**63  # rank 0's seed
    token = _part.set(None)

    def begin(part: int, batch: Sequence[int]) -> None:
        _part.set(part)
        (own,) = np.random.SeedSequence([seed, *batch, part]).generate_state(1, np.uint64).tolist()
        # Avoid `torch.manual_seed`: it takes 1 ms, because it inspects the stack for each kind of device.
        torch.default_generator.manual_seed(own % 2**63)
        if torch.cuda.is_available():
            torch.cuda.manual_seed_all(own % 2**63)

    try:
        with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
            yield begin
    finally:
        _part.reset(token)


def global_seed_state() -> Any:
    """Return the state of Keras' generator for calls without a seed."""
    return global_seed_generator().state


def in_step(function: FunctionT) -> FunctionT:
    """Mark a function as a training step, in which ranks draw different random numbers."""

    # torch.compile must skip this wrapper, but not the functions that it calls.
    @functools.wraps(function)
    @torch.compiler.disable(recursive=False)
    def step(*args: Any, **kwargs: Any) -> Any:
        with _step():
            return function(*args, **kwargs)

    return step  # type: ignore[return-value]


class _DrawsPerRank(keras.Model):
    """A mixin for models: `train_step` draws different random numbers on each rank."""

    @torch.compiler.disable(recursive=False)
    def train_step(self, data: Any) -> Any:
        with _step():
            return super().train_step(data)


@contextlib.contextmanager
def _step() -> Iterator[None]:
    token = _is_in_step.set(True)
    try:
        yield
    finally:
        _is_in_step.reset(token)


def _draw_seed(seed: Any) -> Any:
    """Replaces Keras' `draw_seed`. In training steps, adds a multiple of the rank, so ranks draw different numbers."""
    drawn = _draw_seed_in_keras(seed)
    number = _part.get()
    if number is None:
        number = _ranks.replica_id if _ranks is not None and _ranks.are_current() else 0
    if isinstance(seed, int) or not number:
        return drawn
    call = global_state.get_global_attribute("current_call_ctx")
    if not (_is_in_step.get() or getattr(call, "training", False)):
        return drawn
    first, second = drawn
    return (int(first) + number * _BETWEEN_RANKS) % 2**32, int(second)
