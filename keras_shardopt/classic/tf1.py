"""TensorFlow 1's optimizer names, parameters and defaults in terms of Keras, and two update rules of TensorFlow 1.

Private names of Keras touched here (test_build_optimizer.py checks that each exists):
    `Optimizer._get_variable_index` - the position of a variable in the optimizer.
    `SGD.momentums` - the momentum slots, created by the base class.
    `RMSprop.add_optimizer_variables(..., "velocity")` - RMSprop's name for its mean of squares.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_shardopt.classic.novograd import NovoGrad
from keras_shardopt.numerics import Tensor, Variable


@keras.saving.register_keras_serializable(package="keras_shardopt")
class TF1Momentum(keras.optimizers.SGD):
    r"""SGD with TensorFlow 1's momentum: the learning rate multiplies the momentum, instead of being part of it.

    With gradient $g$, $\mu$ = `momentum` and the rate $\lambda$: $m \leftarrow \mu m + g$ and
    $w \leftarrow w - \lambda m$, or with `nesterov` $w \leftarrow w - \lambda (g + \mu m)$. In
    `keras.optimizers.SGD`, $m$ contains the rate ($\mu m + \lambda g$). With a constant rate, the updates are the same.

    Args:
        learning_rate: float, `LearningRateSchedule` or function without arguments. Default 0.01.
        momentum: float in [0, 1]. Default 0.9.
        nesterov: bool. Default False.
        **arguments: see `keras.optimizers.SGD`.

    Example:
        >>> import keras
        >>> from keras_shardopt.classic.tf1 import TF1Momentum
        >>> weight = keras.Variable(1.0)
        >>> optimizer = TF1Momentum(learning_rate=0.5)
        >>> optimizer.apply([keras.ops.convert_to_tensor(1.0)], [weight])
        >>> optimizer.learning_rate = 0.0  # the momentum of Keras' SGD would still move the weight
        >>> optimizer.apply([keras.ops.convert_to_tensor(1.0)], [weight])
        >>> float(keras.ops.convert_to_numpy(weight))
        0.5

    References:
        `tf.compat.v1.train.MomentumOptimizer`.
    """

    def __init__(
        self, learning_rate: Any = 0.01, momentum: float = 0.9, nesterov: bool = False, **arguments: Any
    ) -> None:
        super().__init__(learning_rate, momentum, nesterov, **arguments)

    def update_step(self, gradient: Tensor, variable: Variable, learning_rate: Any) -> None:
        """Update a variable and its momentum."""
        if not self.momentum:
            super().update_step(gradient, variable, learning_rate)
            return
        rate, grad = (ops.cast(value, variable.dtype) for value in (learning_rate, gradient))
        momentum = self.momentums[self._get_variable_index(variable)]
        moved = ops.add(ops.multiply(self.momentum, momentum), grad)
        self.assign(momentum, moved)
        if self.nesterov:
            moved = ops.add(grad, ops.multiply(self.momentum, moved))
        self.assign_sub(variable, ops.multiply(rate, moved))


@keras.saving.register_keras_serializable(package="keras_shardopt")
class TF1RMSProp(keras.optimizers.RMSprop):
    r"""RMSProp of TensorFlow 1: the mean of squares starts at 1, so the first updates are small.

    With gradient $g$, $\rho$ = `rho`, $\mu$ = `momentum`, $\epsilon$ = `epsilon` and the rate $\lambda$:
    $v \leftarrow \rho v + (1 - \rho) g^2$ with $v_0 = 1$, then
    $m \leftarrow \mu m + \lambda g / \sqrt{v + \epsilon}$ and $w \leftarrow w - m$. If `centered`, the root subtracts
    the square of a running mean of $g$ from $v$. `keras.optimizers.RMSprop` is the same with $v_0 = 0$.

    Args:
        learning_rate: float, `LearningRateSchedule` or function without arguments. Default 0.001.
        rho: float. Default 0.9.
        momentum: float. Default 0.0.
        epsilon: float. Default 1e-10.
        centered: bool. Default False.
        **arguments: see `keras.optimizers.RMSprop`.

    Example:
        >>> import keras
        >>> from keras_shardopt.classic.tf1 import TF1RMSProp
        >>> weight = keras.Variable(1.0)
        >>> TF1RMSProp(learning_rate=0.5).apply([keras.ops.convert_to_tensor(1.0)], [weight])
        >>> round(float(keras.ops.convert_to_numpy(weight)), 4)
        0.5

    References:
        `tf.compat.v1.train.RMSPropOptimizer`.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-10,
        centered: bool = False,
        **arguments: Any,
    ) -> None:
        super().__init__(learning_rate, rho, momentum, epsilon, centered, **arguments)

    def add_optimizer_variables(self, trainable_variables: Sequence[Variable], name: Any, **arguments: Any) -> Any:
        """Initialize the mean of squares with ones."""
        if name == "velocity":
            arguments["initializer"] = "ones"
        return super().add_optimizer_variables(trainable_variables, name, **arguments)


class _Row(NamedTuple):
    """An optimizer that `build_optimizer` creates by its name in TensorFlow 1."""

    keras_class: Any

    tf1_class: Any
    """The class with TensorFlow 1's update rule."""

    tf1_defaults: dict[str, Any]
    """The defaults of TensorFlow 1 that differ from those of Keras."""

    required: tuple[str, ...] = ()
    """The parameters that have no default in TensorFlow 1."""


_ROWS = {
    "Adagrad": _Row(keras.optimizers.Adagrad, keras.optimizers.Adagrad, {"epsilon": 0.0}),
    "Adam": _Row(keras.optimizers.Adam, keras.optimizers.Adam, {"epsilon": 1e-8}),
    "AdamW": _Row(keras.optimizers.AdamW, keras.optimizers.AdamW, {"epsilon": 1e-8}, ("weight_decay",)),
    "Ftrl": _Row(keras.optimizers.Ftrl, keras.optimizers.Ftrl, {}),
    "Momentum": _Row(keras.optimizers.SGD, TF1Momentum, {}, ("momentum",)),
    "NovoGrad": _Row(NovoGrad, NovoGrad, {}),
    "RMSProp": _Row(keras.optimizers.RMSprop, TF1RMSProp, {}),
    "SGD": _Row(keras.optimizers.SGD, keras.optimizers.SGD, {}),
}
# For each optimizer, TensorFlow 1's names of parameters and Keras' names for them.
_RENAMED = {
    "Adam": {"beta1": "beta_1", "beta2": "beta_2"},
    "AdamW": {"beta1": "beta_1", "beta2": "beta_2"},
    "Momentum": {"use_nesterov": "nesterov"},
    "RMSProp": {"decay": "rho"},
}

NAMES = tuple(_ROWS)
"""The names that `build_optimizer` accepts with `tf1_defaults=True`: OpenSeq2Seq's, and NovoGrad."""


def make_optimizer(
    optimizer: Any, params: Mapping[str, Any] | None, learning_rate: Any = None, tf1_defaults: bool = False
) -> Any:
    """Create an optimizer. See `keras_shardopt.build_optimizer`."""
    if params is not None and not isinstance(params, Mapping):
        raise TypeError(f"`optimizer_params` must be a dict or None. Received: optimizer_params={params!r}")
    arguments = dict(params or {})
    if isinstance(optimizer, keras.optimizers.Optimizer):
        if arguments or learning_rate is not None:
            raise ValueError(
                "`optimizer_params` and `learning_rate_decay_fn` require the name or class of an optimizer. Received: "
                f"the instance optimizer={optimizer!r}. Pass these settings to the optimizer's constructor."
            )
        return optimizer
    if learning_rate is not None and "learning_rate" in arguments:
        raise TypeError(
            "The learning rate must be passed only once. Received: `learning_rate_decay_fn`, and `learning_rate` in "
            f"`optimizer_params`: {arguments!r}. Remove `learning_rate` from `optimizer_params`."
        )
    if learning_rate is not None:
        arguments["learning_rate"] = learning_rate
    if isinstance(optimizer, type):
        if not issubclass(optimizer, keras.optimizers.Optimizer):
            raise TypeError(f"`optimizer` must be a Keras optimizer class. Received: optimizer={optimizer!r}")
        return _of_class(optimizer, arguments)
    if not isinstance(optimizer, str):
        raise TypeError(
            "`optimizer` must be the name of an optimizer, a class or an instance. "
            f"Received: optimizer={optimizer!r} (of type {type(optimizer).__name__})"
        )
    if optimizer in _ROWS:
        return _made(optimizer, arguments, tf1_defaults)
    return _of_class(_class_named(optimizer, tf1_defaults), arguments)


def _class_named(optimizer: str, tf1_defaults: bool) -> Any:
    kinds = {name.lower(): kind for name, kind in vars(keras.optimizers).items() if _is_optimizer(kind)}
    if optimizer.lower() not in kinds:
        raise ValueError(
            f"`optimizer` must be one of {list(NAMES)}, or the name of a Keras optimizer. "
            f"Received: optimizer={optimizer!r}"
        )
    if tf1_defaults:
        raise ValueError(
            f"`tf1_defaults=True` requires one of the names {list(NAMES)}. Received: optimizer={optimizer!r}, the name "
            f"of Keras' {kinds[optimizer.lower()].__name__}. Remove `tf1_defaults`, or use one of these names."
        )
    return kinds[optimizer.lower()]


def _made(name: str, arguments: dict[str, Any], tf1_defaults: bool) -> Any:
    row = _ROWS[name]
    for tf1_name, keras_name in _RENAMED.get(name, {}).items():
        if tf1_name in arguments and keras_name in arguments:
            raise TypeError(
                f"`{tf1_name}` and `{keras_name}` are the same parameter of {name!r}. Received: {arguments!r}. Pass "
                "only one of these keys."
            )
        if tf1_name in arguments:
            arguments[keras_name] = arguments.pop(tf1_name)
    missing = [parameter for parameter in row.required if parameter not in arguments]
    if missing and (tf1_defaults or name == "Momentum"):
        raise TypeError(
            f"`optimizer_params` of {name!r} must have the keys {missing}. Received: {arguments!r}. "
            f"Use for example `optimizer_params={{{missing[0]!r}: {0.9 if name == 'Momentum' else 0.01}}}`."
        )
    kind = row.tf1_class if tf1_defaults else row.keras_class
    if tf1_defaults:
        arguments.pop("use_locking", None)  # it does not affect results
        arguments = {**row.tf1_defaults, **arguments}
    return _of_class(kind, arguments)


def _of_class(kind: Any, arguments: dict[str, Any]) -> Any:
    # Check arguments here, because Keras' error for an unknown argument does not list the valid ones.
    known = {name for base in kind.__mro__ for name in inspect.signature(base.__init__).parameters} - {"self"}
    unknown = [name for name in arguments if name not in known]
    if unknown and kind.__module__.startswith(("keras.", "keras_shardopt.")):
        known -= {"args", "kwargs", "arguments"}
        raise TypeError(
            f"`optimizer_params` of {kind.__name__} may have only the keys {sorted(known)}. Received: the keys "
            f"{unknown}."
        )
    return kind(**arguments)


def _is_optimizer(kind: Any) -> bool:
    return (
        inspect.isclass(kind)
        and issubclass(kind, keras.optimizers.Optimizer)
        and kind is not keras.optimizers.Optimizer
        and kind is not keras.optimizers.LossScaleOptimizer
        and kind is not getattr(keras.optimizers, "MultiOptimizer", None)
    )
