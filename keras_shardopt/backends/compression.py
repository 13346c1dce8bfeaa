"""Sends gradients and other tensors in half precision when they are reduced over replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from keras import ops

from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.numerics import ReduceOp, Tensor, dtype_of, map_values


class Compressed:
    """Runs reductions of a communicator, and sends float32 and float64 tensors as `dtype` ("float16" or "bfloat16").

    With `divides`, each replica divides its tensor by the number of replicas before sending. The sum then overflows
    only if the mean does.
    """

    def __init__(self, replicas: Communicator, dtype: str, divides: bool) -> None:
        self._replicas = replicas
        self._dtype = dtype
        self._divides = divides

    def all_reduce(self, tensors: Sequence[Tensor], op: ReduceOp) -> list[Tensor]:
        """Return the sum or mean of each tensor over all replicas."""
        return self._compressed(self._replicas.all_reduce, tensors, op)

    def reduce_scatter(self, tensors: Sequence[Tensor], op: ReduceOp) -> list[Tensor]:
        """Return this replica's slice of the sum or mean of each tensor over replicas."""
        return self._compressed(self._replicas.reduce_scatter, tensors, op)

    def _compressed(self, reduce: Callable[..., list[Tensor]], tensors: Sequence[Tensor], op: ReduceOp) -> list[Tensor]:
        divisor, factor = factors(op, self._replicas.num_replicas, self._divides)

        def narrow(tensor: Tensor) -> Tensor:
            dtype = dtype_sent(dtype_of(tensor), self._dtype)
            return map_values(lambda value: ops.cast(value if divisor == 1 else value / divisor, dtype), tensor)

        def wide(total: Tensor, dtype: str) -> Tensor:
            return map_values(lambda value: _times(ops.cast(value, dtype), factor), total)

        return [wide(total, dtype_of(t)) for total, t in zip(reduce([narrow(t) for t in tensors], "sum"), tensors)]


def dtype_sent(dtype: str, compression: str | None) -> str:
    """Return the dtype in which a tensor is sent: `compression` for float32 and float64, `dtype` for other dtypes."""
    return compression if compression is not None and dtype in ("float32", "float64") else dtype


def factors(op: ReduceOp, num_replicas: int, divides: bool) -> tuple[int, float]:
    """Return the divisor of each tensor before it is sent (1 unless `divides`), and the factor of the received sum."""
    if op == "mean":
        return (num_replicas, 1) if divides else (1, 1 / num_replicas)
    return (num_replicas, num_replicas) if divides else (1, 1)


def _times(value: Tensor, factor: float) -> Tensor:
    return value if factor == 1 else ops.multiply(value, factor)
