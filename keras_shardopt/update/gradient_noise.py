"""How noisy gradients are, measured on the replicas of each update by one more all-reduce, of two numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from keras_shardopt import arguments as check
from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.numerics import Tensor, Variable, dense, global_norm
from keras_shardopt.update.step import Proceed, Stage, Step


@keras.saving.register_keras_serializable(package="keras_shardopt")
class GradientNoise(Stage):
    r"""Estimates the gradient noise scale, which says up to which batch size more replicas speed training up.

    With $b$ rows on each of $N$ replicas, $g_r$ the gradient of replica $r$ and $g$ their mean, unbiased estimates are
    $|G|^2 = \frac{N |g|^2 - \overline{|g_r|^2}}{N - 1}$ and $S = \frac{N}{N - 1} (\overline{|g_r|^2} - |g|^2)$, the
    latter in units of $b$ rows. Their averages over the updates in which replicas have equal rows make the noise scale.

    Args:
        momentum: float in [0, 1), 0.95 by default. How much of the averages so far is kept in each update.

    Raises:
        TypeError, ValueError: if `momentum` is no such number; by `CrossShard`, where the formulas do not hold.

    Example:
        >>> import keras_shardopt as ks
        >>> optimizer = ks.CrossShard("adam", stages=[ks.GradientNoise()])

    References:
        McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, appendix A.
    """

    def __init__(self, momentum: float = 0.95) -> None:
        self.momentum = check.real("momentum", momentum, at_least=0, below=1)
        self.averages: Any = (0.0, 0.0)  # of $|G|^2$ and $S$: as both start at 0, their ratio needs no correction

    def check(self, optimizer: Any) -> None:
        """Refuses what makes other numbers of gradients than those of the formulas."""
        if optimizer.shard_state or optimizer.group_assignment or optimizer.sync_every or optimizer.reduction == "sum":
            raise ValueError(
                "`GradientNoise` needs the mean of whole gradients over all replicas: no `shard_state`, `sync_every`, "
                f'`group_assignment` or `reduction="sum"`. Received: {optimizer!r}.'
            )

    def build(self, variables: Sequence[Variable], add_variable: Callable[..., Variable]) -> None:
        """Makes the averages."""
        self.averages = add_variable(shape=(2,), initializer="zeros", dtype="float32", name="gradient_noise")

    def local(self, step: Step, comm: Communicator) -> Step:
        """Squares the norm of this replica's own gradient, and averages the squares."""
        own = ops.stack([self._squared_norm(step), ops.cast(abs(step.weight * step.row_share - 1) > 1e-5, "float32")])
        self._num_replicas = comm.num_replicas
        return step.replace(notes={**step.notes, "noise": comm.all_reduce([own], "mean")[0]})

    def commit(self, step: Step, proceed: Proceed) -> None:
        """Compares with the norm of the mean."""
        (mean, uneven), size = ops.unstack(step.notes["noise"], 2), self._num_replicas
        of_mean = self._squared_norm(step)
        now = ops.stack([size * of_mean - mean, size * (mean - of_mean)]) / max(size - 1, 1)
        self.averages.assign(self.averages + ops.where(uneven > 0, 0.0, (1 - self.momentum) * (now - self.averages)))
        proceed(step)

    def _squared_norm(self, step: Step) -> Tensor:
        return ops.cast(global_norm(list(map(dense, step.grads, step.variables))) ** 2, "float32")

    @property
    def noise_scale(self) -> float:
        """In units of one replica's rows; NaN with one replica, or where noise hides the gradient. Reading it waits."""
        signal, noise = (float(value) for value in ops.convert_to_numpy(ops.convert_to_tensor(self.averages)))
        return noise / signal if signal > 0 else float("nan")

    def get_config(self) -> dict[str, Any]:
        """See `Stage.get_config`."""
        return {"momentum": self.momentum}
