"""Sums over the parts of a batch in a binary tree, so their bits do not depend on the number of replicas.

A replica sums its parts in its subtree (`Subtrees`). Then an all-to-all gives each replica one slice of the sums of all
subtrees. The replica adds them, and an all-gather returns the totals (`Tree`). This sends as many bytes as a ring
all-reduce.

Integers with a shared exponent could also be summed in any order with the same result. But a tree propagates NaN and
infinity, keeps the range of the dtype, and does not have to find a common exponent first. Its disadvantage: the numbers
of parts and of replicas must be powers of two.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from keras import ops

from keras_shardopt.backends import for_backend
from keras_shardopt.backends.communicator import Communicator, GradientState
from keras_shardopt.numerics import Gradients, ReduceOp, Tensor, Variable, dtype_of

_SMALL = 2**14
"""Up to this number of elements, each replica gathers and adds the sums of all replicas: one collective, not two."""


# TensorFlow only (otherwise None), where replicas are devices of one process: sums each tensor separately.
_devices = for_backend({"tensorflow": "keras_shardopt.backends.tensorflow.communicator"})


class Subtrees:
    """Sums the tensors of a replica's parts of a batch in a binary tree."""

    def __init__(self) -> None:
        self._sums: list[tuple[int, list[Tensor | None]]] = []

    def add(self, tensors: Sequence[Tensor | None]) -> None:
        """Add the tensors of the next part of the batch. None counts as zero."""
        size, total = 1, list(tensors)
        while self._sums and self._sums[-1][0] == size:
            total = [_sum(a, b) for a, b in zip(self._sums.pop()[1], total)]
            size *= 2
        self._sums.append((size, total))

    def take(self) -> list[Tensor | None]:
        """Return the sum over all calls of `add`, and start a new sum. The number of calls must be a power of two."""
        ((_, total),) = self._sums
        self._sums = []
        return total


def summed(parts: Iterable[Sequence[Tensor | None]]) -> list[Tensor | None]:
    """Sum the tensors of a replica's parts of a batch. None counts as zero."""
    subtrees = Subtrees()
    for tensors in parts:
        subtrees.add(tensors)
    return subtrees.take()


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return ops.add(a, b)


class Tree(Communicator):
    """A communicator that sums tensors over replicas in a binary tree, after each replica has summed its parts.

    Args:
        replicas: the replicas.
        num_parts: the number of parts of a batch, on all replicas together. Means divide by this number.
    """

    def __init__(self, replicas: Communicator, num_parts: int) -> None:
        self._replicas = replicas
        self.num_parts = num_parts
        self.num_replicas = replicas.num_replicas
        self.replica_id = replicas.replica_id
        self.is_spmd = replicas.is_spmd

    def gradient_state(self, grads: Gradients, variables: Sequence[Variable]) -> GradientState:
        """Return `LOCAL`: each replica passes its own gradients, which are not reduced yet."""
        return GradientState.LOCAL

    def all_gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Concatenate the flat tensors of all replicas."""
        return self._replicas.all_gather(tensors)

    def all_reduce(self, tensors: Sequence[Tensor], op: ReduceOp) -> list[Tensor]:
        """Sum or average tensors over replicas, in the same order of additions for any number of replicas."""
        if op == "max":
            return self._replicas.all_reduce(tensors, op)
        factor = 1 / self.num_parts if op == "mean" else 1  # does not round: `num_parts` is a power of two
        if _devices is not None and isinstance(self._replicas, _devices.ReplicaContext):
            totals: list[Tensor] = self._replicas.all_reduce_in_tree(tensors, factor)
            return totals
        result: list[Tensor] = [None] * len(tensors)
        by_dtype: dict[str, list[int]] = {}
        for i, tensor in enumerate(tensors):
            by_dtype.setdefault(dtype_of(tensor), []).append(i)
        for indices in by_dtype.values():
            total = self._total([tensors[i] for i in indices])
            if factor != 1:
                total = ops.multiply(total, factor)
            start = 0
            for i in indices:
                size = functools.reduce(int.__mul__, tensors[i].shape, 1)
                result[i] = _reshaped(total[start : start + size], tensors[i].shape)
                start += size
        return result

    def total(self, tensors: Sequence[Tensor | None]) -> list[Any]:
        """Sum tensors over replicas. None stays None."""
        left = iter(self.all_reduce([tensor for tensor in tensors if tensor is not None], "sum"))
        return [None if tensor is None else next(left) for tensor in tensors]

    def _total(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the totals of `tensors` over replicas, flattened and concatenated to one tensor."""
        flat = ops.concatenate([_reshaped(tensor, (-1,)) for tensor in tensors])
        size, length = self.num_replicas, flat.shape[0]
        if size == 1:
            return flat
        if length <= _SMALL:
            (everyones,) = self._replicas.all_gather([flat])
            return _tree_sum(_reshaped(everyones, (size, -1)))
        if length % size:
            flat = ops.concatenate([flat, ops.zeros((-length % size,), dtype_of(flat))])
        (everyones,) = self._replicas.all_to_all([flat])
        (total,) = self._replicas.all_gather([_tree_sum(_reshaped(everyones, (size, -1)))])
        return total[:length]


def _reshaped(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Reshape a tensor with its method `reshape`, if any. On PyTorch, `ops.reshape` takes longer than a small sum."""
    return tensor.reshape(shape) if hasattr(tensor, "reshape") else ops.reshape(tensor, shape)


def _tree_sum(rows: Tensor) -> Tensor:
    """Sum the rows of a tensor in a binary tree. The number of rows must be a power of two."""
    while rows.shape[0] > 1:
        rows = ops.add(rows[::2], rows[1::2])
    return rows[0]
