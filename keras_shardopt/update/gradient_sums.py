"""The sums of a replica's gradients over the micro-batches of an accumulation window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras import ops

from keras_shardopt.backends import for_backend
from keras_shardopt.backends.active import runtime
from keras_shardopt.backends.user_warnings import warn
from keras_shardopt.numerics import Gradients, Tensor, Variable, dense, dtype_of, overwrites_variable
from keras_shardopt.update.window import Window

# JAX only, because only there a `keras.distribution` can divide a variable among devices.
_layouts = for_backend({"jax": "keras_shardopt.backends.jax.placement"})

_NONE_YET = float("-inf")
"""The start of a maximum over micro-batches, used for float8 scales: their "gradient" is their next value."""


class GradientSums:
    """Adds the gradients of micro-batches, and divides the sums by the number of micro-batches.

    Args:
        window: counts the micro-batches.
        counts_rows: bool. Whether to average this replica's share of the rows (`Step.row_share`) too.
    """

    def __init__(self, window: Window, counts_rows: bool) -> None:
        self._window = window
        self._counts_rows = counts_rows
        self._share: Variable | None = None
        self.totals: list[Variable] = []
        """The variables that hold the sums of gradients."""
        self.variables: list[Variable] = []
        """The variables of the gradients."""
        # Indices of variables: those that `add` received in this window, those with a gradient, and those of the last
        # micro-batch. In traced steps, the first two sets only grow, because Python runs once per trace.
        self._given: set[int] = set()
        self._present: set[int] = set()
        self._given_last: set[int] = set()

    def build(self, variables: Sequence[Variable], add_variable: Callable[..., Variable]) -> None:
        """Create the variables that hold the sums of gradients."""
        self.variables = list(variables)
        if self._counts_rows:
            self._share = add_variable(shape=(), initializer="zeros", dtype="float32", name="accumulated_share")
        for i, variable in enumerate(variables):
            # Sum half-precision gradients in float32. Sums in half precision would lose digits.
            dtype = dtype_of(variable)
            dtype = "float32" if dtype in ("float16", "bfloat16") and not overwrites_variable(variable) else dtype
            layout = None if _layouts is None else _layouts.layout_of(variable)
            arguments = {"dtype": dtype, "layout": layout, "name": f"accumulated_gradient_{i}"}
            self.totals.append(add_variable(shape=variable.shape, initializer="zeros", **arguments))

    @property
    def state(self) -> list[Variable]:
        """All variables of this object: the sums of gradients, and perhaps the sum of the shares of the rows."""
        return [*self.totals, *([] if self._share is None else [self._share])]

    @property
    def share(self) -> Any:
        """This replica's share of the rows, averaged over the accumulation window; 1 if not recorded."""
        return self._mean_share(self._share)

    def _mean_share(self, total: Any) -> Any:
        return 1.0 if self._share is None else ops.convert_to_tensor(total) / self._window.num_steps

    def add(self, grads: Gradients, positions: Sequence[int], share: Any) -> list[Tensor]:
        """Add the gradients of the micro-batch that the window has just counted.

        Args:
            grads: one tensor or None per position.
            positions: the positions of the variables among those of `build`.
            share: this replica's share of the rows of the batch.

        Returns:
            The new values of `state`.
        """
        starts = self._window.starts
        present = {i: grad for i, grad in zip(positions, grads) if grad is not None}
        if not runtime.is_concrete(starts):
            self._warn_of_missing(positions)
        elif starts:
            self._given, self._present = set(), set()
        self._given.update(positions)
        self._given_last = set(positions)
        self._present.update(present)
        values = [self._addend(i, present.get(i)) for i in range(len(self.totals))]
        is_sum = [not overwrites_variable(v) for v in self.variables]
        runtime.add_n([v for v, s in zip(self.totals, is_sum) if s], [v for v, s in zip(values, is_sum) if s], starts)
        for total, value, summed in zip(self.totals, values, is_sum):
            if not summed:
                before = ops.convert_to_tensor(total)
                first = ops.full_like(before, _NONE_YET) if value is None else value
                total.assign(ops.where(starts, first, before if value is None else ops.maximum(before, value)))
        if self._share is not None:
            share = ops.cast(share, "float32")
            self._share.assign(ops.where(starts, share, ops.convert_to_tensor(self._share) + share))
        return [ops.convert_to_tensor(v) for v in self.state]

    def means(self, sums: Sequence[Tensor]) -> tuple[list[Tensor | None], list[Variable], Any]:
        """Return the means over a complete accumulation window, from the values that `add` returned.

        Returns:
            The mean gradients (None for a variable without a gradient), their variables, and the mean `row_share`, this
            replica's share of the rows.
        """
        # Drop variables of layers that were frozen during the accumulation window.
        positions = sorted(i for i in self._given if i in self._given_last or self._is_trained(i))
        found = [self._mean(i, sums[i]) if i in self._present else None for i in positions]
        return found, [self.variables[i] for i in positions], self._mean_share(sums[-1])

    def mean_with_last(self, counts: bool) -> Callable[[int, Tensor | None], Tensor | None] | None:
        """Return a function that computes a variable's mean gradient, if the next micro-batch is the last; else None.

        The function takes the variable's position and its gradient of this last micro-batch, or None.

        Args:
            counts: bool. Whether this replica has rows in the last micro-batch.
        """
        if not self._window.ends_next:
            return None
        before = set(self._present) if self._window.num_taken else set()

        def mean(i: int, grad: Tensor | None) -> Tensor | None:
            if grad is not None and not counts:
                grad = ops.zeros_like(grad)
            value = self._addend(i, grad)
            if i in before:
                total = ops.convert_to_tensor(self.totals[i])
                return self._mean(i, total if value is None else total + value)
            return None if value is None else self._mean(i, value)

        return mean

    def _addend(self, i: int, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else ops.cast(dense(grad, self.variables[i]), dtype_of(self.totals[i]))

    def _mean(self, i: int, total: Tensor) -> Tensor:
        variable = self.variables[i]
        if overwrites_variable(variable):
            # If no micro-batch of a compiled step had a value for this variable, the variable keeps its present value.
            return ops.where(ops.equal(total, _NONE_YET), ops.convert_to_tensor(variable), total)
        return ops.cast(total / self._window.num_steps, dtype_of(variable))

    def _is_trained(self, i: int) -> bool:
        return bool(getattr(self.variables[i], "trainable", True))

    def _warn_of_missing(self, positions: Sequence[int]) -> None:
        missing = [i for i in sorted(self._given - set(positions)) if self._is_trained(i)]
        if missing:
            names = [getattr(self.variables[i], "path", str(i)) for i in missing]
            warn(
                "All compiled micro-batches should train the same variables. If all micro-batches of an update omit a "
                "variable, its gradient is 0, but momentum and weight decay still change the variable. Received: "
                f"micro-batches without {names}, after others with them. Use an optimizer for each set of variables.",
            )
