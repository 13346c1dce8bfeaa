"""Random numbers that differ between ranks, drawn from seeds that are equal on all of them.

All ranks are seeded alike, so that their models start equal, and would then draw the same dropout mask and the same
noise for the first row of each. So once a rank trains, a multiple of its number is added to every seed that is drawn
from a generator, and to the seed of PyTorch's own. The states of generators stay equal on all ranks: files and backups
hold what one process would have, and fit any number of ranks. Rank 0 draws what a single process draws.

A seed that is a number is left alone, as that is what initializers of weights have.

Private names of Keras touched here (a test holds each of them):
    `draw_seed` in `keras.src.backend.torch.random` and `.image` - gives them the seed of what they draw.
"""

from __future__ import annotations

from typing import Any

import torch
from keras.src.backend.torch import image as torch_image
from keras.src.backend.torch import random as torch_random

_BETWEEN_RANKS = 0x9E3779B1

_draw_seed_in_keras = torch_random.draw_seed

# The ranks among which numbers differ, and what PyTorch's generator was seeded with for that.
_ranks: Any = None
_seeded_with: int | None = None


def draw_apart(ranks: Any) -> None:
    """From now on this rank draws other numbers than the others. Doing it twice changes nothing.

    Args:
        ranks: the ranks that train together (`torch_distributed.Ranks`).
    """
    global _ranks
    _ranks = ranks
    torch_random.draw_seed = torch_image.draw_seed = _draw_seed
    # Not rank 0's, which has drawn from it. And not one that was seeded for this already, here or before a restart.
    if ranks.replica_id and torch.initial_seed() != _seeded_with:
        torch.manual_seed((torch.initial_seed() + ranks.replica_id * _BETWEEN_RANKS) % 2**63)
        note_seed()


def note_seed() -> None:
    """Says that PyTorch's generator is seeded for this rank as it is: by `draw_apart`, or from a backup."""
    global _seeded_with
    _seeded_with = torch.initial_seed()


def _draw_seed(seed: Any) -> Any:
    """Stands in for Keras' function of that name."""
    drawn = _draw_seed_in_keras(seed)
    if isinstance(seed, int) or not _ranks.are_current() or not _ranks.replica_id:
        return drawn
    first, second = drawn
    return (int(first) + _ranks.replica_id * _BETWEEN_RANKS) % 2**32, int(second)
