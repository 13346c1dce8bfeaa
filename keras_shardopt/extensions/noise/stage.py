"""The gradient noise scale, measured in each update with an additional all-reduce of three scalars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from keras_shardopt import arguments as check
from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.backends.norms import global_norm
from keras_shardopt.extensions.noise.averages import NoiseAverages
from keras_shardopt.numerics import Tensor, Variable, dense
from keras_shardopt.update.step import Proceed, Stage, Step


@keras.saving.register_keras_serializable(package="keras_shardopt")
class GradientNoise(Stage):
    r"""Estimates the gradient noise scale: the batch size up to which more replicas speed up training.

    With $N$ replicas of $b$ rows, gradients $g_r$ and their mean $g$, unbiased estimates are
    $|G|^2 = \frac{N |g|^2 - \overline{|g_r|^2}}{N - 1}$ and $S = \frac{N}{N - 1} (\overline{|g_r|^2} - |g|^2)$, with
    $S$ in units of $b$ rows. The noise scale is the ratio $S / |G|^2$ of their moving averages, without updates from
    uneven batches. On a single replica, the micro-batches of `gradient_accumulation_steps` replace the replicas.
    `summaries=["gradient_noise_scale"]` adds this stage automatically; see
    [choosing a batch size](../summaries.md#choosing-a-batch-size).

    Args:
        momentum: float in [0, 1). Fraction of the moving averages kept in each update. Default 0.95.

    Raises:
        TypeError, ValueError: if `momentum` is invalid; by `CrossShard`, if its options do not fit the formulas.

    Example:
        >>> import keras_shardopt as ks
        >>> optimizer = ks.CrossShard("adam", stages=[ks.GradientNoise()])

    References:
        McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, appendix A.
    """

    def __init__(self, momentum: float = 0.95) -> None:
        self.momentum = check.real("momentum", momentum, at_least=0, below=1)
        self._averages = NoiseAverages(self.momentum)

    def check(self, optimizer: Any) -> None:
        """Raise ValueError if the options of `optimizer` do not fit the formulas."""
        self._averages.check(optimizer)

    def build(self, variables: Sequence[Variable], add_variable: Callable[..., Variable]) -> None:
        """Create the moving averages."""
        self._averages.build(add_variable)

    def _micro_batch(self, step: Step, starts: Any, comm: Communicator) -> None:
        self._averages.add_micro_batch(_squared_norm(step) if comm.num_replicas == 1 else 0.0, starts)

    def local(self, step: Step, comm: Communicator) -> Step:
        """Add to `notes` the means over replicas of the squared norm, of 1 if rows are uneven (else 0), and of rows."""
        square, rows = self._averages.mean_of_parts(lambda: _squared_norm(step), comm.num_replicas)
        own = ops.stack([square, ops.cast(abs(step.weight * step.row_share - 1) > 1e-5, "float32"), rows])
        return step.replace(notes={**step.notes, "noise": comm.all_reduce([own], "mean")[0]})

    def commit(self, step: Step, proceed: Proceed) -> None:
        """Update the averages with the squared norm of the mean gradient."""
        self._averages.update(ops.unstack(step.notes["noise"], 3), _squared_norm(step))
        proceed(step)

    noise_scale = property(lambda self: self._averages.in_parts(), doc="In units of one replica's rows; see `in_rows`.")
    in_batches = property(lambda self: self._averages.in_batches(), doc="In units of all rows of an update.")
    in_rows = property(lambda self: self._averages.in_rows(), doc="In rows; NaN outside of a prepared model's `fit`.")

    def get_config(self) -> dict[str, Any]:
        """Return the argument of the constructor."""
        return {"momentum": self.momentum}


def _squared_norm(step: Step) -> Tensor:
    return ops.cast(global_norm(list(map(dense, step.grads, step.variables))) ** 2, "float32")
