"""CrossShard: gradients inside it are global."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import keras
from keras import ops

from keras_shardopt._typing import Gradients, Variable
from keras_shardopt.reduction import Reduction, global_gradients
from keras_shardopt.replica import Arrival, claim_reduction, framework, reduction_is_claimed
from keras_shardopt.wrapper import OptimizerWrapper, inside, leaves

# The names of `tf.compat.v1.losses.Reduction`, which CrossShardOptimizer took, mean the same here.
_REDUCTIONS: dict[str, Reduction] = {"mean": "mean", "sum": "sum", "weighted_mean": "mean", "weighted_sum": "sum"}


@keras.saving.register_keras_serializable(package="keras_shardopt")
class CrossShard(OptimizerWrapper):
    r"""Reduces the gradients of all replicas once, then lets the inner optimizer update.

    With $N$ replicas and $g_r$ the gradient of the mean loss of replica $r$, the inner optimizer sees
    $\frac{1}{N} \sum_r g_r$ (`reduction="mean"`) or $\sum_r g_r$ (`reduction="sum"`) on every replica. Whatever
    looks at gradients inside it (clipping, finite checks, norms) therefore sees what one process with the whole
    batch would see. With one replica the inner optimizer runs unchanged, bit for bit.

    Where the replicas are depends on the backend that runs Keras:

    - TensorFlow: the devices of the `tf.distribute` strategy whose scope the model was built in.
    - JAX: the axis `axis_name` inside `shard_map` or `pmap`; under a `keras.distribution` (as in `model.fit`) XLA
      has reduced the gradients before the optimizer sees them, and nothing is reduced again.
    - PyTorch: the ranks of the default process group of `torch.distributed`. Before the first update all ranks take
      rank 0's weights, optimizer state and seed state.

    Args:
        inner_optimizer: a `keras.optimizers.Optimizer`, or the name or config of one. It may be a
            `MultiOptimizer`, a `LossScaleOptimizer` or another wrapper.
        reduction: "mean" (default) or "sum"; "weighted_mean" and "weighted_sum", TF1's names, mean the same.
        gradients: how the gradients arrive, where that cannot be known. "auto" (default) finds it; see the table.

            | value | a replica's gradient is | true of |
            |---|---|---|
            | "local" | that of its own mean loss | PyTorch; JAX `pmap`, `shard_map(check_vma=False)`; a TensorFlow loop with a loss that is not divided by the number of replicas |
            | "prescaled" | that, divided by the number of replicas | TensorFlow `fit` and `keras.losses` under a strategy |
            | "summed" | the sum over replicas | JAX `shard_map(check_vma=True)` |
            | "global" | the mean over replicas | JAX under a `keras.distribution`; PyTorch where DDP owns the weights |

            "auto" takes the gradients of a TensorFlow strategy for "prescaled". Say "local" in a loop of your own
            whose loss is a bare `tf.reduce_mean(...)`, and for a loss function that returns a scalar: Keras does
            not divide that one.
        axis_name: str. The name of the mapped axis over which JAX replicas are laid out.
        name: str or None. None makes a name of the class name.

    Raises:
        TypeError: if `inner_optimizer` is neither an optimizer, a name nor a config.
        ValueError: if `reduction` or `gradients` is unknown; if a `LossScaleOptimizer` is put around this
            optimizer, also by `compile` under the "mixed_float16" policy if nothing inside scales the loss.

    Example:
        >>> import keras, keras_shardopt as ks
        >>> optimizer = ks.CrossShard(keras.optimizers.SGD(0.1, momentum=0.9))
        >>> weight = keras.Variable([1.0, 2.0])
        >>> optimizer.apply([keras.ops.convert_to_tensor([10.0, 10.0])], [weight])
        >>> [float(w) for w in keras.ops.convert_to_numpy(weight)]
        [0.0, 1.0]

    References:
        `tf.compat.v1.tpu.CrossShardOptimizer`, which scaled the loss by 1/N and summed gradients over TPU cores.
        Here the gradient is averaged instead, so `reduction` means the same wherever gradients are reduced.
    """

    makes_gradients_global = True

    def __init__(
        self,
        inner_optimizer: Any,
        reduction: Literal["mean", "sum", "weighted_mean", "weighted_sum"] = "mean",
        *,
        gradients: Literal["auto", "local", "prescaled", "summed", "global"] = "auto",
        axis_name: str = "batch",
        name: str | None = None,
    ) -> None:
        if not isinstance(reduction, str) or reduction not in _REDUCTIONS:
            raise ValueError(
                f'`reduction` must be "mean" or "sum" (or "weighted_mean", "weighted_sum"). '
                f"Received: reduction={reduction!r}"
            )
        arrivals = {"auto": None, **{arrival.value: arrival for arrival in Arrival}}
        if not isinstance(gradients, str) or gradients not in arrivals:
            raise ValueError(f"`gradients` must be one of {list(arrivals)}. Received: gradients={gradients!r}")
        if not isinstance(axis_name, str):
            raise TypeError(f"`axis_name` must be a str. Received: axis_name={axis_name!r}")
        super().__init__(inner_optimizer, name=name)
        self.reduction = _REDUCTIONS[reduction]
        self.gradients = gradients
        self.axis_name = axis_name
        self.__dict__["_arrival"] = arrivals[gradients]
        # The torch ranks that this optimizer has started together with.
        self.__dict__["_peers"] = None
        framework.notice(self)

    def transform_gradients(self, grads: Gradients, variables: Sequence[Variable]) -> Gradients:
        """Makes the gradients global."""
        if reduction_is_claimed(self):
            return grads
        replicas = framework.replicas(self.axis_name)
        framework.check_ready(variables, leaves(self))
        if not replicas.runs_one_program and self.__dict__["_peers"] is not replicas:
            share = replicas.start_together(self._trainable_variables, self.variables)
            grads = [None if grad is None else _share_of(grad, share) for grad in grads]
            self.__dict__["_peers"] = replicas
        return global_gradients(grads, variables, replicas, self.reduction, self.__dict__["_arrival"])

    def update_inner(self, grads: Gradients, variables: Sequence[Variable]) -> None:
        """Updates with gradients that nobody inside may reduce again."""
        with claim_reduction(inside(self)):
            super().update_inner(grads, variables)

    def meet_outer_loss_scaling(self) -> None:
        """Refuses: a stock LossScaleOptimizer outside would look at gradients before they are reduced."""
        raise ValueError(
            "A `LossScaleOptimizer` must be inside `CrossShard`, not around it: outside it sees the gradients of one "
            "replica only, so that replicas skip different steps, and diverge or wait for each other for ever. "
            "Use `CrossShard(LossScaling(inner_optimizer))`, or `CrossShard(LossScaleOptimizer(inner_optimizer))`. "
            'Under the "mixed_float16" policy, where `compile` puts one around an optimizer that does not scale the '
            "loss: `model.compile(optimizer=CrossShard(LossScaling(inner_optimizer)))`."
        )

    def get_config(self) -> dict[str, Any]:
        """See `keras.optimizers.Optimizer.get_config`."""
        return {
            **super().get_config(),
            "reduction": self.reduction,
            "gradients": self.gradients,
            "axis_name": self.axis_name,
        }

    def _repr_arguments(self) -> str:
        return f", reduction={self.reduction!r}"


def _share_of(grad: Any, share: float) -> Any:
    if share == 1:
        return grad
    # Not times zero: a gradient of foreign weights may hold anything, also NaN.
    return ops.zeros_like(grad) if share == 0 else ops.multiply(grad, share)
