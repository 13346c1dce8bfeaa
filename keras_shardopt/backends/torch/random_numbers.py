"""Random numbers that differ between ranks in training steps, drawn from seeds that are equal on all of them.

All ranks are seeded alike, so that their models start equal, and would then draw the same dropout mask and the same
noise for the first row of each. So in a training step a multiple of the rank's number is added to every seed that is
drawn from a generator. A training step is a `train_step` of a model in `fit` and `train_on_batch`, a step of
`optimize_loss`, and the call of a layer in training mode. Elsewhere (callbacks, loading of data, whatever a program
does between steps) ranks draw the same: an order by which they divide rows among them must be one. The states of
generators stay equal on all ranks: files and backups hold what one process would have, and fit any number of ranks.
Rank 0 draws what a single process draws.

PyTorch's own generator, from which Keras' dropout without a seed draws, has another seed on each rank from then on,
in training steps and elsewhere.

Where batches are cut into parts (`VirtualReplicas`), the number of the part takes the place of the
rank's, and each part draws from the states with which the batch began, whichever rank works on it. PyTorch's own
generator is seeded for each part by its seed, the update and the part, and then put back.

A seed that is a number is left unchanged, as that is what initializers of weights have.

Private names of Keras touched here (a test holds each of them):
    `draw_seed` in `keras.src.backend.torch.random` and `.image` - gives them the seed of what they draw.
    `keras.src.backend.common.global_state`, "current_call_ctx", `CallContext.training` - whether, and how, a layer is
        being called.
    `keras.src.random.seed_generator.global_seed_generator` - that of what has no seed.
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

# The ranks among which numbers differ, what PyTorch's generator was seeded with for that, and whether this thread is in
# a training step.
_ranks: Any = None
_seeded_with: int | None = None
_is_in_step: contextvars.ContextVar[bool] = contextvars.ContextVar("is_in_step", default=False)

# The part of a batch that this thread works on, where batches are cut into parts.
_part: contextvars.ContextVar[int | None] = contextvars.ContextVar("part", default=None)


def draw_apart(ranks: Any, models: Sequence[Any]) -> None:
    """From now on this rank draws other numbers than the others in training steps. Doing it twice changes nothing.

    Args:
        ranks: the ranks that train together (`TorchProcessGroup`).
        models: the models whose steps these are.
    """
    global _ranks
    _ranks = ranks
    install("randomness")
    for model in models:
        mix_in(model, _DrawsApart)
    # Not rank 0's, which has drawn from it. And not one that was seeded for this already, here or before a restart.
    if ranks.replica_id and torch.initial_seed() != _seeded_with:
        torch.manual_seed((torch.initial_seed() + ranks.replica_id * _BETWEEN_RANKS) % 2**63)
        note_seed()


def note_seed() -> None:
    """Says that PyTorch's generator is seeded for this rank as it is: by `draw_apart`, or from a backup."""
    global _seeded_with
    _seeded_with = torch.initial_seed()


def rng_state() -> Any:
    """The state of PyTorch's own generators, as JSON has it."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [state.tolist() for state in [torch.get_rng_state(), *devices]]


def set_rng_state(state: Any, is_own: bool = True) -> None:
    """Takes back what `rng_state` returned, on this rank (`is_own`) or on rank 0."""
    global _seeded_with
    on_cpu, *on_devices = [torch.tensor(each, dtype=torch.uint8) for each in state]
    torch.set_rng_state(on_cpu)
    if on_devices and len(on_devices) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(on_devices)
    note_seed()
    if not is_own:
        _seeded_with = None  # the next `draw_apart` makes it this rank's


@contextlib.contextmanager
def as_parts() -> Iterator[Callable[[int, Sequence[int]], None]]:
    """Within it this rank works on parts of a batch.

    Yields:
        A function that is called before each part, with its number and what tells this batch from others.
    """
    install("randomness")
    rank = _ranks.replica_id if _ranks is not None and _ranks.are_current() else 0
    seed = (torch.initial_seed() - rank * _BETWEEN_RANKS) % 2**63  # that of rank 0
    token = _part.set(None)

    def begin(part: int, batch: Sequence[int]) -> None:
        _part.set(part)
        (own,) = np.random.SeedSequence([seed, *batch, part]).generate_state(1, np.uint64).tolist()
        # Not `torch.manual_seed`, which looks at the stack for each kind of device: a millisecond.
        torch.default_generator.manual_seed(own % 2**63)
        if torch.cuda.is_available():
            torch.cuda.manual_seed_all(own % 2**63)

    try:
        with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
            yield begin
    finally:
        _part.reset(token)


def global_seed_state() -> Any:
    """The state of the generator from which comes what has no seed."""
    return global_seed_generator().state


def in_step(function: FunctionT) -> FunctionT:
    """The function as a training step."""

    # Not compiled itself; what it calls is.
    @functools.wraps(function)
    @torch.compiler.disable(recursive=False)
    def step(*args: Any, **kwargs: Any) -> Any:
        with _step():
            return function(*args, **kwargs)

    return step  # type: ignore[return-value]


class _DrawsApart(keras.Model):
    """A model with a `train_step` in which ranks draw different numbers."""

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
    """Stands in for Keras' function of that name."""
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
