"""Arithmetic on step counts that rounds once, at the end.

float32 holds whole numbers up to 2**24 = 16 777 216 only; from there on neighbouring steps fall together. So steps
are compared, subtracted and divided as integers here, and what becomes a float is a ratio: of the smaller of the
two parts that a step divides a span into, so that both ends of a span are resolved.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_shardopt._typing import Tensor

_INT32_MAX = 2**31 - 1
_LARGEST = {"int32": _INT32_MAX, "uint32": 2**32 - 1, "int64": 2**63 - 1, "uint64": 2**64 - 1}


class StepCount:
    """A step, or a tensor of steps, none of them negative.

    Args:
        step: an int, an integer tensor of any shape, or a `keras.Variable`.
        dtype: str. The float dtype that ratios are computed and returned in.

    Raises:
        TypeError: if `step` is not made of integers.
        ValueError: if `step` is None, or is negative where its value can be seen without a device.
        OverflowError: if `step` does not fit the integers of the backend.
    """

    def __init__(self, step: Any, dtype: str) -> None:
        self.value = _integers(step)
        self.dtype = dtype
        self.largest = _LARGEST[keras.backend.standardize_dtype(self.value.dtype)]

    def since(self, start: int) -> StepCount:
        """The steps since `start`, 0 before it."""
        if start == 0:
            return self
        start = min(start, self.largest)
        return self._with(ops.maximum(self.value, start) - start)

    def next(self) -> StepCount:
        """One step more."""
        return self._with(ops.minimum(self.value, self.largest - 1) + 1)

    def exceeds(self, bound: int) -> Tensor:
        """Whether the step is greater than `bound`."""
        return ops.greater(self.value, min(bound, self.largest))

    def num_exceeded(self, bounds: list[int]) -> Tensor:
        """How many of `bounds` the step is greater than."""
        reachable = [min(bound, self.largest) for bound in bounds]
        limits = ops.convert_to_tensor(np.asarray(reachable, self._integer_dtype))
        return ops.sum(ops.cast(ops.expand_dims(self.value, -1) > limits, "int32"), axis=-1)

    def elapsed(self, length: float) -> Tensor:
        """The part of the first `length` steps that is over, from 0 to 1."""
        passed, left = self._passed_and_left(length)
        return ops.where(2.0 * left < float(length), 1.0 - left / float(length), passed / float(length))

    def remaining(self, length: float) -> Tensor:
        """The part of the first `length` steps that is still to come, from 1 to 0."""
        passed, left = self._passed_and_left(length)
        return ops.where(2.0 * left < float(length), left / float(length), 1.0 - passed / float(length))

    def periods(self, numerator: int, denominator: int = 1) -> tuple[Tensor, Tensor]:
        """How many whole periods of `numerator / denominator` steps are over, and the part of the next one.

        The numerator must not be less than the denominator; where that is not 1 their product must be less than
        2**31.
        """
        if numerator > self.largest:
            return ops.zeros_like(self.value), ops.cast(self.value, self.dtype) / float(numerator)
        whole = ops.floor_divide(self.value, numerator)
        rest = ops.mod(self.value, numerator)
        if denominator != 1:
            # step * denominator would overflow; what is left over after whole numerators does not.
            rest = rest * denominator
            whole = whole * denominator + ops.floor_divide(rest, numerator)
            rest = ops.mod(rest, numerator)
        return whole, ops.cast(rest, self.dtype) / float(numerator)

    def number(self) -> Tensor:
        """The step as a float: exact up to 2**24 in float32, the nearest float beyond."""
        return ops.cast(self.value, self.dtype)

    def _passed_and_left(self, length: float) -> tuple[Tensor, Tensor]:
        whole = min(math.floor(length), self.largest)
        passed = ops.minimum(self.value, whole)
        left = ops.cast(whole - passed, self.dtype)
        beyond = length - whole  # the fraction of a step, or what an int32 step never reaches
        if beyond:
            left = ops.where(ops.greater(self.value, whole), 0.0, left + float(beyond))
        return ops.cast(passed, self.dtype), left

    @property
    def _integer_dtype(self) -> str:
        return keras.backend.standardize_dtype(self.value.dtype)

    def _with(self, value: Tensor) -> StepCount:
        changed = object.__new__(StepCount)
        changed.value, changed.dtype, changed.largest = value, self.dtype, self.largest
        return changed


def integer_power(base: float, exponent: Tensor, dtype: str) -> Tensor:
    """`base ** exponent` for a float `base` >= 0 and a tensor of integers >= 0.

    `pow(base, exponent)` in float32 takes the base for the nearest float32: 0.9999 ** 50000 is 8e-4 off that way.
    Here each bit of the exponent selects a factor `base ** (2 ** bit)` that was computed in float64.
    """
    integer_dtype = keras.backend.standardize_dtype(exponent.dtype)
    factors: list[float] = []
    with np.errstate(over="ignore", under="ignore"):
        while len(factors) < _LARGEST[integer_dtype].bit_length():
            factors.append(float(np.float64(base) ** np.float64(2.0 ** len(factors))))
            if factors[-1] in (0.0, math.inf):  # and so is every larger power
                break
        table = np.asarray(factors).astype(dtype)
    exponent = ops.minimum(exponent, 2 ** len(factors) - 1)
    places = ops.convert_to_tensor(np.asarray([2**bit for bit in range(len(factors))], integer_dtype))
    bits = ops.mod(ops.floor_divide(ops.expand_dims(exponent, -1), places), 2)
    return ops.prod(ops.where(ops.equal(bits, 1), ops.convert_to_tensor(table), 1.0), axis=-1)


def _integers(step: Any) -> Tensor:
    if step is None:
        raise ValueError("`step` must be given: an int or an integer tensor, such as `optimizer.iterations`.")
    if isinstance(step, (int, float, np.generic, np.ndarray)):
        step = _host_integers(step)
    else:
        step = ops.convert_to_tensor(step)
    dtype = keras.backend.standardize_dtype(step.dtype)
    if "int" not in dtype:
        raise TypeError(
            "`step` counts updates and must be made of integers: a float32 cannot tell 16777217 from 16777216. "
            f"Received: step={step!r} of dtype {dtype}. Pass `optimizer.iterations` as it is, or cast to int."
        )
    return step if dtype in _LARGEST else ops.cast(step, "int32")


def _host_integers(step: Any) -> Tensor:
    array = np.asarray(step)
    if array.dtype.kind not in "iu" or not array.size:
        return ops.convert_to_tensor(array)
    if array.min() < 0:
        raise ValueError(f"`step` must not be negative. Received: step={step!r}")
    if array.max() <= _INT32_MAX:
        return ops.convert_to_tensor(array.astype("int32"))
    tensor = ops.convert_to_tensor(array.astype("int64"))
    if keras.backend.standardize_dtype(tensor.dtype) != "int64":
        # JAX has no int64 unless jax_enable_x64 is set, and wraps without a word.
        if array.max() > _LARGEST["uint32"]:
            raise OverflowError(f"`step` must be below 2**32 unless the backend has int64. Received: step={step!r}")
        tensor = ops.convert_to_tensor(array.astype("uint32"))
    return tensor
