"""Gradient accumulation: each replica sums the gradients of several micro-batches until the update.

This module keeps the sums between micro-batches. A reducer, such as `AllReduce`, decides when replicas communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from keras_shardopt.backends import for_backend
from keras_shardopt.backends.active import placement, runtime
from keras_shardopt.backends.communicator import GradientState
from keras_shardopt.backends.user_warnings import warn
from keras_shardopt.numerics import Gradients, Tensor, Variable, dense, dtype_of, overwrites_variable
from keras_shardopt.update.context import StageContext
from keras_shardopt.update.options import CrossShardOptions
from keras_shardopt.update.row_weights import zero_without_rows
from keras_shardopt.update.step import Proceed, Stage, Step

# JAX only, because only there a `keras.distribution` can divide a variable among devices.
_layouts = for_backend({"jax": "keras_shardopt.backends.jax.placement"})

_NONE_YET = float("-inf")
"""The start of a maximum over micro-batches, used for float8 scales: their "gradient" is their next value."""


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
        self.num_steps = num_steps
        self._context = context
        # Set if DDP has already reduced the gradients of the latest micro-batch, because the sums do not show this.
        self._arrived_state: GradientState | None = None
        self._stacks_when_built = False
        self.stacked_along: str | None = None
        """JAX: the mesh axis of replicas, if all replicas' sums are stacked along a first dimension. Otherwise None."""
        self.snapshots: list[Variable] = []
        """Copies of variables that forward passes change (moving means), from before the first micro-batch."""
        self._counts_rows = counts_rows
        self.counter: Variable = None
        """The number of micro-batches so far in the accumulation window."""
        self.starts: Any = None
        """Whether the latest micro-batch was the first of its accumulation window: a bool or a tensor."""
        self.is_complete: Any = None
        """Whether the latest micro-batch was the last of its accumulation window."""
        self._share: Variable | None = None
        self._sums: list[Variable] = []
        self._variables: list[Variable] = []
        # Indices of variables: those that `apply` received in this window, those with a gradient, and those of the last
        # micro-batch. In traced steps, the first two sets only grow, because Python runs once per trace.
        self._given: set[int] = set()
        self._present: set[int] = set()
        self._given_last: set[int] = set()
        # Set by `decide`: whether the next micro-batch completes the accumulation window. None: the counter decides.
        self._ends: bool | None = None
        # The value last assigned to the counter, and its version then (any assignment changes the version).
        self._count = 0
        self._version: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_version": None}  # a copy has another counter variable, with separate versions

    @classmethod
    def from_options(cls, options: CrossShardOptions, context: StageContext) -> list[Stage]:
        """Return a list with this stage if `gradient_accumulation_steps` is greater than 1, otherwise an empty list."""
        num_steps = options.gradient_accumulation_steps
        if num_steps is None or num_steps == 1:
            return []
        return [cls(num_steps, options.uses_local_gradients, context)]

    @property
    def is_built(self) -> bool:
        """Whether `build` has created the variables."""
        return bool(self._sums)

    def build(self, variables: Sequence[Variable], add_variable: Callable[..., Variable]) -> None:
        """Create the variables that hold the sums of gradients. Later calls do nothing."""
        if self.is_built:
            return
        self._variables = list(variables)
        self.counter = add_variable(shape=(), initializer="zeros", dtype="int", name="micro_steps")
        if self._counts_rows:
            self._share = add_variable(shape=(), initializer="zeros", dtype="float32", name="accumulated_share")
        for i, variable in enumerate(variables):
            # Sum half-precision gradients in float32. Sums in half precision would lose digits.
            dtype = dtype_of(variable)
            dtype = "float32" if dtype in ("float16", "bfloat16") and not overwrites_variable(variable) else dtype
            layout = None if _layouts is None else _layouts.layout_of(variable)
            arguments = {"dtype": dtype, "layout": layout, "name": f"accumulated_gradient_{i}"}
            self._sums.append(add_variable(shape=variable.shape, initializer="zeros", **arguments))
        if self._context.lays_out_state:
            placement.place(self._sums, "sharded")
        if self._stacks_when_built:
            self.stack()

    @property
    def is_stacked(self) -> bool:
        """Whether gradients arrive stacked along a first dimension, one entry per replica."""
        return self.stacked_along is not None

    @property
    def share(self) -> Any:
        """This replica's share of the rows, averaged over the accumulation window; 1 if not recorded."""
        return 1.0 if self._share is None else ops.convert_to_tensor(self._share) / self.num_steps

    @property
    def sums(self) -> list[Variable]:
        """The variables that hold the sums of gradients."""
        return self._sums

    @property
    def _sums_and_share(self) -> list[Variable]:
        return [*self._sums, *([] if self._share is None else [self._share])]

    def collect(self, step: Step, proceed: Proceed) -> None:
        """Add the gradients to the sums. After the last micro-batch of the accumulation window, continue the update."""
        runtime.no_compile(self._collect, step, proceed)

    def _collect(self, step: Step, proceed: Proceed) -> None:
        if self.ends_next and self._context.has_finished:
            # The last backward pass has already reduced the mean gradients of all micro-batches, so do not add them.
            self.starts, self.is_complete = self._count_up()
            self._ends = None
            proceed(step.replace(weight=1.0, row_share=1.0))
            return
        stacked = None if step.is_reduced else self.stacked_along
        if not step.is_reduced and stacked is None:
            step = self.own(step)
        # `is_complete` is equal on all replicas, so all take the same branch of `runtime.cond`.
        is_complete, sums = self.add(step.grads, [self._context.position(v) for v in step.variables], step.row_share)

        if stacked is None:
            self._context.micro_batch(step, self.starts)

        def end(sums: Sequence[Tensor]) -> None:
            means, positions, share = self.means(sums)
            arrived, self._arrived_state = self._arrived_state, None
            whole = Step(means, [self._variables[i] for i in positions], arrived, step.is_reduced, row_share=share)
            proceed(whole.replace(replica_axis=stacked))

        # `written` omits the sums: JAX copies a branch's variables, so it would copy the sums in each micro-batch.
        runtime.cond(is_complete, end, sums, self._context.written)

    def own(self, step: Step) -> Step:
        """Multiply this replica's gradients by `Step.weight`, or by 0 without rows. Do not change reduced gradients."""
        if not isinstance(step.row_share, float) or step.row_share != 1:
            state = self._context.arrives(step)
            if state not in (GradientState.LOCAL, GradientState.LOCAL_PRESCALED):  # already reduced over replicas
                self._arrived_state = state
                return step
        return zero_without_rows(step)

    def stack(self) -> None:
        """From now on, expect gradients stacked along a first dimension, one entry per replica."""
        self._stacks_when_built = True
        if self.is_built and self.stacked_along is None:
            self.reset()
            self.stacked_along = placement.place(self._sums_and_share, "per_replica")

    @property
    def _replica_state(self) -> list[Variable]:
        return [*self._sums_and_share, *self.snapshots] if self.is_built else []

    def add(self, grads: Gradients, positions: Sequence[int], share: Any) -> tuple[Any, list[Tensor]]:
        """Add the gradients of one micro-batch.

        Args:
            grads: one tensor or None per position.
            positions: the positions of the variables among those of `build`.
            share: this replica's share of the rows of the batch.

        Returns:
            Whether the window is complete (a bool, or a scalar tensor equal on all replicas), and the sums.
        """
        self.starts, self.is_complete = starts, is_complete = self._count_up()
        self._ends = None
        present = {i: grad for i, grad in zip(positions, grads) if grad is not None}
        if not runtime.is_concrete(starts):
            self._warn_of_missing(positions)
        elif starts:
            self._given, self._present = set(), set()
        self._given.update(positions)
        self._given_last = set(positions)
        self._present.update(present)
        values = [self._addend(i, present.get(i)) for i in range(len(self._sums))]
        is_sum = [not overwrites_variable(v) for v in self._variables]
        runtime.add_n([v for v, s in zip(self._sums, is_sum) if s], [v for v, s in zip(values, is_sum) if s], starts)
        for total, value, summed in zip(self._sums, values, is_sum):
            if not summed:
                before = ops.convert_to_tensor(total)
                first = ops.full_like(before, _NONE_YET) if value is None else value
                total.assign(ops.where(starts, first, before if value is None else ops.maximum(before, value)))
        if self._share is not None:
            share = ops.cast(share, "float32")
            self._share.assign(ops.where(starts, share, ops.convert_to_tensor(self._share) + share))
        return is_complete, [ops.convert_to_tensor(v) for v in self._sums_and_share]

    def _count_up(self) -> tuple[Any, Any]:
        """Count a micro-batch. Return whether it is the first of an update, and whether it is the last."""
        is_known = runtime.version(self.counter) is not None
        if not is_known:
            before: Any = ops.copy(ops.convert_to_tensor(self.counter))
        elif runtime.version(self.counter) == self._version:
            before = self._count  # reading the counter from a GPU would wait for the GPU
        else:
            before = int(ops.convert_to_numpy(self.counter))
        is_over = self._ends
        if is_over is None:
            is_over = before + 1 == self.num_steps if is_known else ops.equal(before + 1, self.num_steps)
        if not is_known:
            self.counter.assign(ops.where(is_over, ops.zeros_like(before), before + 1))
            return ops.equal(before, 0), is_over
        self._count = 0 if is_over else before + 1
        self.counter.assign(self._count)
        self._version = runtime.version(self.counter)
        return before == 0, is_over

    @property
    def ends_next(self) -> bool:
        """Whether the next micro-batch completes the accumulation window; False in compiled steps."""
        if self._ends is not None:
            return self._ends
        version = runtime.version(self.counter)
        return version is not None and version == self._version and self._count + 1 == self.num_steps

    def mean_with(self, counts: bool) -> Callable[[int, Tensor | None], Tensor | None]:
        """Return a function that computes a variable's mean gradient over micro-batches, including the last gradient.

        The function takes the variable's position and this last gradient, or None.

        Args:
            counts: bool. Whether this replica has rows in the last micro-batch.
        """
        before = set() if self._count == 0 else set(self._present)

        def mean(i: int, grad: Tensor | None) -> Tensor | None:
            if grad is not None and not counts:
                grad = ops.zeros_like(grad)
            value = self._addend(i, grad)
            if i in before:
                total = ops.convert_to_tensor(self._sums[i])
                return self._mean(i, total if value is None else total + value)
            return None if value is None else self._mean(i, value)

        return mean

    @property
    def num_taken(self) -> int:
        """The number of micro-batches so far in the accumulation window, as an int."""
        return int(ops.convert_to_numpy(self.counter)) if self.is_built else 0

    def decide(self, ends: bool) -> None:
        """Set whether the next micro-batch completes the accumulation window, instead of counting to `num_steps`."""
        self._ends = ends

    def _is_trained(self, i: int) -> bool:
        return bool(getattr(self._variables[i], "trainable", True))

    def _warn_of_missing(self, positions: Sequence[int]) -> None:
        missing = [i for i in sorted(self._given - set(positions)) if self._is_trained(i)]
        if missing:
            names = [getattr(self._variables[i], "path", str(i)) for i in missing]
            warn(
                "All compiled micro-batches should train the same variables. If all micro-batches of an update omit a "
                "variable, its gradient is 0, but momentum and weight decay still change the variable. Received: "
                f"micro-batches without {names}, after others with them. Use an optimizer for each set of variables.",
            )

    def _addend(self, i: int, grad: Tensor | None) -> Tensor | None:
        if grad is None:
            return None
        variable = self._variables[i]
        return ops.cast(dense(grad, variable), dtype_of(self._sums[i]))

    def means(self, sums: Sequence[Tensor]) -> tuple[list[Tensor | None], list[int], Any]:
        """Return the means over a complete accumulation window, from the sums that `add` returned.

        Returns:
            The mean gradient of each variable (None if it has no gradient), the variables' positions, and the mean
            `row_share`, this replica's share of the rows.
        """
        # Drop variables of layers that were frozen during the accumulation window.
        positions = sorted(i for i in self._given if i in self._given_last or self._is_trained(i))
        found = [self._mean(i, sums[i]) if i in self._present else None for i in positions]
        share = 1.0 if self._share is None else sums[-1] / self.num_steps
        return found, positions, share

    def _mean(self, i: int, total: Tensor) -> Tensor:
        variable = self._variables[i]
        if overwrites_variable(variable):
            # If no micro-batch of a compiled step had a value for this variable, the variable keeps its present value.
            return ops.where(ops.equal(total, _NONE_YET), ops.convert_to_tensor(variable), total)
        return ops.cast(total / self.num_steps, dtype_of(variable))

    def reset(self) -> None:
        """Discard the unfinished accumulation window. The next micro-batch overwrites the sums."""
        if self.is_built:
            self.counter.assign(ops.zeros(self.counter.shape, self.counter.dtype))


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
