"""Optimizers by the names and with the parameters of TensorFlow 1, and two update rules that only it had.

Hides how TensorFlow 1's names, parameters and defaults become those of Keras.

Private names of Keras touched here (test_build_optimizer.py holds each of them):
    `Optimizer._get_variable_index` - the position of a variable among those the optimizer was built on.
    `SGD.momentums` - its slots, which the base class makes.
    `RMSprop.add_optimizer_variables(..., "velocity")` - the name by which it makes its mean of squares.
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
    r"""Momentum as in TensorFlow 1: the rate multiplies the momentum, and is not folded into it.

    With gradient $g$, $\mu$ = `momentum` and the rate $\lambda$: $m \leftarrow \mu m + g$ and
    $w \leftarrow w - \lambda m$, or with `nesterov` $w \leftarrow w - \lambda (g + \mu m)$. `keras.optimizers.SGD`
    keeps $\mu m + \lambda g$ instead: the same for a constant rate, another path as soon as the rate changes.

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
        >>> optimizer.learning_rate = 0.0  # Keras' SGD would go on with the momentum it has
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
        """Updates one variable and its momentum."""
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
    r"""RMSProp as in TensorFlow 1: the mean of squares starts at 1, so that the first updates are not the largest.

    With gradient $g$, $\rho$ = `rho`, $\mu$ = `momentum`, $\epsilon$ = `epsilon` and the rate $\lambda$:
    $v \leftarrow \rho v + (1 - \rho) g^2$ with $v_0 = 1$, then
    $m \leftarrow \mu m + \lambda g / \sqrt{v + \epsilon}$ and $w \leftarrow w - m$; if `centered`, the square of a
    running mean of $g$ is taken from $v$ under the root. `keras.optimizers.RMSprop` is the same with $v_0 = 0$.

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
        """As in Keras, with ones in the mean of squares."""
        if name == "velocity":
            arguments["initializer"] = "ones"
        return super().add_optimizer_variables(trainable_variables, name, **arguments)


class _Row(NamedTuple):
    """An optimizer of TensorFlow 1, in terms of Keras."""

    made_by: Any
    """The Keras class, with Keras' defaults."""

    tf1_made_by: Any
    """The class with TensorFlow 1's update rule."""

    tf1_defaults: dict[str, Any]
    """Its defaults, where they are not those of `made_by`."""

    required: tuple[str, ...] = ()
    """What must be given, as there."""


_o = keras.optimizers
_ROWS = {
    "Adagrad": _Row(_o.Adagrad, _o.Adagrad, {"epsilon": 0.0}),
    "Adam": _Row(_o.Adam, _o.Adam, {"epsilon": 1e-8}),
    "AdamW": _Row(_o.AdamW, _o.AdamW, {"epsilon": 1e-8}, ("weight_decay",)),
    "Ftrl": _Row(_o.Ftrl, _o.Ftrl, {}),
    "Momentum": _Row(_o.SGD, TF1Momentum, {}, ("momentum",)),
    "NovoGrad": _Row(NovoGrad, NovoGrad, {}),
    "RMSProp": _Row(_o.RMSprop, TF1RMSProp, {}),
    "SGD": _Row(_o.SGD, _o.SGD, {}),
}
# TensorFlow 1's names of parameters that Keras names otherwise.
_RENAMED = {
    "Adam": {"beta1": "beta_1", "beta2": "beta_2"},
    "AdamW": {"beta1": "beta_1", "beta2": "beta_2"},
    "Momentum": {"use_nesterov": "nesterov"},
    "RMSProp": {"decay": "rho"},
}

NAMES = tuple(_ROWS)
"""The names that OpenSeq2Seq knew, and NovoGrad."""


def make_optimizer(
    optimizer: Any, params: Mapping[str, Any] | None, learning_rate: Any = None, tf1_defaults: bool = False
) -> Any:
    """An optimizer by name, class or instance. See `keras_shardopt.build_optimizer`."""
    if params is not None and not isinstance(params, Mapping):
        raise TypeError(f"`optimizer_params` must be a dict or None. Received: optimizer_params={params!r}")
    arguments = dict(params or {})
    if isinstance(optimizer, keras.optimizers.Optimizer):
        if arguments or learning_rate is not None:
            raise ValueError(
                "`optimizer_params` and `learning_rate_decay_fn` belong to the name or class of an optimizer. "
                f"Received: optimizer={optimizer!r}, which is made already. Give them to its constructor."
            )
        return optimizer
    if learning_rate is not None and "learning_rate" in arguments:
        raise TypeError(
            "`learning_rate` must be given once. Received: `learning_rate_decay_fn`, and `learning_rate` in "
            f"`optimizer_params`: {arguments!r}. Leave it out of `optimizer_params`."
        )
    if learning_rate is not None:
        arguments["learning_rate"] = learning_rate
    if isinstance(optimizer, type):
        if not issubclass(optimizer, keras.optimizers.Optimizer):
            raise TypeError(f"`optimizer` must be a class of Keras optimizers. Received: optimizer={optimizer!r}")
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
            f"`optimizer` must be one of {list(NAMES)}, or the name of an optimizer of Keras. "
            f"Received: optimizer={optimizer!r}"
        )
    if tf1_defaults:
        raise ValueError(
            f"`tf1_defaults=True` is for {list(NAMES)}, written like this. Received: optimizer={optimizer!r}, which is "
            f"{kinds[optimizer.lower()].__name__} of Keras. Leave `tf1_defaults` out, or take one of those names."
        )
    return kinds[optimizer.lower()]


def _made(name: str, arguments: dict[str, Any], tf1_defaults: bool) -> Any:
    row = _ROWS[name]
    for theirs, ours in _RENAMED.get(name, {}).items():
        if theirs in arguments and ours in arguments:
            raise TypeError(f"`{theirs}` and `{ours}` are the same for {name!r}. Received: {arguments!r}. Give one.")
        if theirs in arguments:
            arguments[ours] = arguments.pop(theirs)
    missing = [parameter for parameter in row.required if parameter not in arguments]
    if missing and (tf1_defaults or name == "Momentum"):
        raise TypeError(
            f"`optimizer_params` of {name!r} must hold {missing}. Received: {arguments!r}. "
            f"Use for example `optimizer_params={{{missing[0]!r}: {0.9 if name == 'Momentum' else 0.01}}}`."
        )
    made_by = row.tf1_made_by if tf1_defaults else row.made_by
    if tf1_defaults:
        arguments.pop("use_locking", None)  # nothing is locked here, and no number depended on it
        arguments = {**row.tf1_defaults, **arguments}
    return _of_class(made_by, arguments)


def _of_class(kind: Any, arguments: dict[str, Any]) -> Any:
    # Keras takes any keyword, and then raises a ValueError that does not say what it does take.
    known = {name for base in kind.__mro__ for name in inspect.signature(base.__init__).parameters} - {"self"}
    unknown = [name for name in arguments if name not in known]
    if unknown and kind.__module__.startswith(("keras.", "keras_shardopt.")):
        known -= {"args", "kwargs", "arguments"}
        raise TypeError(
            f"`optimizer_params` of {kind.__name__} may hold {sorted(known)}. Received: {unknown} among them."
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
