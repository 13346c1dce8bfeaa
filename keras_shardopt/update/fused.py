"""Updates in one pass over memory, where the backend has a way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras_shardopt.backends import for_backend
from keras_shardopt.backends.active import runtime
from keras_shardopt.numerics import Variable
from keras_shardopt.update.options import CrossShardOptions
from keras_shardopt.update.step import Proceed, Stage, Step
from keras_shardopt.wrapping.chain import base_optimizers

# Where there are kernels that update in one pass.
_kernels = for_backend({"torch": "keras_shardopt.backends.torch.fused"})


class FusedUpdate(Stage):
    """Lets Keras' own optimizers inside update with PyTorch's kernels, or in pieces that stay in the CPU's cache.

    Args:
        optimizer: the `CrossShard`.
        exactly: whether to keep Keras' arithmetic, bit for bit.
    """

    def __init__(self, optimizer: Any, exactly: bool) -> None:
        self._optimizer = optimizer
        self._exactly = exactly
        self._innermost: list[Any] = []

    @classmethod
    def from_options(cls, options: CrossShardOptions, optimizer: Any) -> list[Stage]:
        """The stage, where the options ask for it."""
        return [] if _kernels is None else [cls(optimizer, options.fused is False)]

    def build(self, variables: Sequence[Variable], add_variable: Callable[..., Variable]) -> None:
        """Finds the optimizers with an update rule, once."""
        self._innermost = base_optimizers(self._optimizer)

    def commit(self, step: Step, proceed: Proceed) -> None:
        """The update, in one pass."""
        compiles = self._exactly and not runtime.is_concrete(step.grads)  # which has a way of its own
        if _kernels is not None and not compiles and any(map(_kernels.is_elementwise, self._innermost)):
            _kernels.fused(self._innermost, self._exactly, proceed, step)
        else:
            proceed(step)
