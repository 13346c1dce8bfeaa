"""`build_optimizer`: builds an optimizer and its wrappers from the arguments of OpenSeq2Seq's `optimize_loss`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import keras

from keras_shardopt import arguments as check
from keras_shardopt.backends.patches import install
from keras_shardopt.classic.larc import LARC
from keras_shardopt.classic.tf1 import make_optimizer
from keras_shardopt.optimizers import (
    AutomaticLossScaler,
    CrossShard,
    GradientClipping,
    LossScaling,
    MixedPrecision,
)
from keras_shardopt.update.old_arguments import old_attributes


def build_optimizer(
    optimizer: Any,
    optimizer_params: Mapping[str, Any] | None = None,
    learning_rate_decay_fn: Any = None,
    dtype: Any = "float32",
    clip_gradients: float | None = None,
    larc_params: Mapping[str, Any] | None = None,
    loss_scaling: float | str | AutomaticLossScaler = 1.0,
    loss_scaling_params: Mapping[str, Any] | None = None,
    iter_size: int = 1,
    cross_shard: bool | Mapping[str, Any] = False,
    *,
    tf1_defaults: bool = False,
) -> keras.optimizers.Optimizer:
    """Build an optimizer, wrapped for clipping, loss scaling, accumulation and several replicas as requested.

    The order is `CrossShard(MixedPrecision or LossScaling(GradientClipping or LARC(optimizer)))`: accumulate and
    average gradients; unscale them, or skip the update; clip; update. With only the first three arguments, the result
    is the Keras optimizer itself.

    Args:
        optimizer: name, class or instance of an optimizer. "Adagrad", "Adam", "AdamW", "Ftrl", "Momentum", "NovoGrad",
            "RMSProp" and "SGD" accept TensorFlow 1's parameter names in addition to Keras'. Other names are Keras'
            optimizers, in any case ("lion", "Nadam").
        optimizer_params: dict or None. Arguments of the optimizer's constructor.
        learning_rate_decay_fn: the learning rate: float, `LearningRateSchedule`, or function of the number of updates
            so far (an integer scalar tensor). None: the rate in `optimizer_params`, or the optimizer's default.
        dtype: "mixed" for float16 or bfloat16 weights with float32 master weights in the optimizer. With a float
            dtype (default "float32"), weights are updated in their own dtype. Use "float32" for Keras' "mixed_float16"
            policy, because its weights are float32.
        clip_gradients: float > 0 or None. The largest global norm; see `GradientClipping`.
        larc_params: dict or None. Arguments of `LARC`: `larc_eta`, and optionally `larc_mode`, `min_update`, `epsilon`.
        loss_scaling: 1.0 (default) for none; a number for a static scale; "Backoff", "LogMax" or an
            `AutomaticLossScaler` for a dynamic scale that skips updates that overflow.
        loss_scaling_params: dict or None. Parameters of the algorithm that `loss_scaling` names.
        iter_size: int >= 1. Number of calls per update. An update uses their mean gradient. A value above 1 adds a
            `CrossShard`, so gradients are also averaged over replicas, once per update.
        cross_shard: bool, or a dict of arguments of `CrossShard`. Whether to average gradients over replicas.
        tf1_defaults: bool. True selects TensorFlow 1's defaults and update rules for the eight names above:

            | name | Keras (False) | TensorFlow 1 (True) |
            |---|---|---|
            | "Adam", "AdamW" | `epsilon` 1e-7 | 1e-8 |
            | "Adagrad" | `epsilon` 1e-7 | 0 |
            | "AdamW" | `weight_decay` 0.004 | required |
            | "Momentum" | the momentum includes the rate | the rate multiplies the momentum |
            | "RMSProp" | mean of squares starts at 0, `epsilon` 1e-7 | at 1, 1e-10 |
            | "Ftrl", "SGD", "NovoGrad" | | the same |

            With True, other names and other spellings ("adam") raise ValueError. Classes are not affected.
            "Momentum" always requires `momentum`. `use_locking` is accepted with True, and has no effect.

    Returns:
        A `keras.optimizers.Optimizer`.

    Raises:
        ValueError: if a name is unknown, a number is out of range, `clip_gradients` and `larc_params` are combined, or
            `larc_params` lack `larc_eta` or have unknown keys.
        TypeError: if an argument has the wrong type; if `optimizer_params` have unknown keys, lack a required key, or
            repeat the learning rate of `learning_rate_decay_fn`.

    Example:
        >>> import keras_shardopt as ks
        >>> ks.build_optimizer(
        ...     "Momentum",
        ...     {"momentum": 0.9},
        ...     ks.schedules.PolyDecay(0.1, decay_steps=1000),
        ...     larc_params={"larc_eta": 0.001},
        ...     loss_scaling="Backoff",
        ...     cross_shard=True,
        ... )  # doctest: +ELLIPSIS
        CrossShard(LossScaling(LARC(SGD, larc_eta=0.001, ...), loss_scaling=...

    References:
        `optimize_loss` of OpenSeq2Seq's `optimizers.py`. It changed the caller's dict: it multiplied `weight_decay` of
        "AdamW" by the rate. Here `keras.optimizers.AdamW` multiplies. It ignored a static loss scale unless `dtype` was
        "mixed".
    """
    install("optimizers")
    if clip_gradients is not None and larc_params is not None:
        raise _Conflict(
            "`clip_gradients` and `larc_params` cannot be used together, because both rescale gradients. Received: "
            f"clip_gradients={clip_gradients!r}, larc_params={larc_params!r}. Remove one of these arguments."
        )
    keeps_master_weights = _keeps_master_weights(dtype)
    iter_size = check.integer("iter_size", iter_size)
    check.flag("tf1_defaults", tf1_defaults)
    scale = _scale(loss_scaling, loss_scaling_params)
    arguments = _checked_cross_shard(cross_shard, iter_size)
    built = make_optimizer(optimizer, optimizer_params, _learning_rate(learning_rate_decay_fn), tf1_defaults)
    if clip_gradients is not None:
        built = GradientClipping(built, clip_gradients)
    if larc_params is not None:
        built = LARC(built, **_checked_larc_params(larc_params))
    if keeps_master_weights:
        built = MixedPrecision(built, scale)
    elif scale is not None:
        built = LossScaling(built, scale)
    return built if cross_shard is False and iter_size == 1 else CrossShard(built, **arguments)


def _checked_cross_shard(cross_shard: bool | Mapping[str, Any], iter_size: int) -> dict[str, Any]:
    if not isinstance(cross_shard, (bool, Mapping)):
        raise TypeError(
            "`cross_shard` must be a bool, or a dict of arguments of `CrossShard`. "
            f"Received: cross_shard={cross_shard!r}"
        )
    arguments = dict(cross_shard) if isinstance(cross_shard, Mapping) else {}
    known = [name for name in inspect.signature(CrossShard).parameters if name not in ("inner_optimizer", "old")]
    if any(name not in (*known, *old_attributes()) for name in arguments):
        raise ValueError(
            f"`cross_shard` may have only the keys {known}. Received: cross_shard={arguments!r}. Remove all other keys."
        )
    if iter_size > 1:
        if arguments.get("gradient_accumulation_steps") not in (None, iter_size):
            raise ValueError(
                "`iter_size` and the `gradient_accumulation_steps` of `cross_shard` must be the same. Received: "
                f"iter_size={iter_size!r}, cross_shard={arguments!r}. Pass only one of these arguments."
            )
        arguments["gradient_accumulation_steps"] = iter_size
    return arguments


class _Conflict(ValueError, AttributeError):
    """Error for arguments that exclude each other; also an AttributeError, as in OpenSeq2Seq."""


@keras.saving.register_keras_serializable(package="keras_shardopt")
class _FunctionOfStep(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __call__(self, step: Any) -> Any:
        return self.function(step)

    def get_config(self) -> dict[str, Any]:
        return {"function": keras.saving.serialize_keras_object(self.function)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> _FunctionOfStep:
        return cls(keras.saving.deserialize_keras_object(config["function"]))


def _learning_rate(given: Any) -> Any:
    if given is None or isinstance(given, keras.optimizers.schedules.LearningRateSchedule):
        return given
    if not callable(given):
        fix = "Or pass a `LearningRateSchedule` or a function of the number of updates."
        return check.number("learning_rate_decay_fn", given, fix=fix)
    try:
        inspect.signature(given).bind(0)
    except TypeError:
        return given  # Keras itself calls functions without arguments
    return _FunctionOfStep(given)


def _keeps_master_weights(dtype: Any) -> bool:
    if isinstance(dtype, str) and dtype == "mixed":
        return True
    try:
        name = keras.backend.standardize_dtype(dtype)
    except Exception:  # Keras raises several error types for this
        name = ""
    if "float" not in name or dtype is None:
        raise ValueError(f'`dtype` must be "mixed" or a float dtype. Received: dtype={dtype!r}')
    return False


def _scale(loss_scaling: Any, params: Mapping[str, Any] | None) -> Any:
    """Return the scale that `loss_scaling` selects: a number, an `AutomaticLossScaler`, or None for no scaling."""
    if isinstance(loss_scaling, str):
        if loss_scaling.strip().lower() not in ("backoff", "logmax"):
            raise ValueError(
                f'`loss_scaling` must be a number, "Backoff" or "LogMax". Received: loss_scaling={loss_scaling!r}'
            )
        return AutomaticLossScaler(loss_scaling, params)
    # Like OpenSeq2Seq, ignore `params` if `loss_scaling` is a number.
    is_number = isinstance(loss_scaling, Real) and not isinstance(loss_scaling, bool)
    if not is_number and not isinstance(loss_scaling, AutomaticLossScaler):
        raise TypeError(
            '`loss_scaling` must be a number, "Backoff", "LogMax" or an `AutomaticLossScaler`. '
            f"Received: loss_scaling={loss_scaling!r}"
        )
    if params is not None and not is_number:
        raise ValueError(
            "`loss_scaling_params` cannot be combined with an `AutomaticLossScaler`. Received: "
            f"loss_scaling={loss_scaling!r}, loss_scaling_params={params!r}. Pass these parameters to the constructor "
            "of the `AutomaticLossScaler`."
        )
    return None if is_number and loss_scaling == 1 else loss_scaling


def _checked_larc_params(params: Any) -> dict[str, Any]:
    if not isinstance(params, Mapping):
        raise TypeError(f"`larc_params` must be a dict. Received: larc_params={params!r}")
    known = [name for name in inspect.signature(LARC).parameters if name not in ("inner_optimizer", "name")]
    unknown = [name for name in params if name not in known]
    if unknown or "larc_eta" not in params:
        raise ValueError(
            f"`larc_params` must have the key `larc_eta`, and may have only the keys {known}. Received: "
            f"larc_params={dict(params)!r}"
        )
    return dict(params)
