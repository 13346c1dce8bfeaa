"""Gradient accumulation: each replica sums the gradients of several micro-batches until the update.

A reducer, such as `AllReduce`, decides when replicas communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_shardopt.backends.active import placement, runtime
from keras_shardopt.backends.communicator import Communicator, GradientState
from keras_shardopt.backends.user_warnings import warn
from keras_shardopt.numerics import Tensor, Variable
from keras_shardopt.update.context import StageContext
from keras_shardopt.update.gradient_sums import GradientSums
from keras_shardopt.update.options import CrossShardOptions
from keras_shardopt.update.row_weights import zero_without_rows
from keras_shardopt.update.step import Proceed, Stage, Step
from keras_shardopt.update.window import Window


class Accumulation(Stage):
    """Sums gradients over micro-batches. After the last micro-batch, continues the update with the mean gradients.

    The micro-batches of one update form an *accumulation window*.

    Args:
        num_steps: int >= 2. Number of micro-batches per window.
        counts_rows: bool. Whether to average this replica's share of the rows (`Step.row_share`) too.
        context: the interface of the optimizer.
    """

    _allows_overlap = True  # a window's last backward pass sends the mean over its micro-batches

    def __init__(self, num_steps: int, counts_rows: bool, context: StageContext) -> None:
        self.window = Window(num_steps)
        """Counts the micro-batches."""
        self.sums = GradientSums(self.window, counts_rows)
        """Adds their gradients."""
        self._context = context
        # Set if DDP has already reduced the gradients of the latest micro-batch, because the sums do not show this.
        self._arrived_state: GradientState | None = None
        self._has_warned = False
        self._stacks_when_built = False
        self.stacked_along: str | None = None
        """JAX: the mesh axis of replicas, if all replicas' sums are stacked along a first dimension. Otherwise None."""

    @classmethod
    def from_options(cls, options: CrossShardOptions, context: StageContext) -> list[Stage]:
        """Return a list with this stage if `gradient_accumulation_steps` is greater than 1, otherwise an empty list."""
        num_steps = options.gradient_accumulation_steps
        if num_steps is None or num_steps == 1:
            return []
        return [cls(num_steps, options.uses_local_gradients, context)]

    def _check_outside(self, outer: Any) -> None:
        name = type(outer).__name__
        raise ValueError(
            f"`{name}` must be inside a `CrossShard` that accumulates, not around it. Outside, replicas would have "
            "to communicate for each micro-batch to decide whether it overflows. "
            f"Received: inner_optimizer={outer.inner!r}. "
            f"Use `CrossShard({name}(inner_optimizer), gradient_accumulation_steps=...)`."
        )

    def build(self, variables: Sequence[Variable], add_variable: Callable[..., Variable]) -> None:
        """Create the variables that hold the sums of gradients. Later calls do nothing."""
        if self.window.counter is not None:
            return
        self.window.build(add_variable)
        self.sums.build(variables, add_variable)
        if self._context.lays_out_state:
            placement.place(self.sums.totals, "sharded")
        if self._stacks_when_built:
            self.stack()

    def stack(self) -> None:
        """From now on, expect gradients stacked along a first dimension, one entry per replica."""
        self._stacks_when_built = True
        if self.window.counter is not None and self.stacked_along is None:
            self.reset()
            self.stacked_along = placement.place(self.sums.state, "per_replica")

    @property
    def _replica_state(self) -> list[Variable]:
        return [*self.sums.state, *self.window.snapshots]

    def collect(self, step: Step, proceed: Proceed) -> None:
        """Add the gradients to the sums. After the last micro-batch of the accumulation window, continue the update."""
        runtime.no_compile(self._collect, step, proceed)

    def _collect(self, step: Step, proceed: Proceed) -> None:
        if self.window.ends_next and self._context.pipeline.reducer.has_finished:
            # The last backward pass has already reduced the mean gradients of all micro-batches, so do not add them.
            self.window.count()
            proceed(step.replace(weight=1.0, row_share=1.0))
            return
        stacked = None if step.is_reduced else self.stacked_along
        if not step.is_reduced and stacked is None:
            step = self.own(step)
        positions = self._context.positions(step.variables)
        self.window.count()
        sums = self.sums.add(step.grads, positions, step.row_share)

        if stacked is None:
            self._context.pipeline.micro_batch(step, self.window.starts)

        def end(sums: Sequence[Tensor]) -> None:
            means, variables, share = self.sums.means(sums)
            arrived, self._arrived_state = self._arrived_state, None
            proceed(Step(means, variables, arrived, step.is_reduced, row_share=share, replica_axis=stacked))

        # `written` omits the sums: JAX copies a branch's variables, so it would copy the sums in each micro-batch.
        runtime.cond(self.window.is_complete, end, sums, self._context.written)

    def own(self, step: Step) -> Step:
        """Multiply this replica's gradients by `Step.weight`, or by 0 without rows. Do not change reduced gradients."""
        if not isinstance(step.row_share, float) or step.row_share != 1:
            state = self._context.state_finder.find(step, self._context.communicator())
            if not state.is_local:  # already reduced over replicas
                self._arrived_state = state
                return step
        return zero_without_rows(step)

    def local(self, step: Step, comm: Communicator) -> Step:
        """Warn, once, of gradients that arrive reduced, because each micro-batch then communicates."""
        state = step.gradient_state
        if comm.num_replicas > 1 and state is not None and not state.is_local and not self._has_warned:
            self._has_warned = True
            optimizer = self._context.optimizer
            warn(
                f"{optimizer!r} accumulates gradients that are already averaged over the replicas. Updates are "
                f"correct, but each micro-batch communicates. {optimizer.state_finder.advice(state)}"
            )
        return step

    def reset(self) -> None:
        """Discard the unfinished accumulation window. The next micro-batch overwrites the sums."""
        self.window.reset()


def refuse_accumulation_inside(leaves: Sequence[keras.optimizers.Optimizer], num_steps: int | None) -> None:
    """Raise ValueError if both `CrossShard` (`num_steps`) and an optimizer in it (`leaves`) accumulate gradients."""
    for leaf in leaves:
        theirs = getattr(leaf, "gradient_accumulation_steps", None)
        if num_steps and theirs:
            raise ValueError(
                "`gradient_accumulation_steps` must be given to `CrossShard` or to the inner optimizer, not to both, "
                f"because updates would happen only every {num_steps} * {theirs} steps. "
                f"Received: gradient_accumulation_steps={num_steps}, and "
                f"{type(leaf).__name__}(gradient_accumulation_steps={theirs}) inside. "
                f"Use `CrossShard({type(leaf).__name__}(...), gradient_accumulation_steps={num_steps})`."
            )
