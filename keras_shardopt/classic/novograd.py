"""NovoGrad: SGD with the momentum of gradients that are normalized per variable.

Private names of Keras touched here (test_novograd.py checks that each exists):
    `Optimizer._apply_weight_decay` - Keras' weight decay, disabled here.
    `Optimizer._use_weight_decay` - False for variables passed to `exclude_from_weight_decay`.
    `Optimizer._get_variable_index` - the position of a variable in the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import keras
from keras import ops

from keras_shardopt import arguments as check
from keras_shardopt.numerics import Tensor, Variable, dense, dtype_of, in_float32, overwrites_variable
from keras_shardopt.wrapping.slots import SlotAccess, slot_prefix


@keras.saving.register_keras_serializable(package="keras_shardopt")
class NovoGrad(SlotAccess, keras.optimizers.Optimizer):
    r"""Stochastic gradient descent with layer-wise normalized gradients and decoupled weight decay.

    For each variable $w$ with gradient $g_t$, $\beta_1$ = `beta1`, $\beta_2$ = `beta2`, $\epsilon$ = `epsilon`,
    $d$ = `weight_decay` and the learning rate $\lambda_t$:

    - $v_1 = \lVert g_1 \rVert^2$, then $v_t = \beta_2 v_{t-1} + (1 - \beta_2) \lVert g_t \rVert^2$, a scalar per
      variable;
    - $m_t = \beta_1 m_{t-1} + \left(\frac{g_t}{\sqrt{v_t} + \epsilon} + d\, w_t\right)$ with $m_0 = 0$. With
      `grad_averaging`, the bracket is multiplied by $1 - \beta_1$;
    - $w_{t+1} = w_t - \lambda_t m_t$.

    $v$ starts at the first nonzero gradient. `get_slot` returns the state of a variable: "momentum" ($m$, with the
    variable's shape and dtype) and "second_moment" ($v$, a float32 scalar, or float64 for float64 variables). Sparse
    gradients (`tf.IndexedSlices`) become dense. Because the update is not element-wise, sharding cannot split the
    state of a variable.

    Args:
        learning_rate: float, `LearningRateSchedule` or function without arguments. Default 1.0.
        beta1: float in [0, 1). Default 0.95.
        beta2: float in [0, 1). Default 0.98.
        epsilon: float >= 0. Default 1e-8.
        weight_decay: float >= 0 or None. Default 0.0. The factor $d$. Variables passed to
            `exclude_from_weight_decay` do not decay.
        grad_averaging: bool. Default False.
        faithful: bool. True reproduces a bug of OpenSeq2Seq, which never stores $v$: `beta2` has no effect, and
            each gradient is divided by $\sqrt{\lVert g_t \rVert^2 + \epsilon}$. Default False.
        clipnorm: float or None. For this and the arguments below see `keras.optimizers.Optimizer`.
        clipvalue: float or None.
        global_clipnorm: float or None.
        use_ema: bool.
        ema_momentum: float.
        ema_overwrite_frequency: int or None.
        loss_scale_factor: float or None.
        gradient_accumulation_steps: int or None.
        name: str.

    Raises:
        TypeError: if `beta1`, `beta2`, `epsilon` or `weight_decay` is not a number.
        ValueError: if a number is out of range.

    Example:
        >>> import keras, keras_shardopt as ks
        >>> weight = keras.Variable([1.0, 2.0])
        >>> optimizer = ks.NovoGrad(learning_rate=0.1)
        >>> gradient = keras.ops.convert_to_tensor([30.0, 40.0])
        >>> optimizer.apply([gradient], [weight])  # the normalized gradient is (0.6, 0.8)
        >>> [round(float(w), 4) for w in keras.ops.convert_to_numpy(weight)]
        [0.94, 1.92]

    References:
        Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments for Training of Deep Networks",
        2019, algorithm 1. OpenSeq2Seq's `NovoGrad`; see `faithful` for the difference.
    """

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule | Callable[[], Any] = 1.0,
        beta1: float = 0.95,
        beta2: float = 0.98,
        epsilon: float = 1e-8,
        weight_decay: float | None = 0.0,
        grad_averaging: bool = False,
        faithful: bool = False,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        loss_scale_factor: float | None = None,
        gradient_accumulation_steps: int | None = None,
        name: str = "novograd",
    ) -> None:
        learning_rate = _checked_rate(learning_rate)
        beta1 = check.real("beta1", beta1, at_least=0, below=1)
        beta2 = check.real("beta2", beta2, at_least=0, below=1)
        epsilon = check.real("epsilon", epsilon, at_least=0)
        weight_decay = None if weight_decay is None else check.real("weight_decay", weight_decay, at_least=0)
        flags = {"grad_averaging": grad_averaging, "faithful": faithful, "use_ema": use_ema}
        for argument, given in flags.items():
            check.flag(argument, given)
        # Check the limits here, because Keras does not. Invalid limits would fail in the first update, or never.
        limits = {"clipnorm": clipnorm, "clipvalue": clipvalue, "global_clipnorm": global_clipnorm}
        for argument, value in limits.items():
            if value is not None:
                check.real(argument, value, above=0, finite=False)
        if loss_scale_factor is not None:
            check.real("loss_scale_factor", loss_scale_factor, above=0)
        check.real("ema_momentum", ema_momentum, at_least=0)
        if not ema_momentum <= 1:
            raise ValueError(f"`ema_momentum` must be in [0, 1]. Received: ema_momentum={ema_momentum!r}")
        if ema_overwrite_frequency is not None:
            check.integer("ema_overwrite_frequency", ema_overwrite_frequency)
        if gradient_accumulation_steps is not None:
            check.integer("gradient_accumulation_steps", gradient_accumulation_steps, 2)
        super().__init__(
            learning_rate=learning_rate,
            name=name,
            weight_decay=weight_decay,
            clipnorm=clipnorm,
            clipvalue=clipvalue,
            global_clipnorm=global_clipnorm,
            use_ema=use_ema,
            ema_momentum=ema_momentum,
            ema_overwrite_frequency=ema_overwrite_frequency,
            loss_scale_factor=loss_scale_factor,
            gradient_accumulation_steps=gradient_accumulation_steps,
        )
        self.beta1 = beta1
        self.beta2 = beta2
        self.epsilon = epsilon
        self.grad_averaging = grad_averaging
        self.faithful = faithful

    def build(self, variables: Sequence[Variable]) -> None:
        """Create the momentum and the second moment of each variable."""
        if self.built:
            return
        super().build(variables)
        self._momentums = self.add_optimizer_variables(variables, "momentum")
        self._second_moments = [None if overwrites_variable(v) else self._add_second_moment(v) for v in variables]

    def _add_second_moment(self, variable: Variable) -> Variable:
        dtype = "float64" if dtype_of(variable) == "float64" else "float32"
        # Name it like the variables of `add_optimizer_variables`, because `get_slot` finds slots by name.
        return self.add_variable((), dtype=dtype, name=f"{slot_prefix(variable)}second_moment")

    def update_step(self, gradient: Tensor, variable: Variable, learning_rate: Any) -> None:
        """Update a variable and its state."""
        index = self._get_variable_index(variable)
        momentum, second_moment = self._momentums[index], self._second_moments[index]
        grad = in_float32(dense(gradient, variable))
        square = ops.cast(ops.sum(ops.square(grad)), dtype_of(second_moment))
        if self.faithful:
            normalized = grad / ops.cast(ops.sqrt(square + self.epsilon), grad.dtype)
        else:
            before = ops.convert_to_tensor(second_moment)
            average = self.beta2 * before + (1 - self.beta2) * square
            average = ops.where(before == 0, square, average)
            self.assign(second_moment, average)
            # Keep a zero gradient zero, even if epsilon is 0 and the division returns NaN.
            divisor = ops.cast(ops.sqrt(average) + self.epsilon, grad.dtype)
            normalized = ops.where(divisor == 0, ops.zeros_like(grad), grad / divisor)
        if self.weight_decay and self._use_weight_decay(variable):
            normalized = normalized + self.weight_decay * in_float32(variable)
        if self.grad_averaging:
            normalized = (1 - self.beta1) * normalized
        moved = self.beta1 * in_float32(momentum) + ops.cast(normalized, in_float32(momentum).dtype)
        self.assign(momentum, ops.cast(moved, dtype_of(momentum)))
        self.assign_sub(variable, ops.cast(ops.cast(learning_rate, moved.dtype) * moved, dtype_of(variable)))

    def _apply_weight_decay(self, variables: Sequence[Variable]) -> None:
        # Do nothing, because the momentum contains the decay. Keras would subtract `weight_decay * rate * weights` too.
        del variables

    def get_config(self) -> dict[str, Any]:
        """See `keras.optimizers.Optimizer.get_config`."""
        return {
            **super().get_config(),
            "beta1": self.beta1,
            "beta2": self.beta2,
            "epsilon": self.epsilon,
            "grad_averaging": self.grad_averaging,
            "faithful": self.faithful,
        }


def _checked_rate(learning_rate: Any) -> Any:
    if isinstance(learning_rate, Real) and not isinstance(learning_rate, bool):
        return check.real("learning_rate", learning_rate, at_least=0)
    is_tensor = keras.ops.is_tensor(learning_rate) or isinstance(learning_rate, keras.Variable)
    is_schedule = isinstance(learning_rate, (keras.optimizers.schedules.LearningRateSchedule, dict))
    if not (is_tensor or is_schedule or callable(learning_rate)):
        raise TypeError(
            "`learning_rate` must be a float, a `LearningRateSchedule` or a function without arguments. "
            f"Received: learning_rate={learning_rate!r} (of type {type(learning_rate).__name__})"
        )
    if isinstance(learning_rate, dict):
        try:
            return keras.optimizers.schedules.deserialize(learning_rate)
        except Exception as error:
            raise ValueError(
                "If `learning_rate` is a dict, it must be the config of a schedule. "
                f"Received: learning_rate={learning_rate!r}"
            ) from error
    return learning_rate
