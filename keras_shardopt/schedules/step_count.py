"""Arithmetic on step counts that rounds only once, at the end.

float32 represents whole numbers exactly only up to 2**24 = 16,777,216. Therefore steps are compared, subtracted and
divided as integers, and only a ratio becomes a float. An elapsed or remaining fraction of a span is computed from the
smaller of the two, so it is precise at both ends of the span.

Arithmetic on Python and NumPy integers uses NumPy, because JAX and Keras on PyTorch would truncate them to 32 bits.
For tensors, use only operators and `ops.where`, because `ops.minimum`, `ops.maximum`, `ops.floor_divide` and `ops.prod`
convert int64 to int32 and float64 to float32 on PyTorch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_shardopt.numerics import Tensor

_INT32_MAX = 2**31 - 1
_LARGEST = {"int32": _INT32_MAX, "uint32": 2**32 - 1, "int64": 2**63 - 1}
_FLOAT32_MAX = float(np.finfo("float32").max)


class StepCount:
    """One or more nonnegative step numbers, stored as integers.

    Args:
        step: an int, an integer array or tensor of any shape, or a `keras.Variable`.
        dtype: "float32" or "float64": the dtype of results. All results have the step's shape.
    """

    def __init__(self, step: Any, dtype: str) -> None:
        self._value = _integers(step)
        self._on_host = isinstance(self._value, (np.ndarray, np.integer))
        self._integer_dtype = keras.backend.standardize_dtype(self._value.dtype)
        self._largest = _LARGEST[self._integer_dtype]
        self.dtype = dtype

    @property
    def step(self) -> Any:
        """The step as an integer tensor, or as a NumPy array if a step is too large for int32."""
        if not self._on_host or np.max(self._value, initial=0) > _INT32_MAX:
            return self._value
        return ops.convert_to_tensor(self._value, dtype="int32")

    def since(self, start: int) -> StepCount:
        """Returns the number of steps since `start`, or 0 before `start`."""
        if start == 0:
            return self
        first = self._constant(start)
        return self._with(self._where(self._value > first, self._value, first) - first)

    def next(self) -> StepCount:
        """Returns the next step."""
        return self._with(self._at_most(self._largest - 1) + 1)

    def exceeds(self, bound: int) -> Tensor:
        """Whether the step is greater than `bound`."""
        return self._on_device(self._value > self._constant(bound), "bool")

    def num_exceeded(self, bounds: Sequence[int]) -> Tensor:
        """Returns the number of `bounds` that the step is greater than."""
        exceeded = self._value[..., None] > self._constants(bounds)
        return ops.sum(self._on_device(exceeded, "int32"), axis=-1)

    def elapsed(self, length: float) -> Tensor:
        """Returns the elapsed fraction of the first `length` steps, from 0 to 1."""
        passed, left = self._passed_and_left(length)
        return ops.where(2.0 * left < float(length), 1.0 - left / float(length), passed / float(length))

    def remaining(self, length: float) -> Tensor:
        """Returns the remaining fraction of the first `length` steps, from 1 to 0."""
        passed, left = self._passed_and_left(length)
        return ops.where(2.0 * left < float(length), left / float(length), 1.0 - passed / float(length))

    def periods(self, numerator: int, denominator: int = 1) -> tuple[StepCount, Tensor]:
        """Returns the number of complete periods of `numerator / denominator` steps, and the elapsed part of the next.

        The numerator must be at least the denominator. If the denominator is not 1, the product of
        both must be less than 2**31.
        """
        if numerator > self._largest:
            return self._with(self._value - self._value), self.number() / float(numerator)
        period = self._constant(numerator)
        whole, rest = self._value // period, self._value % period
        if denominator != 1:
            # `step * denominator` could overflow. `rest * denominator` cannot, because `rest` is below the numerator.
            rest = rest * denominator
            whole, rest = whole * denominator + rest // period, rest % period
        return self._with(whole), self._on_device(rest, self.dtype) / float(numerator)

    def as_exponent(self, squares: Sequence[float]) -> Tensor:
        """Returns the step-th power of a base, given `squares = repeated_squares(base)`."""
        factors = [math.inf if square > _FLOAT32_MAX and self.dtype == "float32" else square for square in squares]
        factors = factors[: self._largest.bit_length()]
        places = self._constants([2**bit for bit in range(len(factors))])
        bits = self._at_most(2 ** len(factors) - 1)[..., None] // places % 2
        chosen = ops.where(self._on_device(bits == 1, "bool"), ops.convert_to_tensor(factors, dtype=self.dtype), 1.0)
        return ops.prod(chosen, axis=-1, dtype=self.dtype)

    def number(self) -> Tensor:
        """Returns the step as a float. In float32, the result is exact up to 2**24, and rounded above."""
        return self._on_device(self._value, self.dtype)

    def _passed_and_left(self, length: float) -> tuple[Tensor, Tensor]:
        whole = min(math.floor(length), self._largest)
        passed = self._at_most(whole)
        left = self._on_device(whole - passed, self.dtype)
        beyond = length - whole  # a fraction of a step, or the steps beyond the dtype's range
        if beyond:
            left = ops.where(self.exceeds(whole), 0.0, left + float(beyond))
        return self._on_device(passed, self.dtype), left

    def _at_most(self, bound: int) -> Any:
        last = self._constant(bound)
        return self._where(self._value < last, self._value, last)

    def _constant(self, value: int) -> Any:
        """Returns the value in the dtype of the step. If it does not fit, returns the largest value of the dtype."""
        return self._as_steps(min(value, self._largest))

    def _constants(self, values: Sequence[int]) -> Any:
        return self._as_steps([min(value, self._largest) for value in values])

    def _as_steps(self, numbers: Any) -> Any:
        if self._on_host:
            return np.asarray(numbers, self._integer_dtype)
        return ops.convert_to_tensor(numbers, dtype=self._integer_dtype)

    def _where(self, condition: Any, some: Any, others: Any) -> Any:
        return np.where(condition, some, others) if self._on_host else ops.where(condition, some, others)

    def _on_device(self, values: Any, dtype: str) -> Tensor:
        return ops.convert_to_tensor(values.astype(dtype), dtype=dtype) if self._on_host else ops.cast(values, dtype)

    def _with(self, value: Any) -> StepCount:
        changed = copy.copy(self)
        changed._value = value
        return changed


def repeated_squares(base: float) -> list[float]:
    """Returns `base`, `base ** 2`, `base ** 4` and so on, until the value is constant, for `StepCount.as_exponent`.

    A power in float32 first rounds the base to float32: 0.9999 ** 50000 then has an error of 8e-4. `as_exponent`
    avoids this error: it multiplies only the float64 powers that the bits of the exponent select.
    """
    squares = [base]
    while squares[-1] not in (0.0, math.inf) and len(squares) < 63:
        try:
            squares.append(base**2 ** len(squares))
        except OverflowError:
            squares.append(math.inf)
    return squares


def _integers(step: Any) -> Any:
    if step is None:
        raise ValueError("`step` must be an int or an integer tensor, such as `optimizer.iterations`.")
    if type(step) is int and 0 <= step <= _INT32_MAX:
        # Make a tensor by adding to zeros, because `torch.compile` would compile again for each new constant.
        return ops.zeros((), dtype="int32") + step
    if isinstance(step, (int, float, list, tuple, np.generic, np.ndarray)):
        array = np.asarray(step)
        if array.dtype.kind in "iu":
            if np.min(array, initial=0) < 0:
                raise ValueError(f"`step` must not be negative. Received: step={step!r}")
            if np.max(array, initial=0) > _LARGEST["int64"]:
                raise ValueError(f"`step` must be less than 2**63. Received: step={step!r}")
            return array.astype("int64")
    else:
        array = ops.convert_to_tensor(step)
        dtype = keras.backend.standardize_dtype(array.dtype)
        if dtype in _LARGEST:
            return array
        if "int" in dtype:
            return ops.cast(array, "int64" if dtype == "uint64" else "int32")
    raise TypeError(
        "`step` counts updates and must be made of integers: float32 cannot distinguish 16777217 from 16777216. "
        f"Received: step={step!r} of dtype {array.dtype}. Pass `optimizer.iterations` as it is, or cast `step` to int."
    )
