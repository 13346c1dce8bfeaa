"""A step that computes a batch in parts: what is the same on all backends.

The parts have a fixed number and order, whatever the number of replicas (`parts_of_replica`). Losses may first need a
pass that counts (`with_divisors`). `PartVariables` combines the changes of metrics and layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

import keras
from keras import ops

from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.numerics import Tensor, Variable, dtype_of
from keras_shardopt.update.parts import CountingPart, NotCountedError, PartOfBatch
from keras_shardopt.update.trainer_context import current_share

Results = TypeVar("Results")


class _NoExchange:
    def _raise_not_counted(self) -> NoReturn:
        raise NotCountedError(
            "`VirtualReplicas` computes the parts of a batch one after another, so a layer or loss cannot use values "
            "of other parts. Received: a synchronized `BatchNormalization`; or, in a custom `train_step`, a custom "
            'loss, or a loss with a mask or `reduction="mean_with_sample_weight"`. Use the built-in `train_step`, '
            'sample weights instead of the mask, a Keras loss or `reduction="sum"`, or remove `VirtualReplicas`.'
        )


class VirtualReplica(_NoExchange, PartOfBatch):
    """One part of a batch. Losses and gradient code treat the part as a replica, with this object as communicator."""


class CountingReplica(_NoExchange, CountingPart):
    """One part of a batch in a forward pass that only computes the divisors of losses, such as the sum of a mask."""


def current_part() -> PartOfBatch | None:
    """Return the part of a batch that the trainer is computing, or None."""
    share = current_share()
    part = None if share is None else share.replicas
    return part if isinstance(part, PartOfBatch) else None


def parts_of_replica(num_parts: int, replicas: Communicator) -> range:
    """Return the indices of this replica's parts of every batch."""
    number = parts_of_each(num_parts, replicas.num_replicas)
    return range(replicas.replica_id * number, (replicas.replica_id + 1) * number)


def parts_of_each(num_parts: int, num_replicas: int) -> int:
    """Return the number of parts of each batch that one replica computes.

    Raises:
        ValueError: if `num_parts` is not a multiple of `num_replicas`.
    """
    if num_parts % num_replicas:
        raise ValueError(
            "The number of `VirtualReplicas` must be a multiple of the number of replicas. "
            f"Received: VirtualReplicas({num_parts}), with {num_replicas} replicas. Use 1, 2, 4, ... or {num_parts} "
            "replicas, or remove `VirtualReplicas`."
        )
    return num_parts // num_replicas


def with_divisors(
    run: Callable[[Sequence[Tensor]], Results], count: Callable[[], list[Tensor]] | None, counts_first: bool = False
) -> tuple[Results, bool]:
    """Compute all parts of a batch. Return the result of `run`, and whether losses needed divisors.

    Args:
        run: computes all parts, given the divisors of losses, such as the sum of a mask over the batch. If a divisor is
            missing, it raises NotCountedError. `with_divisors` then calls it again with all divisors.
        count: computes the divisors in forward passes. None: no part can run again, so the error is raised.
        counts_first: whether to call `count` at once, because the previous batch needed divisors.
    """
    divisors = count() if counts_first and count is not None else []
    try:
        return run(divisors), bool(divisors)
    except NotCountedError:
        if divisors or count is None:
            raise
    return run(count()), True


class PartVariables:
    """The variables, apart from trained weights, that each part of a batch changes. Lists of values have their order.

    Each part starts from the values before the batch, so parts do not depend on each other. After the batch,

    - a metric variable with `aggregation="sum"` has its old value plus the sum over all parts, which start from 0;
    - another float, such as a moving statistic, has its old value plus its mean change in the parts with rows;
    - any other variable, such as a seed, has its value after the last part.

    Args:
        state: the variables of layers.
        metrics: the variables of metrics.
        of_losses: the metric variables to sum over all parts. Others are summed over the parts with rows.
    """

    def __init__(self, state: Iterable[Variable], metrics: Iterable[Variable], of_losses: Iterable[Variable]) -> None:
        state, metrics, always = list(state), list(metrics), {id(v) for v in of_losses}
        self.variables: list[Variable] = [*state, *metrics]
        self.is_sum = [False for _ in state] + [v.aggregation == "sum" for v in metrics]
        floats = [keras.backend.is_float_dtype(v.dtype) for v in self.variables]
        self._is_mean = [is_float and not is_sum for is_float, is_sum in zip(floats, self.is_sum)]
        self._is_of_loss = [id(v) in always for v in self.variables]

    def starts(self, before: Sequence[Tensor]) -> list[Tensor]:
        """Return the values at the start of a part, from those before the batch."""
        return [ops.zeros_like(old) if is_sum else old for old, is_sum in zip(before, self.is_sum)]

    def ends(
        self, starts: Sequence[Tensor], after: Sequence[Tensor | None], num_rows: Any
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Return changes to sum over parts, and values to keep from the last part. Of each variable, one is None.

        Args:
            starts: the values at the start of the part.
            after: the values after the part; None for variables that it has not assigned.
            num_rows: the number of rows of the part, an int or a scalar tensor.
        """
        changes: list[Tensor | None] = [None for _ in after]
        last = list(after)
        for i, (start, end) in enumerate(zip(starts, after)):
            if end is not None and (self.is_sum[i] or self._is_mean[i]):
                change = end - start
                if self._is_mean[i]:  # an infinite value that stays (of a mask, for example): inf - inf would be NaN
                    change = ops.where(end == start, 0, change)
                changes[i] = change if self._is_of_loss[i] else _zero_without_rows(change, num_rows)
                last[i] = None
        return changes, last

    def settled(
        self, before: Sequence[Tensor], totals: Sequence[Tensor | None], last: Sequence[Tensor | None], num_parts: Any
    ) -> list[Tensor | None]:
        """Return the values after the batch; None for unchanged variables.

        Args:
            before: the values before the batch.
            totals: the changes, summed over all parts.
            last: the values kept from the last part.
            num_parts: the number of parts with rows, an int or a scalar tensor.
        """
        settled = list(last)
        for i, (old, total) in enumerate(zip(before, totals)):
            if total is not None:
                settled[i] = old + (_mean(total, num_parts) if self._is_mean[i] else total)
        return settled


def _zero_without_rows(change: Tensor, num_rows: Any) -> Tensor:
    if isinstance(num_rows, int):
        return change if num_rows else ops.zeros_like(change)
    return ops.where(num_rows > 0, change, ops.zeros_like(change))


def _mean(total: Tensor, number: Any) -> Tensor:
    return total / (number if isinstance(number, int) else ops.cast(number, dtype_of(total)))
