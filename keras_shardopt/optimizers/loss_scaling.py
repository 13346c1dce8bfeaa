"""LossScaling: scales the loss against underflow in float16, and skips steps that overflow.

`ScaledUpdate` is the base class of `LossScaling` and `MixedPrecision`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import keras
from keras import ops

from keras_shardopt import arguments as check
from keras_shardopt.backends.active import runtime
from keras_shardopt.backends.communicator import GlobalView
from keras_shardopt.numerics import (
    Gradients,
    Tensor,
    Variable,
    cast,
    dtype_of,
    in_float32,
    map_values,
    overwrites_variable,
)
from keras_shardopt.optimizers.cross_shard import cross_shards_in
from keras_shardopt.optimizers.loss_scaler import AutomaticLossScaler, check_grads, overflow
from keras_shardopt.update.nonfinite import largest_of_all
from keras_shardopt.wrapping.wrapper import OptimizerWrapper

if TYPE_CHECKING:
    from typing_extensions import Self


class ScaledUpdate(OptimizerWrapper):
    """An abstract class that scales the loss, unscales the gradients, and skips updates with an overflow."""

    _scale_argument: str
    """The name of the scale's argument in the constructor of the subclass."""

    _scaler: AutomaticLossScaler | None
    _static: float | None
    _skipped: Variable | None
    _shard_unit = "element"

    def __init__(self, inner_optimizer: Any, scale: float | AutomaticLossScaler | None, name: str | None) -> None:
        self._scaler, self._static = (scale, None) if isinstance(scale, AutomaticLossScaler) else (None, scale)
        self._skipped = None
        self._scales_loss = scale is not None
        self._skips_overflows = self._keeps_state = self._scaler is not None
        super().__init__(inner_optimizer, name=name)
        if self._scaler is not None:
            for optimizer in cross_shards_in(self.inner):
                for stage in optimizer.pipeline.stages:
                    stage._check_outside(self)
            # Create the variables now, like Keras' counters, because the scale is used before `build`.
            self._scaler.build(self._add_scalar)
            self._skipped = self._add_scalar("skipped_steps", 0, "int")

    def _add_scalar(self, name: str, start: float, dtype: str) -> Variable:
        return self.add_variable(shape=(), initializer=keras.initializers.Constant(start), dtype=dtype, name=name)

    @property
    def _may_skip_updates(self) -> bool:  # type: ignore[override]
        return self._scaler is not None or self._skipped is not None

    @property
    def loss_scale(self) -> keras.Variable | float:
        """The current factor of the loss: a scalar variable, or a float if it is constant.

        If an optimizer inside also scales the loss, this is the product of both factors: a scalar tensor or a float.
        """
        inner = super().loss_scale
        if not self._scales_loss:
            return inner
        if isinstance(inner, (int, float)):
            return self._own_scale if inner == 1 else self._own_scale * inner
        return ops.multiply(self._own_scale, inner)

    @property
    def _own_scale(self) -> Any:
        if self._scaler is not None:
            return self._scaler.loss_scale
        return 1.0 if self._static is None else self._static

    @property
    def skipped_steps(self) -> keras.Variable | int:
        """The number of updates skipped because of overflow: a scalar variable, or 0."""
        return super().skipped_steps if self._skipped is None else self._skipped

    @runtime.no_autograph
    def scale_loss(self, loss: Tensor) -> Tensor:
        """Returns the loss times the scale, in float32 for a half-precision loss."""
        loss = self.inner.scale_loss(loss)
        if not self._scales_loss:
            return loss
        if hasattr(loss, "dtype"):
            loss = in_float32(loss)
        return ops.multiply(loss, self._own_scale)

    def _update_unscaled(self, grads: Gradients, variables: Sequence[Variable]) -> None:
        super().update_inner(grads, variables)

    def _unscaled(self, variable: Variable, scale: Any, grad: Tensor) -> Tensor:
        del variable
        wide = in_float32(grad)
        return cast(wide / ops.cast(scale, dtype_of(wide)), dtype_of(grad))

    def _all_unscaled(self, grads: Gradients, variables: Sequence[Variable], scale: Any) -> Gradients:
        """Returns the unscaled gradients, or `grads` unchanged if the inner optimizer will divide them by the scale."""
        plain = [i for i, grad in enumerate(grads) if grad is not None and not overwrites_variable(variables[i])]
        if self._unscales_alike:
            # Divide in the dtype that `_unscaled` uses, because a scale of 1.001 would be 1 in bfloat16.
            wide = ["float64" if dtype_of(variables[i]) == "float64" else "float32" for i in plain]
            divisors = {dtype: ops.cast(scale, dtype) for dtype in set(wide)}
            by_place = {i: divisors[dtype] for i, dtype in zip(plain, wide)}
            if self._delegates_factors(grads, variables, [by_place.get(i) for i in range(len(grads))], divides=True):
                return grads
        result = list(grads)
        for i in plain:
            result[i] = map_values(functools.partial(self._unscaled, variables[i], scale), grads[i])
        return result

    @property
    def _unscales_alike(self) -> bool:
        """Whether unscaling only divides all gradients by the scale, without a change of dtype."""
        return True

    def update_inner(self, grads: Gradients, variables: Sequence[Variable]) -> None:
        """Adjusts the loss scale, and updates the variables unless a gradient of any replica overflows."""
        scale = self._own_scale
        # Copy the scale, because `self._scaler.update` changes its variable before the division.
        scale = ops.copy(ops.convert_to_tensor(scale)) if self._scaler is not None else scale
        skipped = self._skipped
        if skipped is None or self._is_good(grads, variables):
            self._update_unscaled(self._all_unscaled(grads, variables, scale), variables)
            return
        has_nan, amax = self._checked(grads, variables, scale)
        if self._scaler is not None:
            self._scaler.update(has_nan, amax)
        overflows = overflow(has_nan, amax)
        is_known = runtime.version(skipped) is not None and runtime.is_cheap_to_read(overflows)
        if not is_known or overflows:
            skipped.assign(ops.add(skipped, ops.cast(overflows, skipped.dtype)))

        # Divide inside the branch: XLA then fuses the division with the update. Quotients made outside need memory.
        def update(given: Sequence[Any]) -> None:
            *grads, scale = given
            self._update_unscaled(self._all_unscaled(grads, variables, scale), variables)

        runtime.cond(
            ops.logical_not(overflows),
            update,
            [*grads, scale],
            [*self._trainable_variables, *self.variables],
            apart=self._scope.updates_differ,
            mostly=True,
        )

    def _is_good(self, grads: Gradients, variables: Sequence[Variable]) -> bool:
        """Returns True, and counts the step, if a cheap check shows no overflow and no change of the scale."""
        scope = self._scope
        if self._scaler is None or not scope.is_reduced or scope.group_axis is not None or scope.holds_slices:
            return False
        return self._scaler._count_if_good(_to_check(grads, variables))

    def _checked(self, grads: Gradients, variables: Sequence[Variable], scale: Any) -> tuple[Tensor, Tensor]:
        """Returns whether a gradient of any replica has a NaN, and the largest absolute value, divided by the scale."""
        checked = _to_check(grads, variables)
        has_nan, amax = check_grads(checked) if self._scaler is None else self._scaler._fast_check(checked)
        amax = amax / scale
        if self._scope.holds_slices:
            return largest_of_all(has_nan, amax, runtime.communicator("batch"))
        reducers = cross_shards_in(self.inner)
        axes = [reducer.axis_name for reducer in reducers]
        if self._scope.is_reduced:
            if self._scope.group_axis is None:
                return has_nan, amax  # the same on all replicas, because the gradients are global
            axes = [self._scope.group_axis]
        replicas = runtime.communicator(axes[0] if axes else "batch")
        # All replicas must decide alike, so replicas with separate programs exchange the results of their checks. If
        # the user has set `gradients`, all replicas exchange results, because this argument may be wrong or differ.
        is_set = any(reducer.state_finder.declared_state is not None for reducer in reducers)
        may_differ = is_set and replicas.num_replicas > 1 and not isinstance(replicas, GlobalView)
        if may_differ or not replicas.is_spmd or replicas.gradient_state(grads, variables).is_local:
            return largest_of_all(has_nan, amax, replicas)
        return has_nan, amax

    def _on_outer_loss_scaling(self) -> None:
        """Raises ValueError if this optimizer scales the loss, because the outer optimizer scales it too."""
        if self._scales_loss:
            raise ValueError(
                f"Cannot scale the loss twice. Received: a `LossScaleOptimizer` around {self!r}. "
                "Remove the `LossScaleOptimizer`; `model.compile(optimizer=...)` does not need it."
            )
        super()._on_outer_loss_scaling()

    def get_config(self) -> dict[str, Any]:
        """See `keras.optimizers.Optimizer.get_config`."""
        stored = self._static if self._scaler is None else keras.saving.serialize_keras_object(self._scaler)
        return {**super().get_config(), self._scale_argument: stored}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Self:
        """Reverses `get_config`. Does not change `config`."""
        stored = config.get(cls._scale_argument)
        if isinstance(stored, dict):
            config = {**config, cls._scale_argument: keras.saving.deserialize_keras_object(stored)}
        return super().from_config(config, custom_objects)

    def _repr_arguments(self) -> str:
        return f", {self._scale_argument}={self._scaler or self._static!r}"


def _to_check(grads: Gradients, variables: Sequence[Variable]) -> list[Any]:
    return [grad for grad, variable in zip(grads, variables) if not overwrites_variable(variable)]


@keras.saving.register_keras_serializable(package="keras_shardopt")
class LossScaling(ScaledUpdate):
    r"""Multiplies the loss by a scale, divides the gradients by it, and skips updates that overflow.

    With $s$ the scale, the trainer differentiates $s \cdot \text{loss}$ (`scale_loss`), and the inner optimizer gets
    $g / s$, divided in float32. This protects gradients from underflow in float16. The scale is one of:

    - a float: $s$ is constant, and no update is checked or skipped.
    - "Backoff" or "LogMax": `AutomaticLossScaler` adjusts $s$ after every step. If a gradient has a NaN or an infinite
      element, the step is skipped. A skipped step changes only the scale and `skipped_steps`: no weight, slot, counter,
      schedule, moving average, decay, accumulator, moving statistic or seed.

    Use `LossScaling` inside `CrossShard`. Gradients are global there, so all replicas make the same decision. An
    overflow on any replica makes the average overflow. Outside `CrossShard`, replicas exchange two numbers per step.

    Under the "mixed_float16" policy, `compile` adds no `LossScaleOptimizer` around `LossScaling` or its wrappers, so
    `auto_scale_loss=False` is not needed. bfloat16 has the range of float32, so it needs no loss scale.

    Callbacks can read `loss_scale` and `skipped_steps` of the outermost wrapper:
    `float(keras.ops.convert_to_numpy(model.optimizer.loss_scale))`. Files store the inner optimizer's state in the same
    way as without `LossScaling`, and the scale separately. So `LossScaling(Adam())` loads a file of `Adam()` and then
    keeps its current scale. `Adam()` loads a file of `LossScaling(Adam())`.

    Args:
        inner_optimizer: a `keras.optimizers.Optimizer`, or the name or config of one.
        loss_scaling: float > 0; "Backoff" (default) or "LogMax" (case is ignored); or an `AutomaticLossScaler`.
        loss_scaling_params: dict or None. Parameters of the named algorithm; see `AutomaticLossScaler`.
        name: str or None (default: derived from the class name).

    Raises:
        TypeError: if `loss_scaling` is none of these.
        ValueError: if a float is not finite and > 0; if the algorithm or its parameters are invalid; if
            `loss_scaling_params` come without the name of an algorithm; if a `LossScaleOptimizer` is around this
            optimizer.

    Example:
        >>> import keras, keras_shardopt as ks
        >>> weight = keras.Variable([1.0, 2.0])
        >>> optimizer = ks.LossScaling(keras.optimizers.SGD(1.0), "Backoff", {"scale_max": 8.0})
        >>> optimizer.build([weight])
        >>> optimizer.apply([keras.ops.convert_to_tensor([8.0, 8.0])])
        >>> optimizer.apply([keras.ops.convert_to_tensor([8.0, float("inf")])])
        >>> [float(w) for w in keras.ops.convert_to_numpy(weight)]
        [0.0, 1.0]
        >>> counters = [optimizer.loss_scale, optimizer.skipped_steps, optimizer.iterations]
        >>> [float(keras.ops.convert_to_numpy(counter)) for counter in counters]
        [4.0, 1.0, 1.0]

    References:
        The argument `loss_scaling` of OpenSeq2Seq's `optimize_loss`. OpenSeq2Seq checked gradients after clipping, so
        LogMax used values that were too small. Micikevicius et al., "Mixed Precision Training", 2018.
    """

    _scale_argument = "loss_scaling"

    def __init__(
        self,
        inner_optimizer: Any,
        loss_scaling: float | str | AutomaticLossScaler = "Backoff",
        loss_scaling_params: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        if loss_scaling_params is not None and not isinstance(loss_scaling, str):
            raise ValueError(
                "`loss_scaling_params` require the name of an algorithm in `loss_scaling`. "
                f"Received: loss_scaling={loss_scaling!r}, loss_scaling_params={loss_scaling_params!r}. "
                "Remove `loss_scaling_params`."
            )
        if isinstance(loss_scaling, str):
            try:
                loss_scaling = AutomaticLossScaler(loss_scaling, loss_scaling_params)
            except (TypeError, ValueError) as error:
                rule = "`loss_scaling` and `loss_scaling_params` must be valid for `AutomaticLossScaler`."
                raise type(error)(f"{rule} {error}") from None
        super().__init__(inner_optimizer, checked_scale(loss_scaling, "loss_scaling"), name)


def checked_scale(scale: Any, argument: str) -> float | AutomaticLossScaler:
    """Returns a valid scale (a float > 0 or a scaler) that a constructor received as `argument`, or raises."""
    if isinstance(scale, AutomaticLossScaler):
        return scale
    if isinstance(scale, bool) or not isinstance(scale, Real):
        raise TypeError(
            f"`{argument}` must be a float or an `AutomaticLossScaler`. Received: {argument}={scale!r} "
            f"(of type {type(scale).__name__}). Use for example `{argument}=128.0` or "
            f"`{argument}=AutomaticLossScaler('Backoff')`."
        )
    return check.real(argument, scale, above=0)
