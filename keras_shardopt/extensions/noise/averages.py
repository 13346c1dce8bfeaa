"""Moving averages of gradient noise, in units of parts (of a batch), batches or rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras import ops

from keras_shardopt.numerics import Tensor, Variable
from keras_shardopt.update.trainer_context import current_share


class NoiseAverages:
    """The moving averages of `GradientNoise`. "Part" means a replica's batch or, on a single replica, a micro-batch."""

    def __init__(self, momentum: float) -> None:
        self._momentum = momentum
        self._num_parts = self._num_micro_batches = 1
        self._averages: Variable = (0.0, 0.0, 0.0)
        # With accumulation, two sums over micro-batches: the squared norms (on a single replica), and the row counts.
        self._window: Variable = None

    def check(self, optimizer: Any) -> None:
        """Raise ValueError if the options of a `CrossShard` do not fit the formulas of `GradientNoise`."""
        unsupported = (optimizer.shard_state, optimizer.group_assignment, optimizer.extensions)
        if any(unsupported) or optimizer.reduction == "sum":
            raise ValueError(
                "`GradientNoise` needs the mean of whole gradients over all replicas. It does not support "
                '`shard_state`, `extensions`, `group_assignment` or `reduction="sum"`. '
                f"Received: {optimizer!r}. Remove these options, or `GradientNoise`."
            )
        window = optimizer._options.gradient_accumulation_steps  # ignore accumulation in inner optimizers
        self._num_micro_batches = window or 1

    def build(self, add_variable: Callable[..., Variable]) -> None:
        """Create the variables that hold the averages."""
        # Moving averages of $|G|^2$, $S$, $S b$ (see `GradientNoise`). All start at 0, so the biases cancel in ratios.
        self._averages = add_variable(shape=(3,), initializer="zeros", dtype="float32", name="gradient_noise")
        if self._num_micro_batches > 1:
            self._window = add_variable(shape=(2,), initializer="zeros", dtype="float32", name="noise_of_window")

    def add_micro_batch(self, square: Tensor | float, starts: Any) -> None:
        """Add a micro-batch's squared gradient norm (`square`) and row count to sums; begin new sums if `starts`."""
        now = ops.stack([ops.cast(square, "float32"), _num_rows()])
        self._window.assign(ops.where(starts, now, ops.convert_to_tensor(self._window) + now))

    def mean_of_parts(self, square: Callable[[], Tensor], num_replicas: int) -> tuple[Tensor, Tensor]:
        """Return the squared norm of this replica's gradient, and the number of its rows (0 if unknown).

        On a single replica, both are means over its micro-batches. Otherwise, `square` computes the squared norm.
        """
        window: Any = None if self._window is None else ops.convert_to_tensor(self._window)
        has_parts = num_replicas == 1 and window is not None
        self._num_parts = self._num_micro_batches if has_parts else num_replicas
        rows = _num_rows() * self._num_micro_batches
        if window is not None:  # the sums stay 0 on JAX if the gradients of all replicas are stacked
            rows = ops.where(window[1] > 0, window[1], rows)
        return window[0] / self._num_parts if has_parts else square(), rows / self._num_parts

    def update(self, measured: Sequence[Tensor], mean_square: Tensor) -> None:
        """Update the moving averages with the norms of one update.

        Args:
            measured: means over replicas: squared norm of a gradient, unevenness of rows (> 0: skip), number of rows.
            mean_square: the squared norm of the mean gradient.
        """
        (mean, uneven, rows), parts = measured, self._num_parts
        signal, noise = parts * mean_square - mean, parts * (mean - mean_square)
        now = ops.stack([signal, noise, noise * rows]) / max(parts - 1, 1)
        before = ops.convert_to_tensor(self._averages)
        self._averages.assign(before + ops.where(uneven > 0, 0.0, (1 - self._momentum) * (now - before)))

    def in_parts(self) -> float:
        """Return the noise scale as a number of parts; NaN with one part, or if the estimate of $|G|^2$ is not > 0."""
        return self._ratios()[0]

    def in_batches(self) -> float:
        """Return the noise scale in batches of an update."""
        return self.in_parts() / self._num_parts

    def in_rows(self) -> float:
        """Return the noise scale in rows. NaN if the number of rows is unknown."""
        return self._ratios()[1] or float("nan")

    def _ratios(self) -> tuple[float, float]:
        averages = ops.convert_to_numpy(ops.convert_to_tensor(self._averages))
        signal, noise, rows = (float(value) for value in averages)
        return (noise / signal, rows / signal) if signal > 0 else (float("nan"), float("nan"))


def _num_rows() -> Tensor:
    """Return the number of rows of this step on all replicas; 0 if unknown."""
    share = current_share()
    return ops.cast(0 if share is None else share.global_batch_size, "float32")
