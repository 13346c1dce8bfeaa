"""Updates in one pass over memory, where the backend has a way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras_shardopt.backends.active import runtime
from keras_shardopt.update.options import CrossShardOptions
from keras_shardopt.update.step import Proceed, Stage, Step
from keras_shardopt.wrapping.chain import base_optimizers


class FusedUpdate(Stage):
    """Lets Keras' own optimizers inside update with PyTorch's kernels.

    Args:
        innermost: the optimizers with an update rule.
    """

    def __init__(self, innermost: Callable[[], Sequence[Any]]) -> None:
        self._innermost = innermost

    @classmethod
    def from_options(cls, options: CrossShardOptions, optimizer: Any) -> list[Stage]:
        """The stage, where the options ask for it."""
        return [] if options.fused is False else [cls(lambda: base_optimizers(optimizer))]

    def commit(self, step: Step, proceed: Proceed) -> None:
        """The update, in one pass."""
        runtime.update_fused(self._innermost(), proceed, step)
