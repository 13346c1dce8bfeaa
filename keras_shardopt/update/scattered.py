"""Reduce gradients to slices along any dimension, one per replica, for optimizer state divided in this way.

`Communicator.reduce_scatter` slices only along the first dimension, so this module first moves the dimension to the
front.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from keras import ops

from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.backends.compression import Compressed
from keras_shardopt.numerics import ReduceOp, Tensor
from keras_shardopt.update.transport import Transfer


class AlongAxes(Transfer):
    """Reduces some gradients to slices, one per replica, and returns all other tensors whole.

    Args:
        comm: runs the collectives, perhaps in half precision.
        axes: maps a variable's position to the dimension along which its gradient is divided.
    """

    def __init__(self, comm: Communicator | Compressed, axes: Mapping[int, int]) -> None:
        super().__init__(comm)
        self._axes = axes

    def all_reduce(
        self, places: Sequence[int], tensors: Sequence[Tensor], along: Tensor | None, op: ReduceOp
    ) -> tuple[list[Tensor], Tensor | None]:
        divided = {i: self._axes[place] for i, place in enumerate(places) if place in self._axes}
        moved = [ops.moveaxis(tensors[i], axis, 0) for i, axis in divided.items()]
        results: dict[int, Tensor] = {}
        for (i, axis), own in zip(divided.items(), self.comm.reduce_scatter(moved, op)):
            results[i] = ops.moveaxis(own, 0, axis)
        whole = [i for i in range(len(tensors)) if i not in results]
        sums = self.comm.all_reduce([*[tensors[i] for i in whole], *([] if along is None else [along])], op)
        results |= zip(whole, sums)
        return [results[i] for i in range(len(tensors))], None if along is None else sums[-1]
