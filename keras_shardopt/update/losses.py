"""The loss of the whole batch, computed on replicas that each have some of the rows.

Keras divides a loss by the replica's number of rows, sum of weights, or mask. If replicas have different numbers of
rows, the mean of these losses is not the mean over the batch. Inside `batch_shared()`, every `keras.losses.Loss`,
including those of `compile(loss=...)`, divides by the total over all replicas.

Private names of Keras touched here (a test checks that each exists):
    `keras.src.losses.loss.reduce_weighted_values` - reduces the values of a loss to a scalar in `Loss.__call__`.
    `keras.src.losses.losses` - the module of Keras' losses and their functions.
    `keras.src.losses.loss.squeeze_or_expand_to_same_rank`, `standardize_reduction` - helpers of the first function.
    `Trainer._loss_tracker`, `Trainer._compile_loss` - the metrics that hold mean losses.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from keras import ops
from keras.src.losses import loss as keras_loss
from keras.src.losses import losses as keras_losses

from keras_shardopt.backends import for_backend
from keras_shardopt.backends.keras_callers import caller_instance
from keras_shardopt.backends.patches import install
from keras_shardopt.numerics import Tensor, cast, dtype_of
from keras_shardopt.update.trainer_context import BatchShare, current_share

# TensorFlow only: records whether a loss was divided by the number of replicas, so gradients must be summed.
_dividing = for_backend({"tensorflow": "keras_shardopt.backends.tensorflow.losses"})


def share_losses(model: Any) -> None:
    """Make losses and their metrics in `model` cover the global batch, in training steps on several replicas.

    Such a step runs inside `batch_shared()`. Call this function after `compile`. Repeated calls are harmless.
    """
    install("losses")
    for tracker in mean_losses(model):
        convert_values(tracker, _of_whole_batch)


_CONVERTS = "_keras_shardopt_converts"


def convert_values(metric: Any, convert: Callable[[Any, Any], tuple[Any, Any]]) -> None:
    """Make a `keras.metrics.Mean` pass values and sample weights through `convert` first. Ignore a second call."""
    vars(metric).setdefault(_CONVERTS, convert)


def converting_values(in_keras: Callable[..., None]) -> Callable[..., None]:
    """Return a replacement of `Mean.update_state` that calls the function of `convert_values`."""

    @functools.wraps(in_keras)
    def update_state(metric: Any, values: Any, sample_weight: Any = None) -> None:
        convert = vars(metric).get(_CONVERTS)
        if convert is not None:
            values, sample_weight = convert(values, sample_weight)
        in_keras(metric, values, sample_weight=sample_weight)

    return update_state


def mean_losses(model: Any) -> list[Any]:
    """Return the metrics that hold a model's mean losses: the total, and one per output."""
    of_outputs = getattr(model._compile_loss, "metrics", None) or []
    return [tracker for tracker in [model._loss_tracker, *of_outputs] if tracker is not None]


_reduce_in_keras = keras_loss.reduce_weighted_values


def _reduce_weighted_values(
    values: Tensor,
    sample_weight: Tensor | None = None,
    mask: Tensor | None = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: Any = None,
) -> Tensor:
    """Replaces Keras's function that reduces loss values to a scalar. Divides by the totals of all replicas."""
    part = current_share()
    reduction = keras_loss.standardize_reduction(reduction)
    if part is None or reduction in (None, "none"):
        return _reduce_in_keras(values, sample_weight, mask, reduction, dtype)
    values = ops.convert_to_tensor(values, dtype=dtype)
    is_sum = reduction == "sum" and len(values.shape) > 0
    if len(values.shape) == 0:
        if _has_padding(part):
            raise ValueError(
                "A loss function must return one value for each row if the model has a synchronized "
                "`BatchNormalization` and an uneven batch. Received: a scalar, for "
                f"{part.global_batch_size} rows on {part.replicas.num_replicas} replicas. Return one value per row, or "
                "use a batch size that is a multiple of the number of replicas."
            )
        # The loss is a scalar without values per row, so assume that it is the mean over this replica's rows.
        loss = _counted_by_rows(values, part) * ops.cast(_factor(part) / part.replicas.num_replicas, dtype_of(values))
    else:
        # A custom loss can drop values. The number of its other values can equal the number of rows by chance, on some
        # replicas only. So replicas skip the exchange of counts only for losses of Keras.
        is_by_row = _has_known_rows(values, part) and _is_of_keras(caller_instance())
        loss = _loss_of_whole_batch(values, sample_weight, mask, reduction, part, is_by_row)
    return _dividing.note_divided(loss, is_sum) if part.losses_are_divided and _dividing is not None else loss


def _is_of_keras(loss: Any) -> bool:
    """Whether a loss is built into Keras, so it has the same number of values per row on every replica."""
    function = getattr(loss, "fn", None)
    return all(getattr(each, "__module__", None) == keras_losses.__name__ for each in (type(loss), function))


def _loss_of_whole_batch(
    values: Tensor,
    sample_weight: Tensor | None,
    mask: Tensor | None,
    reduction: str | None,
    part: BatchShare,
    is_by_row: bool,
) -> Tensor:
    r"""Return this replica's share of the loss of the whole batch: its sum, divided by the count of all replicas.

    Let $v$ be the values, $w$ the sample weights, and $m$ the mask (1 without one). $\sum$ is over this replica,
    $\Sigma$ over all. The result is $F \sum v w m / d$. $F$ (`_factor`) turns a later mean into a sum, and $d$ is

    - 1 for "sum",
    - $\Sigma 1 \cdot \frac{\Sigma m}{\Sigma 1_m}$ for "sum_over_batch_size" and "mean" (the second factor is the
      fraction of the mask that is set),
    - $\Sigma w m$ for "mean_with_sample_weight".

    Replicas exchange these counts, except $\Sigma 1$ if each row has the same number of values (`is_by_row`).
    """
    dtype = dtype_of(values)
    weight = None if sample_weight is None else ops.convert_to_tensor(sample_weight, dtype=dtype)
    wide = "float64" if dtype == "float64" else "float32"  # float16 cannot hold counts above 65504
    counts = []
    if mask is not None:
        mask = ops.convert_to_tensor(mask, dtype=dtype)
        counts = [ops.sum(ops.cast(_without_padding(mask, part), wide)), _size(mask, part, wide)]
        if weight is None:
            weight = mask
        else:
            mask, weight = keras_loss.squeeze_or_expand_to_same_rank(mask, weight)
            weight = weight * mask
    if weight is not None:
        values, weight = keras_loss.squeeze_or_expand_to_same_rank(values, weight)
        values = values * weight
    total = ops.sum(_without_padding(values, part))
    if reduction == "sum":
        return total * ops.cast(_factor(part), dtype)
    counts = [_size(values, part, wide), *counts]
    if reduction == "mean_with_sample_weight" and weight is not None:
        counts = [ops.sum(ops.cast(_without_padding(weight, part), wide))]
    elif reduction == "mean_with_sample_weight":
        counts = counts[:1]
    elif is_by_row and mask is None:
        size = _size_of_batch(values, part, wide)
        return cast(cast(total, wide) * _factor(part) / size, dtype)
    (counts,) = part.replicas.all_reduce([ops.stop_gradient(ops.stack(counts))], "sum")
    divisor = counts[0] if counts.shape[0] == 1 else counts[0] * ops.divide_no_nan(counts[1], counts[2])
    # Cast before multiplying, because the product with the number of replicas may overflow float16.
    return cast(ops.divide_no_nan(cast(total, wide) * _factor(part), divisor), dtype)


def _without_padding(values: Tensor, part: BatchShare) -> Tensor:
    """Return `values` with zeros in the padding rows."""
    if not part.ends_early:
        return values
    rows = ops.reshape(ops.arange(values.shape[0]), [-1] + [1] * (len(values.shape) - 1))
    return ops.where(rows < part.local_batch_size, values, ops.zeros_like(values))


def _size(values: Tensor, part: BatchShare, dtype: str) -> Tensor:
    """Return the number of elements of `values` outside padding rows, as a scalar tensor."""
    shape = ops.shape(values)
    if part.ends_early:
        shape = (part.local_batch_size, *shape[1:])
    return functools.reduce(ops.multiply, [ops.cast(size, dtype) for size in shape])


def _has_known_rows(values: Tensor, part: BatchShare) -> bool:
    """Whether `values` has one entry per row of this replica. If the row count is a tensor, return True."""
    rows = part.rows_here
    return rows is not None and (not isinstance(rows, int) or rows == values.shape[0])


def _size_of_batch(values: Tensor, part: BatchShare, dtype: str) -> Any:
    """Return the number of values on all replicas: the values per row here, times the rows on all replicas."""
    if isinstance(part.rows_here, int):
        return part.global_batch_size * math.prod(values.shape[1:])
    return ops.cast(part.global_batch_size, dtype) * (_size(values, part, dtype) / ops.cast(part.rows_here, dtype))


def _counted_by_rows(loss: Tensor, part: BatchShare) -> Tensor:
    """Scale a mean over this replica's rows, so the mean over replicas becomes the mean over all rows."""
    share = ops.cast(part.row_share, dtype_of(loss))
    # The mean over no rows can be NaN, and the sum over replicas would then be NaN too, so return 0.
    return ops.where(share > 0, loss * share, ops.zeros_like(loss))


def _factor(part: BatchShare) -> int:
    """Return the factor of a loss: the number of replicas if gradients will be averaged, 1 if they will be summed."""
    return 1 if part.losses_are_divided else part.replicas.num_replicas


def _of_whole_batch(value: Tensor, sample_weight: Any) -> tuple[Tensor, Any]:
    """Convert a replica's loss, and its weight in the mean over steps, to those of the whole batch.

    The mean of the replicas' losses is the loss of the whole batch, so the weight of each is the mean row count.
    """
    part = current_share()
    if part is not None:
        if not part.losses_are_divided and _dividing is not None:
            value = _dividing.divided(value)  # undo Keras' multiplication by the number of replicas
        # If Keras passes no `sample_weight`, each batch has weight 1 in the metric, regardless of its row count. On
        # TensorFlow, Keras passes none for losses of several outputs (since 3.16 only if a trace has no row count).
        sample_weight = 1 / part.replicas.num_replicas if sample_weight is None else part.equal_part
    return value, sample_weight


_own_losses: contextvars.ContextVar[tuple[int, Iterator[Tensor]] | None] = contextvars.ContextVar(
    "own_losses", default=None
)


@contextlib.contextmanager
def own_additional_losses(losses: Sequence[Tensor]) -> Iterator[None]:
    """Use `losses` instead of the model's own `add_loss` values during the block.

    The values repeat in a cycle, because a custom `compute_loss` may call Keras' method twice.
    """
    token = _own_losses.set((len(losses), itertools.cycle(losses)))
    try:
        yield
    finally:
        _own_losses.reset(token)


def additional_loss(model: Any, aggregate: Callable[[Tensor], Tensor], loss: Tensor) -> Tensor:
    """Return `loss` (one of `model.losses`), summed to a scalar by `aggregate` and weighted by this replica's rows.

    If `loss` is a penalty on weights or a mean over rows, the mean over replicas is that of the whole batch.
    """
    part = current_share()
    if part is None:
        return aggregate(loss)
    _check_no_losses_of_padding(model, part)
    own = _own_losses.get()
    if own is not None:
        count, losses = own
        if len(model.losses) != count:
            raise ValueError(
                "`add_loss` must be called in the forward pass, because later losses cannot be assigned to a replica. "
                f"Received: {len(model.losses)} additional losses in `compute_loss`, but {count} after the forward "
                "pass. Add the loss to the result of `compute_loss` instead."
            )
        loss = next(losses)
    loss = aggregate(loss)
    if not part.losses_are_divided and _dividing is not None:
        loss = _dividing.undivided(loss)
    return _counted_by_rows(loss, part)


def _has_padding(part: BatchShare) -> bool:
    """Whether layers on this replica process padding rows together with rows of the batch."""
    return part.ends_early and not isinstance(part.local_batch_size, int)


def _check_no_losses_of_padding(model: Any, part: BatchShare) -> None:
    """Raise ValueError if an added loss includes padding rows."""
    if not _has_padding(part):
        return
    penalties = [v for v in model.trainable_variables if getattr(v, "regularizer", None) is not None]
    if len(model.losses) > len(penalties):
        raise ValueError(
            "`add_loss` and `activity_regularizer` would include padding rows: the model has a synchronized "
            "`BatchNormalization`, the optimizer needs each replica's gradients, and the batch size is not a multiple "
            f"of the number of replicas. Received: {len(model.losses) - len(penalties)} added loss(es), with "
            f"{part.global_batch_size} rows on {part.replicas.num_replicas} replicas. Use a batch size that is a "
            "multiple of the number of replicas."
        )
