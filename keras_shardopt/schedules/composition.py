"""Schedules that combine or transform other schedules.

Their argument `schedule` can also be a number (a fixed rate), or the config of a schedule. With a schedule of Keras,
steps may have to be scalars, and the precision is that of Keras' schedule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import keras
from keras import ops

from keras_shardopt import arguments as check
from keras_shardopt.numerics import Tensor
from keras_shardopt.schedules.schedule import Schedule, part
from keras_shardopt.schedules.step_count import StepCount


@keras.saving.register_keras_serializable(package="keras_shardopt")
class Warmup(Schedule):
    r"""Linear warm-up, then any schedule.

    With the schedule $f$, $w$ = `warmup_steps` and $a$ = `start_factor`, the rate at step $s$ is

    $$(a + (1 - a) \min(s / w,\ 1)) \cdot f(\max(s - w,\ 0)).$$

    The rate rises to $f(0)$ at step $w$, and the schedule begins there. With `delay_schedule=False`, the schedule runs
    from step 0, so the last factor is $f(s)$.

    Args:
        schedule: any Keras schedule, a number for a fixed rate, or a config.
        warmup_steps: int >= 1, in optimizer updates.
        start_factor: float >= 0. The factor at step 0. Defaults to 0: the first update changes nothing.
        delay_schedule: bool. Whether the schedule counts steps from the end of warm-up (default), or all steps.

    Returns (from a call): a tensor of the step's shape in `keras.config.floatx()`.

    Raises:
        ValueError: if a number is out of its range, infinite or NaN.
        TypeError: if `schedule` is not a schedule, `delay_schedule` not a bool, or another argument not a number.

    Example:
        >>> import keras_shardopt as ks
        >>> decay = ks.schedules.PolyDecay(1.0, decay_steps=4)
        >>> schedule = ks.schedules.Warmup(decay, warmup_steps=2)
        >>> [float(schedule(step)) for step in range(7)]
        [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]

    References:
        With `delay_schedule=False` it corresponds to `warmup_steps` of OpenSeq2Seq's `poly_decay` and `cosine_decay`,
        except that `min_lr` is also warmed up here.
    """

    def __init__(
        self, schedule: Any, warmup_steps: int, start_factor: float = 0.0, delay_schedule: bool = True
    ) -> None:
        self.schedule = part("schedule", schedule)
        self.warmup_steps = check.count("warmup_steps", warmup_steps, 1)
        self.start_factor = check.number("start_factor", start_factor, at_least=0)
        self.delay_schedule = check.flag("delay_schedule", delay_schedule)

    def rate_at(self, steps: StepCount) -> Tensor:
        """Returns the rate of the schedule, times the warm-up."""
        seen = steps.since(self.warmup_steps) if self.delay_schedule else steps
        return _ramp(self.start_factor, 1.0, self.warmup_steps, steps) * _rate(self.schedule, seen)


@keras.saving.register_keras_serializable(package="keras_shardopt")
class Join(Schedule):
    r"""Runs schedules one after the other; each counts steps from its own start.

    With schedules $f_0 \dots f_n$, boundaries $b_1 \le \dots \le b_n$ and $b_0 = 0$, the rate at step $s$ is
    $f_k(s - b_k)$. Here $k$ is the number of boundaries at or below $s$, so step 0 of a schedule is AT its boundary.
    (`PiecewiseConstant` changes its rate one step after the boundary.)

    Args:
        schedules: list of schedules: any Keras schedule, a number for a fixed rate, or a config.
        boundaries: list of int >= 0 that do not decrease, one fewer than schedules. The first step of each schedule
            except the first, in optimizer updates.

    Returns (from a call): a tensor of the step's shape in `keras.config.floatx()`.

    Raises:
        ValueError: if the numbers of schedules and boundaries do not match, or boundaries decrease or are fractions.
        TypeError: if an item is not a schedule, or a boundary not a number.

    Example:
        >>> import keras_shardopt as ks
        >>> decay = ks.schedules.PolyDecay(1.0, decay_steps=4)
        >>> schedule = ks.schedules.Join([0.5, decay], boundaries=[2])
        >>> [float(schedule(step)) for step in range(7)]
        [0.5, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]

    References:
        The rule for boundaries is the one of `optax.join_schedules`.
    """

    def __init__(self, schedules: Sequence[Any], boundaries: Sequence[int]) -> None:
        self.schedules = [part("schedules", schedule) for schedule in check.sequence("schedules", schedules)]
        self.boundaries = check.counts("boundaries", boundaries, "Pass ints, in updates.", at_least=0)
        if len(self.boundaries) != len(self.schedules) - 1:
            raise ValueError(
                f"`boundaries` must have one entry less than `schedules`. Received: {len(self.boundaries)} "
                f"boundaries={self.boundaries} and {len(self.schedules)} schedules"
            )

    def rate_at(self, steps: StepCount) -> Tensor:
        """Returns the rate of the schedule that runs at this step."""
        rate = _rate(self.schedules[0], steps)
        for schedule, boundary in zip(self.schedules[1:], self.boundaries):
            # Do not compare if the boundary is 0: every step has passed 0, and `exceeds(-1)` fails for unsigned steps.
            later = _rate(schedule, steps.since(boundary))
            rate = later if boundary == 0 else ops.where(steps.exceeds(boundary - 1), later, rate)
        return rate


@keras.saving.register_keras_serializable(package="keras_shardopt")
class ScaledByReplicas(Schedule):
    r"""Scales a schedule tuned for one replica to the larger global batch of several, with an optional warm-up.

    With the schedule $f$, $w$ = `warmup_steps`, and $k$ = `num_replicas` (`rule="linear"`) or its square root
    (`rule="sqrt"`), the rate at step $s$ is $(1 + (k - 1) \min(s / w,\ 1)) \cdot f(s)$. The factor of
    $f(s)$ rises from 1 to $k$ during the warm-up.

    The linear rule suits SGD. The square root suits adaptive optimizers such as Adam, because their updates do not
    grow with the gradient. Both require `CrossShard(reduction="mean")` and a global batch proportional to
    `num_replicas`.

    Args:
        schedule: any Keras schedule, a number for a fixed rate, or a config, tuned for one replica's batch.
        num_replicas: int >= 1. The factor between the global batch and one replica's batch.
        rule: "linear" (default) or "sqrt".
        warmup_steps: int >= 0, in optimizer updates. Defaults to 0: scaled from the first update.

    Returns (from a call): a tensor of the step's shape in `keras.config.floatx()`.

    Raises:
        ValueError: if a number is out of its range, infinite or NaN, or `rule` is unknown.
        TypeError: if `schedule` is not a schedule or another argument not a number.

    Example:
        >>> import keras_shardopt as ks
        >>> schedule = ks.schedules.ScaledByReplicas(0.5, num_replicas=4, warmup_steps=2)
        >>> [float(schedule(step)) for step in range(4)]
        [0.5, 1.25, 2.0, 2.0]

    References:
        Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017, sections 2.1 and 2.2, with
        five epochs of warm-up. Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014,
        section 5, for the square root.
    """

    def __init__(
        self, schedule: Any, num_replicas: int, rule: Literal["linear", "sqrt"] = "linear", warmup_steps: int = 0
    ) -> None:
        self.schedule = part("schedule", schedule)
        self.num_replicas = check.count("num_replicas", num_replicas, 1)
        self.rule = check.one_of("rule", rule, ("linear", "sqrt"))
        self.warmup_steps = check.count("warmup_steps", warmup_steps, 0)

    def rate_at(self, steps: StepCount) -> Tensor:
        """Returns the scaled rate."""
        factor = float(self.num_replicas) if self.rule == "linear" else math.sqrt(self.num_replicas)
        return _ramp(1.0, factor, self.warmup_steps, steps) * _rate(self.schedule, steps)


@keras.saving.register_keras_serializable(package="keras_shardopt")
class PerUpdate(Schedule):
    r"""Makes a schedule count updates, not micro-batches, in a Keras optimizer that accumulates gradients.

    With `gradient_accumulation_steps` $= k$, Keras passes the number of micro-batches to a schedule, so the schedule
    runs $k$ times too fast. With the schedule $f$, the rate at micro-batch $s$ is $f(\lfloor s / k \rfloor)$: update
    $n$ happens in micro-batch $n k + k - 1$, with the rate $f(n)$.

    Args:
        schedule: any Keras schedule, a number for a fixed rate, or a config.
        gradient_accumulation_steps: int >= 1. The value of this argument of the Keras optimizer.

    Returns (from a call): a tensor of the step's shape in `keras.config.floatx()`.

    Raises:
        ValueError: if `gradient_accumulation_steps` is out of its range, infinite or NaN.
        TypeError: if `schedule` is not a schedule, or `gradient_accumulation_steps` not a number.

    Example:
        >>> import keras, keras_shardopt as ks
        >>> schedule = ks.schedules.PerUpdate(ks.schedules.PolyDecay(1.0, decay_steps=4), 3)
        >>> optimizer = keras.optimizers.SGD(schedule, gradient_accumulation_steps=3)
        >>> [float(schedule(micro_step)) for micro_step in (2, 5, 8)]
        [1.0, 0.75, 0.5]

    References:
        OpenSeq2Seq's `iter_size`: schedules there count updates.
    """

    def __init__(self, schedule: Any, gradient_accumulation_steps: int) -> None:
        self.schedule = part("schedule", schedule)
        self.gradient_accumulation_steps = check.count("gradient_accumulation_steps", gradient_accumulation_steps, 1)

    def rate_at(self, steps: StepCount) -> Tensor:
        """Returns the rate of the schedule at the number of updates made before this micro-batch."""
        return _rate(self.schedule, steps.periods(self.gradient_accumulation_steps)[0])


def _ramp(start: float, end: float, length: int, steps: StepCount) -> Tensor:
    if not length:
        return end
    elapsed = steps.elapsed(length)
    return start * (1.0 - elapsed) + end * elapsed


def _rate(schedule: Any, steps: StepCount) -> Tensor:
    rate = schedule.rate_at(steps) if isinstance(schedule, Schedule) else schedule(steps.step)
    return ops.cast(rate, steps.dtype)
