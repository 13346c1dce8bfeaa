"""LARC: layer-wise learning rates, proportional to the norms of variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import keras
from keras import ops

from keras_shardopt import arguments as check
from keras_shardopt.backends.norms import bounded, norms, ones_where, unstacked
from keras_shardopt.numerics import (
    LARGEST_FLOAT16,
    Gradients,
    Tensor,
    Variable,
    cast,
    dense,
    dtype_of,
    in_float32,
    overwrites_variable,
)
from keras_shardopt.wrapping.chain import base_optimizers, leaf_of
from keras_shardopt.wrapping.wrapper import OptimizerWrapper


@keras.saving.register_keras_serializable(package="keras_shardopt")
class LARC(OptimizerWrapper):
    r"""Layer-wise adaptive rate control: scales each gradient by its variable's norm divided by the gradient's norm.

    For a variable $w$ with gradient $g$, $\eta$ = `larc_eta`, $\epsilon$ = `epsilon`, $m$ = `min_update` and the
    learning rate $\lambda$ of this update, the inner optimizer receives $r \cdot g$:

    - `"clip"`: $r = \min\left(1,\ \max\left(
      \frac{\eta \lVert w \rVert}{\lambda (\lVert g \rVert + \epsilon)},\ m\right)\right)$. The effective rate is
      $\min(\lambda,\ \eta \lVert w \rVert / \lVert g \rVert)$.
    - `"scale"`: $r = \max\left(\frac{\eta \lVert w \rVert}{\lVert g \rVert + \epsilon},\ m\right)$. The effective
      rate is $\lambda \eta \lVert w \rVert / \lVert g \rVert$ (LARS).

    If the norm of a variable is 0, as for a new bias, $r = 1$. In clip mode, $r = 1$ also while $\lambda = 0$.
    $\lambda$ is read before the update, from the innermost optimizer of the variable (also inside a
    `MultiOptimizer`), so schedules and `LearningRateScheduler` apply.

    Norms and products use float32, and the result has the dtype of the variable. None gradients stay None. Sparse
    gradients (`tf.IndexedSlices`) become dense. Infinite gradients stay infinite, so inner wrappers can detect
    them. (With `min_update=0`, infinite elements become NaN, and all other elements 0.)

    Use LARC inside `CrossShard`, because norms must be those of global gradients. If the inner optimizer accumulates
    (`gradient_accumulation_steps`), LARC scales each micro-batch's gradient. With Adam the factor mostly cancels,
    because Adam divides by the gradient's size.

    Args:
        inner_optimizer: a `keras.optimizers.Optimizer`, its name or config; usually SGD with momentum.
        larc_eta: float > 0. The trust coefficient, for example 0.001 to 0.02.
        larc_mode: "clip" (default) or "scale".
        min_update: float >= 0. The smallest factor $r$. Default 1e-7.
        epsilon: float > 0. Prevents a division by 0 if the gradient is 0. Default 1e-7.
        faithful: bool. True reproduces OpenSeq2Seq for variables of norm 0: $r$ is `min_update`, so these hardly ever
            change from 0; in clip mode with $\lambda = 0$, $r$ is NaN. Also rounds $r$ to the dtype of the variable.
        name: str or None. None derives a name from the class.

    Raises:
        TypeError: if a number has the wrong type.
        ValueError: if `larc_mode` is unknown, a number is out of range, or a `CrossShard` is inside, because LARC
            would then use the norms of one replica's gradients.

    Example:
        >>> import keras, keras_shardopt as ks
        >>> weight = keras.Variable([3.0, 4.0])
        >>> optimizer = ks.LARC(keras.optimizers.SGD(1.0), larc_eta=0.02)
        >>> gradient = keras.ops.convert_to_tensor([30.0, 40.0])
        >>> optimizer.apply([gradient], [weight])  # moves the weight by 0.02 * 5, not by 50
        >>> [round(float(w), 4) for w in keras.ops.convert_to_numpy(weight)]
        [2.94, 3.92]

    References:
        You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks", 2017. `larc_params` of OpenSeq2Seq's
        `optimize_loss`, which failed for None gradients and gradients with another dtype than their variable. See
        `faithful` for its treatment of zero norms.
    """

    _needs_global_gradients = True
    _shard_unit = "variable"
    _arguments = ("larc_eta", "larc_mode", "min_update", "epsilon", "faithful")

    def __init__(
        self,
        inner_optimizer: Any,
        larc_eta: float,
        larc_mode: Literal["clip", "scale"] = "clip",
        min_update: float = 1e-7,
        epsilon: float = 1e-7,
        faithful: bool = False,
        name: str | None = None,
    ) -> None:
        check.one_of("larc_mode", larc_mode, ("clip", "scale"))
        larc_eta = check.real("larc_eta", larc_eta, above=0)
        min_update = check.real("min_update", min_update, at_least=0)
        epsilon = check.real("epsilon", epsilon, above=0)
        faithful = check.flag("faithful", faithful)
        super().__init__(inner_optimizer, name=name)
        self.larc_eta = larc_eta
        self.larc_mode = larc_mode
        self.min_update = min_update
        self.epsilon = epsilon
        self.faithful = faithful

    def transform_gradients(self, grads: Gradients, variables: Sequence[Variable]) -> Gradients:
        """Multiply each gradient by the factor that `ratio` returns."""
        result = list(grads)
        scaled = [i for i, (g, v) in enumerate(zip(grads, variables)) if g is not None and not overwrites_variable(v)]
        wide = [self._wide(grads[i], variables[i]) for i in scaled]
        factors = self._ratios(wide, [variables[i] for i in scaled])
        by_place = dict(zip(scaled, factors))
        if self._delegates_factors(grads, variables, [by_place.get(i) for i in range(len(grads))]):
            return result
        for i, grad, factor in zip(scaled, wide, factors):
            result[i] = self._times(grad, factor, dtype_of(variables[i]))
        return result

    def ratio(self, grad: Tensor, variable: Variable) -> Tensor:
        """Return the factor that scales a gradient: a scalar tensor in float32 (float64 for a float64 gradient)."""
        return self._ratios([self._wide(grad, variable)], [variable])[0]

    def _wide(self, grad: Tensor, variable: Variable) -> Tensor:
        return in_float32(dense(grad, variable))

    def _ratios(self, wide: Sequence[Tensor], variables: Sequence[Variable]) -> list[Tensor]:
        """Return the factor of each gradient. Factors of one dtype are computed as one vector, which is faster."""
        factors: list[Any] = [None] * len(wide)
        for dtype in dict.fromkeys(map(dtype_of, wide)):
            members = [i for i, grad in enumerate(wide) if dtype_of(grad) == dtype]
            vector = self._ratio([wide[i] for i in members], [variables[i] for i in members], dtype)
            for i, factor in zip(members, unstacked(vector, len(members))):
                factors[i] = factor
        return factors

    def _ratio(self, wide: Sequence[Tensor], variables: Sequence[Variable], dtype: str) -> Tensor:
        variable_norm = norms(variables, dtype)
        gradient_norm = norms(wide, dtype) / ops.cast(self._incoming_scale(), dtype)
        divisor = gradient_norm + self.epsilon
        if self.larc_mode == "clip":
            divisor = divisor * self._rates(variables, dtype)
        factor = self.larc_eta * variable_norm / divisor
        factor = bounded(factor, self.min_update, 1.0 if self.larc_mode == "clip" else None)
        return factor if self.faithful else ones_where(variable_norm == 0, factor)

    def _rates(self, variables: Sequence[Variable], dtype: str) -> Tensor:
        """Return the learning rate of each variable as a vector, or a scalar if all variables have the same rate."""
        found = base_optimizers(self)
        leaves = found if len(found) == 1 else [leaf_of(self, variable) for variable in variables]
        rates = {leaf: ops.cast(leaf.learning_rate, dtype) for leaf in dict.fromkeys(leaves)}
        return rates[leaves[0]] if len(rates) == 1 else ops.stack([rates[leaf] for leaf in leaves])

    def _times(self, wide: Tensor, factor: Tensor, dtype: str) -> Tensor:
        if self.faithful:
            if dtype == "float16":
                factor = ops.minimum(factor, ops.full_like(factor, LARGEST_FLOAT16))
            return cast(factor, dtype) * cast(wide, dtype)
        return cast(wide * factor, dtype)

    def _repr_arguments(self) -> str:
        shown = f", larc_eta={self.larc_eta}, larc_mode={self.larc_mode!r}"
        usual = {"min_update": 1e-7, "epsilon": 1e-7, "faithful": False}
        return shown + "".join(f", {k}={getattr(self, k)}" for k, value in usual.items() if getattr(self, k) != value)
