"""Updates weights in one pass over memory, on backends with fused kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from keras_shardopt.backends import for_backend
from keras_shardopt.backends.active import runtime
from keras_shardopt.numerics import Gradients, Optimizer, Variable
from keras_shardopt.update.context import StageContext
from keras_shardopt.update.options import CrossShardOptions, HasOptions
from keras_shardopt.update.step import Proceed, Stage, Step
from keras_shardopt.wrapping.chain import children

# PyTorch only: kernels that update weights in one pass over memory.
_kernels = for_backend({"torch": "keras_shardopt.kernels.torch.fused"})


class FusedUpdate(Stage):
    """Runs Keras' built-in optimizers with PyTorch's fused kernels, or in pieces that fit into the CPU's cache."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._innermost: list[tuple[Any, bool]] = []
        """Each optimizer with an update rule, and whether its results must be bitwise identical to Keras'."""

    @classmethod
    def from_options(cls, options: CrossShardOptions, context: StageContext) -> list[Stage]:
        return [] if _kernels is None else [cls(context)]

    def build(self, variables: Sequence[Variable], add_variable: Callable[..., Variable]) -> None:
        """Find the optimizers that wrap no other optimizer, because only these have an update rule."""
        # Fused kernels round the last elements of an array differently. With `shard_state`, arrays are slices, and the
        # number of replicas decides where they end. If results must not depend on this number, reproduce Keras'
        # arithmetic.
        optimizer = self._context.optimizer
        varies = optimizer.shard_state and any(extension.keeps_bits for extension in optimizer.extension_stages)
        self._innermost = [
            (leaf, exactly)
            for leaf, exactly in _leaves(optimizer, varies)
            # Use kernels for an optimizer inside a wrapper, because kernels also multiply by the wrapper's factor.
            if leaf is not optimizer.inner or (_kernels and _kernels.is_faster(leaf, exactly, variables))
        ]

    def commit(self, step: Step, proceed: Proceed) -> None:
        self.run(step.grads, proceed, step)

    def run(self, grads: Gradients, update: Callable[..., None], *args: Any) -> None:
        """Call `update(*args)`, with fused kernels in place of the update rules that such kernels support."""
        # In a traced step, use Keras' code for each optimizer whose results must be bitwise identical to Keras'.
        is_concrete = not self._innermost or runtime.is_concrete(grads)
        chosen = [(leaf, exactly) for leaf, exactly in self._innermost if is_concrete or not exactly]
        if _kernels is not None and any(_kernels.is_elementwise(leaf) for leaf, _ in chosen):
            _kernels.fused(chosen, update, *args)
        else:
            update(*args)


def _leaves(optimizer: Optimizer, exactly: bool) -> Iterator[tuple[Any, bool]]:
    """Yield each optimizer that wraps no other, and whether its results must be bitwise identical to Keras'."""
    exactly = exactly or (isinstance(optimizer, HasOptions) and optimizer._options.speed.fused is False)
    inside = children(optimizer)
    if not inside:
        yield optimizer, exactly
    for part in inside:
        yield from _leaves(part, exactly)
