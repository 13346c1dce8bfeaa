"""The two algorithms of `AutomaticLossScaler`, and their parameters.

Each is a pure function that maps a state (a few scalars) to the next state. The class documents the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras import ops

from keras_shardopt.numerics import Tensor

Params = Mapping[str, Any]

# For each parameter: OpenSeq2Seq's default, the type, and the valid range. As in OpenSeq2Seq, an int is not a float.
_Rule = tuple[Any, type, Callable[[Any], bool], str]
_POSITIVE: tuple[Callable[[Any], bool], str] = (lambda v: 0 < v < float("inf"), "finite and > 0")
_DECAY: tuple[Callable[[Any], bool], str] = (lambda v: 0 <= v < 1, "in [0, 1)")
_BOUNDS: dict[str, _Rule] = {"scale_min": (1.0, float, *_POSITIVE), "scale_max": (2.0**14, float, *_POSITIVE)}
_RULES: dict[str, dict[str, _Rule]] = {
    "Backoff": {
        **_BOUNDS,
        "step_factor": (2.0, float, lambda v: 1 < v < float("inf"), "finite and > 1"),
        "step_window": (2000, int, lambda v: bool(v >= 1), ">= 1"),
    },
    "LogMax": {
        **_BOUNDS,
        "log_max": (16.0, float, lambda v: abs(v) < float("inf"), "finite"),
        "beta1": (0.99, float, *_DECAY),
        "beta2": (0.999, float, *_DECAY),
        "overflow_std_dev": (3.09, float, lambda v: 0 <= v < float("inf"), "finite and >= 0"),
    },
}
NAMES = {name.lower(): name for name in _RULES}
"""The names of the algorithms, by their lower case."""

_LOG2_OF_LARGEST = 16.0  # float16's maximum is just below 2^16


def initial_state(algorithm: str, params: Params, faithful: bool) -> list[tuple[str, float, str]]:
    """Return the name, start value and dtype of each scalar of the state. The first scalar is the scale."""
    if algorithm == "Backoff":
        return [("loss_scale", params["scale_max"], "float32"), ("good_steps", 0, "int")]
    scale = 1.0 if faithful else min(max(1.0, params["scale_min"]), params["scale_max"])
    means = [(name, 0.0, "float32") for name in ("mean", "slow_mean", "slow_mean_square")]
    # 1 minus the sum of the weights in a running mean. `_logmax` divides by this sum, because means start at 0.
    remaining = [(name, 1.0, "float32") for name in ("left_of_mean", "left_of_slow_mean")]
    return [("loss_scale", scale, "float32"), *means, *remaining]


def next_state(
    algorithm: str, params: Params, faithful: bool, state: Sequence[Tensor], overflows: Tensor, amax: Tensor
) -> list[Tensor]:
    """Return the state after a step. `amax` is the largest absolute value of its gradients."""
    if algorithm == "Backoff":
        return _backoff(params, state, overflows)
    return _logmax(params, faithful, state, overflows, amax)


def _backoff(params: Params, state: Sequence[Tensor], overflows: Tensor) -> list[Tensor]:
    scale, good_steps = state
    good_steps = ops.where(overflows, ops.zeros_like(good_steps), good_steps + ops.ones_like(good_steps))
    grows = good_steps >= int(params["step_window"])
    factor = params["step_factor"]
    changed = _bounded(params, ops.where(overflows, scale / factor, scale * factor))
    scale = ops.where(ops.logical_or(overflows, grows), changed, scale)
    return [scale, ops.where(grows, ops.zeros_like(good_steps), good_steps)]


def _logmax(params: Params, faithful: bool, state: Sequence[Tensor], overflows: Tensor, amax: Tensor) -> list[Tensor]:
    scale, mean, slow_mean, slow_mean_square, left, slow_left = state
    magnitude = amax if faithful else ops.where(amax > 0, amax, ops.ones_like(amax))
    at_overflow = 2.0 ** params["log_max"] if faithful else params["log_max"]
    x = ops.where(overflows, float(at_overflow), ops.log2(magnitude))
    beta1, beta2 = params["beta1"], params["beta2"]
    mean = beta1 * mean + (1 - beta1) * x
    slow_mean = beta2 * slow_mean + (1 - beta2) * x
    slow_mean_square = beta2 * slow_mean_square + (1 - beta2) * ops.square(x)
    left, slow_left = left * beta1, slow_left * beta2
    unbiased = mean / (1 - left)
    variance = slow_mean_square / (1 - slow_left) - ops.square(slow_mean / (1 - slow_left))
    deviation = ops.sqrt(ops.maximum(variance, ops.zeros_like(variance)))
    exponent = _LOG2_OF_LARGEST - (unbiased + params["overflow_std_dev"] * deviation)
    # `_bounded` also limits a power that overflows to infinity, so the exponent needs no bound.
    new = [_bounded(params, ops.power(2.0, exponent)), mean, slow_mean, slow_mean_square, left, slow_left]
    if faithful:
        return new
    # Zeros contain no information about the size of the gradient. They may be underflow caused by a small scale,
    # and a larger scale cannot make them overflow. amax = -inf (no gradient) contains no information either.
    larger = ops.where(amax == 0, _bounded(params, scale * 2), scale)
    is_informative = ops.logical_or(overflows, amax > 0)
    return [ops.where(is_informative, after, before) for after, before in zip(new, [larger, *state[1:]])]


def _bounded(params: Params, scale: Tensor) -> Tensor:
    # If bounds are reversed, this order of minimum and maximum gives OpenSeq2Seq's result.
    return ops.maximum(ops.minimum(scale, float(params["scale_max"])), float(params["scale_min"]))


def checked_params(algorithm: str, params: Params, faithful: bool) -> dict[str, Any]:
    """Return all parameters of an algorithm, with defaults. Raise ValueError for an unknown name or a wrong value."""
    rules = _RULES[algorithm]
    unknown = sorted(set(params) - set(rules), key=str)
    if unknown:
        raise ValueError(f"`params` of {algorithm!r} may contain only {list(rules)}. Received: {unknown}.")
    checked: dict[str, Any] = {name: params.get(name, default) for name, (default, *_) in rules.items()}
    for name, (_, kind, sensible, range_) in rules.items():
        value = checked[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and not faithful):
            fix = f" Use `{float(value)}`." if kind is float and isinstance(value, int) else ""
            raise ValueError(
                f"`params[{name!r}]` of {algorithm!r} must be {'a float' if kind is float else 'an int'}. "
                f"Received: {value!r} (of type {type(value).__name__}).{fix}"
            )
        # Check ints even if `faithful`, because OpenSeq2Seq fails with an int of 0 too, though only in its first step.
        if (kind is int or not faithful) and not sensible(value):
            raise ValueError(f"`params[{name!r}]` of {algorithm!r} must be {range_}. Received: {value!r}")
        checked[name] = kind(value)
    if not faithful and not checked["scale_min"] <= checked["scale_max"]:
        raise ValueError(
            "`params['scale_min']` must not be above `params['scale_max']`. "
            f"Received: scale_min={checked['scale_min']}, scale_max={checked['scale_max']}"
        )
    return checked
