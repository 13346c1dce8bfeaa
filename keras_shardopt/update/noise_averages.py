"""Estimates of how noisy gradients are, averaged over updates, and their units: parts of a batch, batches, or rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras import ops

from keras_shardopt.numerics import Tensor, Variable
from keras_shardopt.update.trainer_context import current_share


class NoiseAverages:
    """What `GradientNoise` keeps. The parts are the replicas, or the micro-batches of a single one.

    Args:
        momentum: how much of the averages so far is kept in each update.
    """

    def __init__(self, momentum: float) -> None:
        self._momentum = momentum
        self._num_parts = self._num_micro_batches = 1
        self._averages: Variable = (0.0, 0.0, 0.0)
        # With accumulation, of the window so far: the sum of squared norms, where there is one replica, and of rows.
        self._of_window: Variable = None

    def check(self, optimizer: Any) -> None:
        """Raises ValueError if a `CrossShard` makes other numbers of gradients than those of the formulas."""
        others = (optimizer.shard_state, optimizer.group_assignment, optimizer.sync_every, optimizer.virtual_replicas)
        if any(others) or optimizer.reduction == "sum":
            raise ValueError(
                "`GradientNoise` needs the mean of whole gradients over all replicas: no `shard_state`, `sync_every`, "
                f'`group_assignment`, `virtual_replicas` or `reduction="sum"`. Received: {optimizer!r}.'
            )
        window = optimizer._options.gradient_accumulation_steps  # of this optimizer, not of one inside it
        self._num_micro_batches = window or 1

    def build(self, add_variable: Callable[..., Variable]) -> None:
        """Makes the variables."""
        # Of $|G|^2$, of $S$, and of $S$ times $b$: as all start at 0, their ratios need no correction.
        self._averages = add_variable(shape=(3,), initializer="zeros", dtype="float32", name="gradient_noise")
        if self._num_micro_batches > 1:
            self._of_window = add_variable(shape=(2,), initializer="zeros", dtype="float32", name="noise_of_window")

    def add_micro_batch(self, square: Tensor | float, starts: Any) -> None:
        """Adds the squared norm of a micro-batch's gradient, and its rows, to those of the window."""
        now = ops.stack([ops.cast(square, "float32"), _num_rows()])
        self._of_window.assign(ops.where(starts, now, ops.convert_to_tensor(self._of_window) + now))

    def of_part(self, square: Callable[[], Tensor], num_replicas: int) -> tuple[Tensor, Tensor]:
        """Of the parts here the mean of the squared norms, and how many rows one has; 0 if nobody knows."""
        window: Any = None if self._of_window is None else ops.convert_to_tensor(self._of_window)
        has_parts = num_replicas == 1 and window is not None
        self._num_parts = self._num_micro_batches if has_parts else num_replicas
        rows = _num_rows() * self._num_micro_batches
        if window is not None:  # which saw no micro-batch where one program adds up those of all replicas
            rows = ops.where(window[1] > 0, window[1], rows)
        return window[0] / self._num_parts if has_parts else square(), rows / self._num_parts

    def update(self, told: Sequence[Tensor], of_mean: Tensor) -> None:
        """Takes in what the parts have together (see `local`), and the square of the norm of their mean."""
        (mean, uneven, rows), parts = told, self._num_parts
        signal, noise = parts * of_mean - mean, parts * (mean - of_mean)
        now = ops.stack([signal, noise, noise * rows]) / max(parts - 1, 1)
        before = ops.convert_to_tensor(self._averages)
        self._averages.assign(before + ops.where(uneven > 0, 0.0, (1 - self._momentum) * (now - before)))

    def in_parts(self) -> float:
        """The noise scale in units of a part; NaN with one part, or where noise hides the gradient. It waits."""
        return self._ratios()[0]

    def in_batches(self) -> float:
        """The same in units of an update's rows."""
        return self.in_parts() / self._num_parts

    def in_rows(self) -> float:
        """The same as a number of rows; NaN where nobody knows how many there were."""
        return self._ratios()[1] or float("nan")

    def _ratios(self) -> tuple[float, float]:
        averages = ops.convert_to_numpy(ops.convert_to_tensor(self._averages))
        signal, noise, rows = (float(value) for value in averages)
        return (noise / signal, rows / signal) if signal > 0 else (float("nan"), float("nan"))


def _num_rows() -> Tensor:
    """How many rows the batch of this step has on all replicas, 0 if nobody knows."""
    share = current_share()
    return ops.cast(0 if share is None else share.global_batch_size, "float32")
