"""Names of summaries, their TensorBoard tags, and functions that read current learning rates and loss scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras import ops

from keras_shardopt.numerics import Optimizer
from keras_shardopt.wrapping.chain import base_optimizers

SUMMARIES = [
    "learning_rate",
    "gradients",
    "gradient_norm",
    "global_gradient_norm",
    "variables",
    "variable_norm",
    "larc_summaries",
    "loss_scale",
]
"""The names of summaries that users can pass."""

STAGES: dict[str, tuple[Callable[[], Any], dict[str, str]]] = {}
"""For each summary that a `Stage` measures: a function that creates the stage, and its attribute for each tag."""


def register(name: str, made: Callable[[], Any], tags: dict[str, str]) -> None:
    """Register a summary that a `Stage` in the outermost `CrossShard` measures. See `STAGES` for `made` and `tags`."""
    SUMMARIES.append(name)
    STAGES[name] = made, tags


DEFAULT_SUMMARIES = ("learning_rate", "global_gradient_norm", "loss_scale")
"""The names of summaries that `summaries=None` selects."""

PREFIX = "Loss_Optimization/"
LARC_TAGS = ("larc_clip_on", "larc_grad_update", "larc_final_lr")


def checked_summaries(summaries: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names without duplicates, or `DEFAULT_SUMMARIES` for None. Invalid names raise an error."""
    if summaries is None:
        return DEFAULT_SUMMARIES
    if isinstance(summaries, str) or not isinstance(summaries, (list, tuple, set, frozenset)):
        raise TypeError(f"`summaries` must be a list of names, or None. Received: summaries={summaries!r}")
    # "global_gradient_norm" also records the norm after clipping, so OpenSeq2Seq's name for that norm selects it.
    names = [
        "global_gradient_norm" if name == "global_clipped_gradient_norm" else name for name in map(_word, summaries)
    ]
    unknown = [name for name in names if name not in SUMMARIES]
    if unknown:
        raise ValueError(f"`summaries` may contain only {SUMMARIES}. Received: the unknown names {unknown}.")
    return tuple(name for name in SUMMARIES if name in names)


def _word(name: Any) -> str:
    return name if isinstance(name, str) else type(name).__name__


def rates(optimizer: Optimizer) -> dict[str, float]:
    """Return the current learning rates, under the tags that Keras uses."""
    found = base_optimizers(optimizer)
    tags = [rate_tag(leaf, len(found)) for leaf in found]
    return {tag: float(ops.convert_to_numpy(leaf.learning_rate)) for tag, leaf in zip(tags, found)}


def dynamic_loss_scale(optimizer: Optimizer) -> float | None:
    """Return the current dynamic loss scale, or None without one."""
    scale = getattr(optimizer, "loss_scale", None)
    return None if scale is None or isinstance(scale, (int, float)) else float(ops.convert_to_numpy(scale))


def rate_tag(leaf: Any, num_leaves: int) -> str:
    """Return the tag of an optimizer's learning rate, with the optimizer's name if several optimizers exist."""
    return "learning_rate" if num_leaves == 1 else f"learning_rate_{leaf.name}"
