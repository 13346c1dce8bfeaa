"""OpenSeq2Seq's learning-rate policies as Keras schedules.

All formulas keep the step an integer until it is divided, because float32 rounds large steps: see `step_count`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import keras
from keras import ops

from keras_shardopt import arguments as check
from keras_shardopt.backends.user_warnings import warn
from keras_shardopt.numerics import Tensor
from keras_shardopt.schedules.schedule import Policy, at_least_float32
from keras_shardopt.schedules.step_count import StepCount, repeated_squares


@keras.saving.register_keras_serializable(package="keras_shardopt")
class FixedLR(Policy):
    """The same rate at every step.

    Args:
        learning_rate: float >= 0. The rate.

    Returns (from a call): a tensor of the step's shape in `keras.config.floatx()`.

    Raises:
        ValueError: if `learning_rate` is negative, infinite or NaN.
        TypeError: if it is not a number.

    Example:
        >>> import keras_shardopt as ks
        >>> float(ks.schedules.FixedLR(0.25)(1000))
        0.25

    References:
        OpenSeq2Seq, `lr_policies.fixed_lr`. It returned its argument. This schedule returns a tensor.
    """

    def __init__(self, learning_rate: float) -> None:
        self.learning_rate = _learning_rate(learning_rate)

    def rate_at(self, steps: StepCount) -> Tensor:
        """Returns the rate."""
        return ops.full_like(steps.number(), self.learning_rate)


@keras.saving.register_keras_serializable(package="keras_shardopt")
class PiecewiseConstant(Policy):
    r"""Multiplies the rate by a factor that changes at boundaries.

    With rate $r$ = `learning_rate`, boundaries $b_1 \le \dots \le b_n$ and multipliers $m_0 = 1$ and $m_1 \dots m_n$
    = `decay_rates`, the rate at step $s$ is $r \cdot m_k$. Here $k$ is the number of boundaries below $s$, so a step
    equal to a boundary still has the old rate. Multipliers apply to the initial rate, not to each other. If two
    boundaries are equal, the second one applies.

    Args:
        learning_rate: float >= 0. The rate up to and including the first boundary.
        boundaries: list of int >= 0 that do not decrease. The last step of each piece except the last piece, in
            optimizer updates, or in epochs with `steps_per_epoch`.
        decay_rates: list of float >= 0: for each boundary, the multiplier of `learning_rate` after it.
        steps_per_epoch: int >= 0 or None (default). Updates per epoch, by which all boundaries are
            multiplied. With 0, all boundaries are 0, as in OpenSeq2Seq.

    Returns (from a call): a tensor of the step's shape in `keras.config.floatx()`.

    Raises:
        ValueError: if `boundaries` and `decay_rates` are empty or of different lengths, if boundaries decrease or are
            fractions, or if a number is negative, infinite or NaN.
        TypeError: if an argument is not a number or list.

    Example:
        >>> import keras_shardopt as ks
        >>> arguments = dict(boundaries=[30, 60], decay_rates=[0.5, 0.25], steps_per_epoch=10)
        >>> schedule = ks.schedules.PiecewiseConstant(0.5, **arguments)
        >>> [float(schedule(step)) for step in (0, 300, 301, 600, 601)]
        [0.5, 0.5, 0.25, 0.25, 0.125]

    References:
        OpenSeq2Seq, `lr_policies.piecewise_constant`. Here tuples are accepted as lists and whole floats as ints.
        Empty or unsorted lists raise `ValueError` at construction.
    """

    def __init__(
        self,
        learning_rate: float,
        boundaries: Sequence[int],
        decay_rates: Sequence[float],
        steps_per_epoch: int | None = None,
    ) -> None:
        self.learning_rate = _learning_rate(learning_rate)
        self.boundaries = check.counts("boundaries", boundaries, "Pass ints, in updates or whole epochs.")
        self.decay_rates = [
            check.number("decay_rates", m, at_least=0) for m in check.sequence("decay_rates", decay_rates)
        ]
        if len(self.boundaries) != len(self.decay_rates):
            raise ValueError(
                "`boundaries` and `decay_rates` must have the same length, because the rate before the first boundary "
                f"has no multiplier. Received: {len(self.boundaries)} boundaries={self.boundaries} and "
                f"{len(self.decay_rates)} decay_rates={self.decay_rates}"
            )
        if steps_per_epoch is not None:
            steps_per_epoch = check.count("steps_per_epoch", steps_per_epoch, 0)
        self.steps_per_epoch = steps_per_epoch

    def rate_at(self, steps: StepCount) -> Tensor:
        """Returns the rate of the piece that contains the step."""
        factor = 1 if self.steps_per_epoch is None else self.steps_per_epoch
        rates = [self.learning_rate * multiplier for multiplier in (1.0, *self.decay_rates)]
        piece = steps.num_exceeded([boundary * factor for boundary in self.boundaries])
        return ops.take(ops.convert_to_tensor(rates, dtype=steps.dtype), piece)


@keras.saving.register_keras_serializable(package="keras_shardopt")
class ExpDecay(Policy):
    r"""Exponential decay, continuous or in steps, down to a minimum.

    With rate $r$ = `learning_rate`, factor $q$ = `decay_rate`, begin $b$ = `begin_decay_at` and length $d$ =
    `decay_steps`, the rate at step $s$ is $\max(r\,q^p,\ \text{min\_lr})$ with $p = \max(s - b, 0) / d$.
    With `use_staircase_decay`, $p$ is rounded down.

    Args:
        learning_rate: float >= 0. The rate up to `begin_decay_at`.
        decay_steps: number >= 1: in this number of optimizer updates, the rate is multiplied by `decay_rate` once. A
            simple fraction such as 2.5 is also allowed.
        decay_rate: float >= 0. Above 1 the rate grows. With 0 the rate is `min_lr` as soon as $p > 0$.
        use_staircase_decay: bool, required. Whether to decay in stairs: $p$ is rounded down.
        begin_decay_at: int >= 0. The first update of the decay. Defaults to 0.
        min_lr: float >= 0. The minimum rate, also before the decay. Defaults to 0.

    Returns (from a call): a tensor of the step's shape in `keras.config.floatx()`.

    Raises:
        ValueError: if a number is out of its range, infinite or NaN, or if `decay_steps` is not a simple
            fraction: exactly $n/m$ with $nm < 2^{31}$, so staircases change at exact steps.
        TypeError: if an argument is not a number, or `use_staircase_decay` not a bool.

    Example:
        >>> import keras_shardopt as ks
        >>> arguments = dict(decay_steps=10, decay_rate=0.25, use_staircase_decay=False)
        >>> schedule = ks.schedules.ExpDecay(1.0, **arguments)
        >>> [float(schedule(step)) for step in (0, 5, 10)]
        [1.0, 0.5, 0.25]

    References:
        OpenSeq2Seq, `lr_policies.exp_decay`. It computed $q^p$ as one float32 power, with an error of 8e-4 for
        0.9999 ** 50000. Here the power is exact to float32 rounding.
    """

    def __init__(
        self,
        learning_rate: float,
        decay_steps: float,
        decay_rate: float,
        use_staircase_decay: bool,
        begin_decay_at: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        self.learning_rate = _learning_rate(learning_rate)
        self.decay_steps = check.duration("decay_steps", decay_steps)
        self._numerator, self._denominator = Fraction(self.decay_steps).as_integer_ratio()
        if self._denominator > 1 and self._numerator * self._denominator >= 2**31:
            raise ValueError(
                "`decay_steps` must be a whole number, or a fraction with a small denominator such as 2.5. Received: "
                f"decay_steps={decay_steps!r}. Round it to a whole number or a half."
            )
        self.decay_rate = check.number("decay_rate", decay_rate, at_least=0)
        self._squares = repeated_squares(self.decay_rate)
        self.use_staircase_decay = check.flag("use_staircase_decay", use_staircase_decay)
        self.begin_decay_at = check.count("begin_decay_at", begin_decay_at, 0)
        self.min_lr = check.number("min_lr", min_lr, at_least=0)

    def rate_at(self, steps: StepCount) -> Tensor:
        """Returns the decayed rate."""
        whole, part = steps.since(self.begin_decay_at).periods(self._numerator, self._denominator)
        decay = whole.as_exponent(self._squares)
        if not self.use_staircase_decay and self.decay_steps != 1:
            decay = decay * ops.power(ops.cast(self.decay_rate, steps.dtype), part)
        rate = self.learning_rate * decay
        # Use `ops.where`, because `ops.maximum` converts float64 to float32 on PyTorch.
        return ops.where(rate > self.min_lr, rate, self.min_lr)


@keras.saving.register_keras_serializable(package="keras_shardopt")
class PolyDecay(Policy):
    r"""Linear warm-up, then polynomial decay to a final rate.

    With rate $r$ = `learning_rate`, warm-up $w$ = `warmup_steps`, minimum $m$ = `min_lr`, begin $b$ =
    `begin_decay_at`, length $d$ = `decay_steps` and power $p$, the rate at step $s$ is

    $$L f + m (1 - f), \quad L = r \min(s / w,\ 1), \quad f = (1 - t / d)^p, \quad t = \min(\max(s - b, 0),\ d).$$

    The rate is $L$ up to step $b$ (it does not depend on `min_lr`) and $m$ from step $b + d$ on. In a warm-up,
    step 0 has rate 0 and step $w$ has the full rate. Without warm-up, $L = r$. If $b < w$, warm-up and decay overlap.
    `from_run` prevents this: its decay begins after the warm-up.

    Args:
        learning_rate: float >= 0. The rate after warm-up and before decay.
        decay_steps: number >= 1, in optimizer updates. The length of the decay, from `begin_decay_at`.
        power: float > 0. 1 (default) is linear.
        begin_decay_at: int >= 0. The last update before decay. Defaults to 0.
        min_lr: float >= 0. The final rate, not a fraction of `learning_rate`. Defaults to 0. If it
            is larger than `learning_rate`, the rate rises.
        warmup_steps: int >= 0, in optimizer updates. Defaults to 0, no warm-up.

    Returns (from a call): a tensor of the step's shape in `keras.config.floatx()`.

    Raises:
        ValueError: if a number is out of its range, infinite or NaN.
        TypeError: if an argument is not a number.

    Example:
        >>> import keras_shardopt as ks
        >>> arguments = dict(decay_steps=8, power=2, begin_decay_at=4, warmup_steps=4)
        >>> schedule = ks.schedules.PolyDecay(1.0, **arguments)
        >>> [float(schedule(step)) for step in (0, 2, 4, 8, 12, 100)]
        [0.0, 0.5, 1.0, 0.25, 0.0, 0.0]

    References:
        OpenSeq2Seq, `lr_policies.poly_decay`. It accepted `power=0` (no decay), and returned NaN for
        `decay_steps=0`. Here both raise an error.
    """

    def __init__(
        self,
        learning_rate: float,
        decay_steps: float,
        power: float = 1.0,
        begin_decay_at: int = 0,
        min_lr: float = 0.0,
        warmup_steps: int = 0,
    ) -> None:
        self.learning_rate = _learning_rate(learning_rate)
        self.decay_steps = check.duration("decay_steps", decay_steps)
        self.power = _power(power)
        self.begin_decay_at = check.count("begin_decay_at", begin_decay_at, 0)
        self.min_lr = check.number("min_lr", min_lr, at_least=0)
        self.warmup_steps = check.count("warmup_steps", warmup_steps, 0)

    def rate_at(self, steps: StepCount) -> Tensor:
        """Returns the rate after warm-up and decay."""
        fraction = steps.since(self.begin_decay_at).remaining(self.decay_steps)
        if self.power != 1:
            fraction = ops.power(fraction, self.power)
        # Do not shorten this to (L - m) f + m, because rounding would change the result L for f = 1.
        return _warmed_up(self.learning_rate, self.warmup_steps, steps) * fraction + self.min_lr * (1.0 - fraction)


@keras.saving.register_keras_serializable(package="keras_shardopt")
class CosineDecay(Policy):
    r"""Linear warm-up, then half a cosine down to a fraction of the rate, or to an absolute rate.

    With rate $r$ = `learning_rate`, warm-up $w$ = `warmup_steps`, fraction $a$ = `min_lr`, begin $b$ =
    `begin_decay_at` and length $d$ = `decay_steps`, the rate at step $s$ is

    $$L\,(a + (1 - a)\,c), \quad L = r \min(s / w,\ 1), \quad c = (1 + \cos(\pi t / d)) / 2,
    \quad t = \min(\max(s - b, 0),\ d).$$

    With $m$ = `absolute_min_lr`, the rate is $L c + m (1 - c)$. In a warm-up, step 0 has rate 0 and step $w$ has the
    full rate. Without warm-up, $L = r$. If $b < w$, warm-up and decay overlap. `from_run` prevents this.

    Args:
        learning_rate: float >= 0. The rate after warm-up and before decay.
        decay_steps: number >= 1, in optimizer updates. The length of the decay, from `begin_decay_at`.
        power: has no effect. A value other than 1 (default) gives a warning. See `PolyDecay`.
        begin_decay_at: int >= 0. The last update before decay. Defaults to 0.
        min_lr: float >= 0. The final rate as a FRACTION of `learning_rate`, unlike `min_lr` of other schedules.
            Defaults to 0.
        warmup_steps: int >= 0, in optimizer updates. Defaults to 0, no warm-up.
        absolute_min_lr: float >= 0 or None (default). The final rate, instead of `min_lr`.

    Returns (from a call): a tensor of the step's shape in `keras.config.floatx()`.

    Raises:
        ValueError: if a number is out of its range, infinite or NaN; if `min_lr` and `absolute_min_lr` are both set.
        TypeError: if an argument is not a number.

    Example:
        >>> import keras_shardopt as ks
        >>> schedule = ks.schedules.CosineDecay(1.0, decay_steps=8, min_lr=0.1)
        >>> [round(float(schedule(step)), 6) for step in (0, 4, 8)]
        [1.0, 0.55, 0.1]
        >>> round(float(ks.schedules.CosineDecay(0.5, decay_steps=8, absolute_min_lr=0.1)(8)), 6)
        0.1

    References:
        Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017, without the restarts.
        OpenSeq2Seq, `lr_policies.cosine_decay`. It silently ignored `power`, and `decay_steps=0` gave NaN.
        `absolute_min_lr` is new. $c$ is computed as $\sin^2(\pi (d - t) / 2d)$, which stays precise near the end of the
        decay, where $c$ is small.
    """

    def __init__(
        self,
        learning_rate: float,
        decay_steps: float,
        power: float = 1.0,
        begin_decay_at: int = 0,
        min_lr: float = 0.0,
        warmup_steps: int = 0,
        absolute_min_lr: float | None = None,
    ) -> None:
        self.learning_rate = _learning_rate(learning_rate)
        self.decay_steps = check.duration("decay_steps", decay_steps)
        self.power = _power(power)
        if self.power != 1:
            # Warn instead of raising an error, so configs of OpenSeq2Seq with `power` still work.
            warn(
                f"`power` has no effect on CosineDecay. Received: power={power!r}. Remove `power`, or use PolyDecay.",
            )
        self.begin_decay_at = check.count("begin_decay_at", begin_decay_at, 0)
        self.min_lr = check.number("min_lr", min_lr, at_least=0, fix="Pass a fraction of `learning_rate`.")
        self.warmup_steps = check.count("warmup_steps", warmup_steps, 0)
        if absolute_min_lr is not None:
            absolute_min_lr = check.number("absolute_min_lr", absolute_min_lr, at_least=0)
            if self.min_lr:
                raise ValueError(
                    "Only one of `min_lr` (a fraction of `learning_rate`) and `absolute_min_lr` (a rate) can be "
                    f"given. Received: min_lr={min_lr!r}, absolute_min_lr={absolute_min_lr!r}"
                )
        self.absolute_min_lr = absolute_min_lr

    def rate_at(self, steps: StepCount) -> Tensor:
        """Returns the rate after warm-up and decay."""
        remaining = steps.since(self.begin_decay_at).remaining(self.decay_steps)
        fraction = ops.square(_sine(remaining * (math.pi / 2), steps.dtype))
        rate = _warmed_up(self.learning_rate, self.warmup_steps, steps)
        if self.absolute_min_lr is not None:
            return rate * fraction + self.absolute_min_lr * (1.0 - fraction)
        return rate * (fraction + self.min_lr * (1.0 - fraction))


@keras.saving.register_keras_serializable(package="keras_shardopt")
class InvPolyDecay(Policy):
    r"""Decay with an inverse power of the step that reaches a given rate at a given step.

    With rate $r$ = `learning_rate`, $m = \min(\max(\text{min\_lr}, 10^{-8}), r)$, length $d$ = `decay_steps` and
    power $p$, the rate at step $s$ is

    $$r\,/\,(1 + k s)^p, \quad k = ((r / m)^{1/p} - 1) / d.$$

    The rate is $m$ at step $d$, and falls further after it.

    Args:
        learning_rate: float > 0. The rate at step 0.
        decay_steps: number >= 1, in optimizer updates. The step at which the rate is `min_lr`.
        min_lr: float >= 0. The rate at step `decay_steps`, not a minimum. A value below 1e-8 counts as 1e-8. Required.
        power: float > 0. Defaults to 1.
        begin_decay_at: must be 0 (default). Use `Join` for a later decay.
        warmup_steps: must be 0 (default). Use `Warmup` for a warm-up.
        name: str or None (default). Stored in the config.

    Returns (from a call): a tensor of the step's shape in `keras.config.floatx()`.

    Raises:
        ValueError: if a number is out of its range, infinite or NaN; if `begin_decay_at` or `warmup_steps` is not 0;
            if `power` is so small that $k$ exceeds the range of float32.
        TypeError: if an argument is not a number.

    Example:
        >>> import keras_shardopt as ks
        >>> schedule = ks.schedules.InvPolyDecay(1.0, decay_steps=8, min_lr=0.5)
        >>> [round(float(schedule(step)), 6) for step in (0, 8, 24)]
        [1.0, 0.5, 0.25]

    References:
        OpenSeq2Seq, `lr_policies.inv_poly_decay`. It silently ignored `begin_decay_at` and `warmup_steps`.
    """

    def __init__(
        self,
        learning_rate: float,
        decay_steps: float,
        min_lr: float,
        power: float = 1.0,
        begin_decay_at: int = 0,
        warmup_steps: int = 0,
        name: str | None = None,
    ) -> None:
        self.learning_rate = check.number("learning_rate", learning_rate, above=0)
        self.decay_steps = check.duration("decay_steps", decay_steps)
        self.min_lr = check.number("min_lr", min_lr, at_least=0)
        self.power = _power(power)
        self.begin_decay_at = check.count("begin_decay_at", begin_decay_at, 0)
        self.warmup_steps = check.count("warmup_steps", warmup_steps, 0)
        if name is not None and not isinstance(name, str):
            raise TypeError(f"`name` must be a str or None. Received: name={name!r}")
        self.name = name
        if self.begin_decay_at:
            raise ValueError(
                "`begin_decay_at` has no effect on InvPolyDecay and must be 0. Received: "
                f"begin_decay_at={begin_decay_at!r}. To decay later, use "
                "`Join([learning_rate, InvPolyDecay(...)], boundaries=[begin_decay_at])`."
            )
        if self.warmup_steps:
            raise ValueError(
                "`warmup_steps` has no effect on InvPolyDecay and must be 0. Received: "
                f"warmup_steps={warmup_steps!r}. For a warm-up, use `Warmup(InvPolyDecay(...), warmup_steps)`."
            )
        self._slope = self._checked_slope()

    def _checked_slope(self) -> float:
        end = min(max(self.min_lr, 1e-8), self.learning_rate)
        try:
            slope = math.expm1(math.log(self.learning_rate / end) / self.power) / self.decay_steps
        except OverflowError:
            slope = math.inf
        if slope > 1e28:  # its product with any step must fit float32
            raise ValueError(
                "`power` must be large enough that (`learning_rate` / `min_lr`) ** (1 / `power`) / `decay_steps` is at "
                f"most 1e28. Received: power={self.power!r}, learning_rate={self.learning_rate!r}, "
                f"min_lr={self.min_lr!r}. Raise `power` or `min_lr`."
            )
        return slope

    def rate_at(self, steps: StepCount) -> Tensor:
        """Returns the decayed rate."""
        # Compute the power (1 + k s) ** -p as an exponential of `log1p`, which is precise for small k s.
        return self.learning_rate * ops.exp(-self.power * ops.log1p(self._slope * steps.number()))


@keras.saving.register_keras_serializable(package="keras_shardopt")
class TransformerPolicy(Policy):
    r"""Linear warm-up, then decay with the inverse square root of the step, scaled by the width of the model.

    With $c$ = `coefficient`, $d$ = `d_model`, $w$ = `warmup_steps` and $r$ = `learning_rate`, the rate at step $s$,
    counted from 0, is

    $$\min(r\,c\,d^{-1/2} \min((s + 1)\,w^{-3/2},\ (s + 1)^{-1/2}),\ \text{max\_lr}).$$

    The maximum, at step $w - 1$, is $r\,c\,(d\,w)^{-1/2}$. The rate at step 0 is not 0.

    Args:
        learning_rate: float >= 0. A multiplier, usually about 1, not the rate.
        d_model: int >= 1. The width of the model.
        warmup_steps: int >= 1, in optimizer updates.
        max_lr: float >= 0 or None (default). The maximum rate; 0.0 is valid.
        coefficient: float >= 0. A second multiplier. OpenSeq2Seq's configs used 0.002 with Adam. Defaults to 1.
        dtype: str, dtype or None. The float dtype of the rate. None (default) is `keras.config.floatx()`.

    Returns (from a call): a tensor of the step's shape in `dtype`.

    Raises:
        ValueError: if a number is out of its range, infinite or NaN, or if `dtype` is not a float dtype.
        TypeError: if an argument is not a number.

    Example:
        >>> import keras_shardopt as ks
        >>> schedule = ks.schedules.TransformerPolicy(2.0, d_model=64, warmup_steps=4)
        >>> [round(float(schedule(step)), 6) for step in (0, 3, 15)]
        [0.03125, 0.125, 0.0625]

    References:
        Vaswani et al., "Attention Is All You Need", 2017, section 5.3. OpenSeq2Seq, `lr_policies.transformer_policy`.
        It also computed in `dtype`: in float16, the rate had errors of a few percent and was 0 from step 65504 on. With
        `max_lr`, it failed for float64 and ints. Here the arithmetic is at least float32.
    """

    def __init__(
        self,
        learning_rate: float,
        d_model: int,
        warmup_steps: int,
        max_lr: float | None = None,
        coefficient: float = 1.0,
        dtype: Any = None,
    ) -> None:
        self.learning_rate = _learning_rate(learning_rate)
        self.d_model = check.count("d_model", d_model, 1)
        self.warmup_steps = check.count("warmup_steps", warmup_steps, 1)
        self.max_lr = None if max_lr is None else check.number("max_lr", max_lr, at_least=0)
        self.coefficient = check.number("coefficient", coefficient, at_least=0)
        self.dtype = None if dtype is None else _float_dtype(dtype)

    def __call__(self, step: Any) -> Tensor:
        """Returns the rate at `step`, in `dtype`."""
        if self.dtype is None:
            return super().__call__(step)
        return ops.cast(self.rate_at(StepCount(step, at_least_float32(self.dtype))), self.dtype)

    def rate_at(self, steps: StepCount) -> Tensor:
        """Returns the rate before the cast to `dtype`."""
        updates = steps.next()
        rising = updates.elapsed(self.warmup_steps) * self.warmup_steps**-0.5
        falling = ops.rsqrt(updates.number())
        peak_scale = self.learning_rate * self.coefficient * self.d_model**-0.5
        # Use `ops.where`, because `ops.minimum` converts float64 to float32 on PyTorch.
        rate = peak_scale * ops.where(rising < falling, rising, falling)
        return rate if self.max_lr is None else ops.where(rate < self.max_lr, rate, self.max_lr)


def _warmed_up(learning_rate: float, warmup_steps: int, steps: StepCount) -> Tensor:
    if not warmup_steps:
        return learning_rate
    return learning_rate * steps.elapsed(warmup_steps)


def _float_dtype(dtype: Any) -> str:
    try:
        found: str = keras.backend.standardize_dtype(dtype)
        is_float = keras.backend.is_float_dtype(found)
    except Exception:  # non-dtypes raise many kinds of errors
        is_float = False
    if not is_float:
        raise ValueError(f"`dtype` must be a float dtype or None. Received: dtype={dtype!r}")
    return found


def _sine(angle: Tensor, dtype: str) -> Tensor:
    """Returns the sine of an angle from 0 to pi / 2."""
    if dtype == "float32":
        return ops.sin(angle)
    # `ops.sin` would convert float64 to float32 on JAX. Up to pi / 2, this Taylor series is exact to rounding.
    square, series = angle * angle, 1.0
    for n in range(22, 0, -2):
        series = 1.0 - square / (n * (n + 1)) * series
    return angle * series


def _learning_rate(value: Any) -> float:
    return check.number("learning_rate", value, at_least=0)


def _power(value: Any) -> float:
    return check.number("power", value, above=0)
