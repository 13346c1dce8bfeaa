"""GradientClipping: gradients whose global norm stays within a limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from keras_shardopt import arguments as check
from keras_shardopt._typing import Gradients, Tensor, Variable
from keras_shardopt.backends.active import runtime
from keras_shardopt.numerics import clip_by_global_norm, global_norm, like_variable, overwrites_variable
from keras_shardopt.wrapping.wrapper import OptimizerWrapper


@keras.saving.register_keras_serializable(package="keras_shardopt")
class GradientClipping(OptimizerWrapper):
    r"""Scales all gradients by one factor, so that their global norm is at most `clip_gradients`.

    With $n = \sqrt{\sum_i \lVert g_i \rVert^2}$ over all gradients and $c$ = `clip_gradients`, the inner optimizer
    sees $g_i \cdot \min(1, c / n)$. Norm and product are taken in float32, and each gradient then has the dtype of
    its variable. Gradients within the limit keep every bit. None gradients are left out, and of sparse ones
    (`tf.IndexedSlices`) the listed rows count one by one, also where a row is listed twice.

    Where a gradient is infinite, $n$ is infinite and the factor 0: finite elements become 0 and the infinite one
    NaN, so that a finite check further inside still sees the overflow. (With `global_clipnorm` of Keras everything
    becomes NaN.) A NaN makes everything NaN.

    Inside `CrossShard` the gradients are global, so the norm is that of the gradient of the whole batch. The limit
    holds for gradients of the loss itself: if the inner optimizer scales the loss, the limit is scaled alike. If the
    inner optimizer accumulates (its `gradient_accumulation_steps`), each micro-step's gradient is clipped by itself,
    before it is added, so that a mean of them is within the limit too, but is not the clipped mean. To clip what was
    accumulated, use `global_clipnorm` of the inner optimizer, or `Tower` around this.

    Args:
        inner_optimizer: a `keras.optimizers.Optimizer`, or the name or config of one.
        clip_gradients: float > 0. The largest global norm.
        name: str or None. None makes a name of the class name.

    Raises:
        TypeError: if `clip_gradients` is not a number.
        ValueError: if `clip_gradients` is not > 0; if a `CrossShard` is inside, because the norm would be that of
            one replica's gradients.

    Example:
        >>> import keras, keras_shardopt as ks
        >>> weight = keras.Variable([1.0, 2.0])
        >>> optimizer = ks.GradientClipping(keras.optimizers.SGD(1.0), clip_gradients=0.5)
        >>> optimizer.apply([keras.ops.convert_to_tensor([3.0, 4.0])], [weight])
        >>> [round(float(w), 4) for w in keras.ops.convert_to_numpy(weight)]
        [0.7, 1.6]

    References:
        The argument `clip_gradients` of OpenSeq2Seq's `optimize_loss`, which failed on None gradients and on scalar
        variables. Pascanu et al., "On the difficulty of training recurrent neural networks", 2013.
    """

    _needs_global_gradients = True
    _shard_unit = "element"

    def __init__(self, inner_optimizer: Any, clip_gradients: float, name: str | None = None) -> None:
        fix = "Leave `GradientClipping` out to not clip."
        clip_gradients = check.real("clip_gradients", clip_gradients, above=0, finite=False, fix=fix)
        super().__init__(inner_optimizer, name=name)
        self.clip_gradients = clip_gradients

    def transform_gradients(self, grads: Gradients, variables: Sequence[Variable]) -> Gradients:
        """Clips the gradients together."""
        result = list(grads)
        clipped = [i for i, variable in enumerate(variables) if not overwrites_variable(variable)]
        seen = [grads[i] for i in clipped]
        norm = norm_over_replicas(global_norm(seen)) if self._scope.holds_slices else None
        values, _ = clip_by_global_norm(seen, self.clip_gradients * self._incoming_scale(), norm)
        for i, value in zip(clipped, values):
            result[i] = like_variable(value, variables[i])
        return result

    def get_config(self) -> dict[str, Any]:
        """See `keras.optimizers.Optimizer.get_config`."""
        return {**super().get_config(), "clip_gradients": self.clip_gradients}

    def _repr_arguments(self) -> str:
        return f", clip_gradients={self.clip_gradients}"


def norm_over_replicas(norm: Tensor) -> Tensor:
    """The norm of what all replicas have together, from that of what each has."""
    (total,) = runtime.communicator("batch").all_reduce([keras.ops.reshape(keras.ops.square(norm), (1,))], "sum")
    return keras.ops.sqrt(total[0])
