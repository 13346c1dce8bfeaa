"""MixedPrecision: float32 master weights for float16 and bfloat16 weights.

Private names of Keras touched here (a test checks that each exists):
    `Optimizer._track_variable` - adds a variable to the optimizer's state.
    `Variable._layout` - the sharding of a variable.
"""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
from keras import ops

from keras_shardopt.backends import for_backend
from keras_shardopt.backends.active import runtime
from keras_shardopt.backends.keras_callers import running_instance
from keras_shardopt.backends.models import optimizers_in_step
from keras_shardopt.numerics import LARGEST_FLOAT16, Gradients, Optimizer, Tensor, Variable, add, dtype_of, in_float32
from keras_shardopt.optimizers.loss_scaler import AutomaticLossScaler
from keras_shardopt.optimizers.loss_scaling import ScaledUpdate, checked_scale
from keras_shardopt.wrapping.chain import chain_of
from keras_shardopt.wrapping.slots import named_like

# TensorFlow only (otherwise None): counts the replicas over which Keras' own optimizers sum gradients.
_summing = for_backend({"tensorflow": "keras_shardopt.backends.tensorflow.runtime"})

_LOW = ("float16", "bfloat16")


@keras.saving.register_keras_serializable(package="keras_shardopt")
class MixedPrecision(ScaledUpdate):
    r"""Trains float16 and bfloat16 weights on float32 copies, the *master weights*.

    A float16 number has 11 significant bits: an update smaller than 1/2048 of a weight is lost, and training stalls.
    For each such weight $v$ with gradient $g$, scale $s$ and regularizer $R$, the inner optimizer updates the master
    weight $m$ with the gradient $\text{float32}(g) / s + \nabla R(m)$, and then $v \leftarrow m$, rounded. The inner
    optimizer's slots, clipping, decay, moving averages and constraints are float32 and use the master weights. Each
    master weight has the name and path of its weight, so rules by path match. float32 weights are updated directly.

    The "float16" and "bfloat16" policies create such weights. Under "mixed_float16" and "mixed_bfloat16", Keras keeps
    float32 weights and casts them, so `MixedPrecision` is not needed.

    - *Range.* A master weight outside float16's range becomes $\pm 65504$ in the weight. An update with NaN or infinity
      in a gradient is skipped on all replicas and counted in `skipped_steps`. An `AutomaticLossScaler` then also lowers
      the scale. bfloat16 has the range of float32 and needs no scale. Without a scale, bfloat16 gradients are not
      checked.
    - *Changed weights.* If an element of a weight is not equal to its rounded master weight, other code has set it
      (`set_weights`, `load_weights`, a callback). The next update then starts from the weight. Other elements keep
      the full precision of the master weight.
    - *Penalties.* The penalty of a regularizer is part of the loss, in float32. Once the optimizer is built, its
      gradient is computed on the master weight, exactly and without the scale. On TensorFlow, Keras cannot add a
      bfloat16 penalty to a float32 loss: call `optimizer.build` before `fit`.
    - *Averages.* `use_ema` averages master weights and writes the averages to the weights when `fit` ends.
      `SwapEMAWeights` rounds them to the weights' dtype. It fails on TensorFlow, which swaps equal dtypes only.

    Put this wrapper inside `CrossShard`, around other wrappers: `CrossShard(MixedPrecision(GradientClipping(...)))`.
    Master weights are optimizer state: `get_slot(weight, "master")`. Files store them next to the state of the inner
    optimizer. After loading a file without master weights, they start from the weights.

    Args:
        inner_optimizer: a `keras.optimizers.Optimizer`, or its name or config.
        loss_scale: None (no scaling), a number > 0 (constant), or an `AutomaticLossScaler`.
        name: str or None (default: derived from the class name).

    Raises:
        TypeError: if `loss_scale` has another type.
        ValueError: if a number is not finite and > 0; if a `CrossShard` is inside, because master weights need global
            gradients.

    Example:
        >>> import keras, keras_shardopt as ks
        >>> weight = keras.Variable([1.0], dtype="float16")
        >>> optimizer = ks.MixedPrecision(keras.optimizers.SGD(1e-4))
        >>> optimizer.build([weight])
        >>> for _ in range(10):  # each too small for float16
        ...     optimizer.apply([keras.ops.convert_to_tensor([1.0], "float16")])
        >>> round(float(optimizer.get_slot(weight, "master")[0]), 4)
        0.999
        >>> float(keras.ops.convert_to_numpy(weight)[0])
        0.9990234375

    References:
        `MixedPrecisionOptimizerWrapper` and `mp_regularizer_wrapper` of OpenSeq2Seq. There, an int as `loss_scale`
        failed at first use, a None gradient always failed, and penalties were missing from the loss. With a constant
        scale, an overflow made master weights infinite permanently and float16 weights 65504; here, such updates are
        skipped. Micikevicius et al., "Mixed Precision Training", 2018.
    """

    _needs_global_gradients = True

    _takes_penalties = True
    _scale_argument = "loss_scale"

    _masters: Mapping[Any, tuple[Variable, Variable]] = {}
    """The low-precision variables and their master weights, by Keras' `_var_key` of the variable."""

    _excluded: tuple[list[Variable] | None, Sequence[str] | None] | None = None
    _loss_came_before_build = False
    _penalties_are_in_the_loss = False

    def __init__(
        self,
        inner_optimizer: Any,
        loss_scale: float | AutomaticLossScaler | None = None,
        name: str | None = None,
    ) -> None:
        scale = None if loss_scale is None else checked_scale(loss_scale, "loss_scale")
        super().__init__(inner_optimizer, scale, name)
        self._keeps_state = True  # even before `build` creates master weights

    @property
    def _may_skip_updates(self) -> bool:  # type: ignore[override]
        return not self.built or super()._may_skip_updates

    @property
    def _saved_state(self) -> list[Variable]:
        """The variables in files. With a constant scale, `skipped_steps` is omitted, because older files lack it."""
        skipped = self._skipped if self._scaler is None else None
        return [v for v in super()._saved_state if v is not skipped]

    def build(self, variables: Sequence[Variable]) -> None:
        """Creates the master weights, and builds the inner optimizer on them."""
        if self.built:
            return
        variables = list(variables)
        self._masters = {self._var_key(v): (v, _new_master(v)) for v in variables if dtype_of(v) in _LOW}
        for _, master in self._masters.values():
            self._track_variable(master)
        if self._excluded is not None:
            var_list, var_names = self._excluded
            masters = None if var_list is None else self._variables_inside(var_list)
            super().exclude_from_weight_decay(var_list=masters, var_names=var_names)
        # A constant scale also skips (and counts) overflows. Without a scale, only float16 weights can overflow.
        if self._scaler is None and (self._static is not None or any(dtype_of(v) == "float16" for v in variables)):
            self._skipped = self._add_scalar("skipped_steps", 0, "int")
        super().build(variables)
        for variable, _ in self._masters.values():
            if variable.regularizer is not None:
                variable.regularizer = _OnMaster(variable.regularizer, self)

    def _variables_inside(self, variables: Sequence[Variable]) -> list[Variable]:
        """Returns the master weight of each variable, or the variable itself if it has no master weight."""
        masters = self._masters
        return [masters.get(self._var_key(variable), (None, variable))[1] for variable in variables]

    def _own_slots(self) -> Iterator[tuple[Any, str, Variable]]:
        return ((key, "master", master) for key, (_, master) in self._masters.items())

    def exclude_from_weight_decay(
        self, var_list: Sequence[Variable] | None = None, var_names: Sequence[str] | None = None
    ) -> None:
        """See `keras.optimizers.Optimizer.exclude_from_weight_decay`."""
        if self.built:
            super().exclude_from_weight_decay(var_list=var_list, var_names=var_names)  # raises an error: it is too late
        self._excluded = (None if var_list is None else list(var_list), var_names)

    @runtime.no_autograph
    def scale_loss(self, loss: Tensor) -> Tensor:
        """Returns the loss times the scale, in float32."""
        if not self.built:
            self._loss_came_before_build = True
        return super().scale_loss(loss)

    @runtime.no_autograph
    def apply(self, grads: Gradients, trainable_variables: Sequence[Variable] | None = None) -> None:
        """Updates the variables. See `keras.optimizers.Optimizer.apply`."""
        # Before this optimizer is built, losses contain the penalties (such as `kernel_regularizer`). If a loss came
        # before, and this call builds it, the gradients already contain those of the penalties, so do not add them.
        self._penalties_are_in_the_loss = not self.built and self._loss_came_before_build
        super().apply(grads, trainable_variables)
        self._penalties_are_in_the_loss = False

    def _unscaled(self, variable: Variable, scale: Any, grad: Tensor) -> Tensor:
        """Returns the unscaled gradient, in float32 if the variable has a master weight."""
        if self._var_key(variable) not in self._masters:
            return super()._unscaled(variable, scale, grad) if self._scales_loss else grad
        grad = in_float32(grad)
        return grad / ops.cast(scale, "float32") if self._scales_loss else grad

    @property
    def _unscales_alike(self) -> bool:
        return self._scales_loss and not self._masters

    def _update_unscaled(self, grads: Gradients, variables: Sequence[Variable]) -> None:
        """Adopts values set by other code, updates the master weights, and copies them to the weights, rounded."""
        pairs = self._masters
        for variable, master in pairs.values():
            master.assign(_synchronized(master, variable))
        grads = list(grads)
        if not self._penalties_are_in_the_loss:
            for i, variable in enumerate(variables):
                grads[i] = self._with_penalty(grads[i], variable)
        super()._update_unscaled(grads, variables)
        self._write_back()

    def _write_back(self) -> None:
        for variable, master in self._masters.values():
            variable.assign(_rounded(ops.convert_to_tensor(master), dtype_of(variable)))

    def _with_penalty(self, grad: Tensor | None, variable: Variable) -> Tensor | None:
        """Adds the gradient of the regularizer at the master weight, if the variable has both."""
        pair = self._masters.get(self._var_key(variable))
        if pair is None:
            return grad
        variable, master = pair
        if not isinstance(variable.regularizer, _OnMaster):
            return grad
        penalty = variable.regularizer.regularizer
        (added,), _ = runtime.value_and_grad(lambda: (penalty(ops.convert_to_tensor(master)), None), [master], None)
        # On TensorFlow, the inner optimizer sums over replicas, so each replica adds only its share.
        share = 1.0 if _summing is None or self._scope.is_reduced else 1.0 / _summing.num_summed()
        added = ops.cast(added, "float32") if share == 1 else ops.cast(added, "float32") * share
        return added if grad is None else add(grad, added, variable)

    def finalize_variable_values(self, var_list: Sequence[Variable]) -> None:
        """See `keras.optimizers.Optimizer.finalize_variable_values`."""
        self._finalize_inner(self._variables_inside(var_list))
        if self.use_ema:
            self._write_back()


@contextlib.contextmanager
def bfloat16_scope() -> Iterator[None]:
    """A scope in which layers compute in bfloat16: new layers get the "mixed_bfloat16" policy.

    Weights stay float32, and bfloat16 has the range of float32. So any optimizer works, without master weights or
    loss scaling. Leaving the scope restores the previous policy.

    Example:
        >>> import keras, keras_shardopt as ks
        >>> with ks.bfloat16_scope():
        ...     layer = keras.layers.Dense(1)
        >>> layer.compute_dtype, layer.variable_dtype, keras.config.dtype_policy().name
        ('bfloat16', 'float32', 'float32')

    References:
        `tf.compat.v1.tpu.bfloat16_scope`.
    """
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


_updating: contextvars.ContextVar[Any] = contextvars.ContextVar("updating", default=None)


@contextlib.contextmanager
def updating_with(optimizer: Optimizer) -> Iterator[None]:
    """Declares that in the block `optimizer` trains on the loss, even if `model.compile` has set another optimizer."""
    token = _updating.set(optimizer)
    try:
        yield
    finally:
        _updating.reset(token)


class _OnMaster(keras.regularizers.Regularizer):
    """A regularizer with a value but no gradient in the loss: `MixedPrecision` adds this gradient later.

    If another optimizer trains the model, the gradient is part of the loss again.
    """

    def __init__(self, regularizer: Any, owner: MixedPrecision) -> None:
        # If an earlier optimizer has wrapped the regularizer in this class, take the original.
        self.regularizer: Any = regularizer.regularizer if isinstance(regularizer, _OnMaster) else regularizer
        self._owner = weakref.ref(owner)

    def __call__(self, value: Any) -> Tensor:
        penalty = self.regularizer(ops.cast(value, "float32"))
        return ops.stop_gradient(penalty) if self._owner_updates() else penalty

    def _owner_updates(self) -> bool:
        """Whether this regularizer's `MixedPrecision`, or a wrapper around it, trains on the current loss."""
        owner = self._owner()
        if owner is None:
            return False
        named = _updating.get()
        if named is None:
            model = running_instance(keras.Model, condition=lambda model: getattr(model, "optimizer", None) is not None)
            if model is None:
                return True  # no method of a model is running, so a custom training loop computes the loss
        used = optimizers_in_step(model) if named is None else [named]
        return any(optimizer is owner for each in used for optimizer in chain_of(each))

    def get_config(self) -> dict[str, Any]:
        """Returns the config of the wrapped regularizer."""
        config: dict[str, Any] = self.regularizer.get_config()
        return config


def _new_master(variable: Variable) -> Variable:
    # Use an initializer: if TensorFlow builds while it traces a step, an assignment would run in every step.
    def initializer(shape: Any, dtype: Any = None) -> Tensor:
        return ops.cast(variable, "float32")

    master = named_like(
        variable,
        initializer=initializer,
        shape=variable.shape,
        dtype="float32",
        trainable=False,
        autocast=False,
        layout=getattr(variable, "_layout", None),
    )
    master.constraint = variable.constraint
    return master


def _rounded(master: Tensor, dtype: str) -> Tensor:
    if dtype == "float16":
        # Keep infinite elements infinite, because they show divergence.
        clamped = ops.clip(master, -LARGEST_FLOAT16, LARGEST_FLOAT16)
        master = ops.where(ops.isfinite(master), clamped, master)
    return ops.cast(master, dtype)


def _synchronized(master: Variable, variable: Variable) -> Tensor:
    """Returns the master weight, with the new values of elements that other code has changed in the variable."""
    master, value = ops.convert_to_tensor(master), ops.convert_to_tensor(variable)
    return ops.where(_rounded(master, dtype_of(value)) == value, master, ops.cast(value, "float32"))
