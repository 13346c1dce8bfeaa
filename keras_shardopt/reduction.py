"""From gradients as they arrive to gradients that are global.

Hides which of the ways of arriving needs which collective and which factor. It knows no framework, so a fake with
any number of replicas tests every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from keras import ops

from keras_shardopt._typing import Gradients, ReduceOp, Tensor, Variable
from keras_shardopt.numerics import is_next_value
from keras_shardopt.replica.base import Arrival, ReplicaBackend

Reduction = Literal["mean", "sum"]


def global_gradients(
    grads: Gradients,
    variables: Sequence[Variable],
    replicas: ReplicaBackend,
    reduction: Reduction = "mean",
    arrival: Arrival | None = None,
) -> list[Tensor | None]:
    r"""Reduces the gradients of all replicas to the one that every replica then applies.

    With $N$ replicas and $g_r$ the gradient of the mean loss of replica $r$, the result is
    $\frac{1}{N} \sum_r g_r$ for `"mean"` and $\sum_r g_r$ for `"sum"`.

    Args:
        grads: one tensor or None per variable. A variable that has a gradient on some replicas only counts as
            zero on the others; one that has none anywhere stays None.
        variables: the variables of `grads`. Those with `overwrite_with_gradient` (float8 scales) hold their next
            value instead of a gradient, and take the largest of all replicas' values, as Keras does when it
            accumulates.
        replicas: who exchanges what.
        reduction: "mean" or "sum".
        arrival: how the gradients arrive; None asks `replicas`.

    Returns:
        A list like `grads`, equal on all replicas.
    """
    if arrival is None:
        arrival = replicas.arrival(grads, variables)
    if arrival is Arrival.GLOBAL or arrival is Arrival.SUMMED:
        factor = _factor(arrival, reduction, replicas.num_replicas)
        return [
            grad if grad is None or is_next_value(variable) else _scaled(grad, factor)
            for grad, variable in zip(grads, variables)
        ]
    reduced: list[Tensor | None] = list(grads)
    next_values = [i for i, v in enumerate(variables) if grads[i] is not None and is_next_value(v)]
    for i, value in zip(next_values, replicas.all_reduce([grads[i] for i in next_values], "max")):
        reduced[i] = value
    plain = [i for i, v in enumerate(variables) if not is_next_value(v)]
    op = _collective(arrival, reduction)
    factor = replicas.num_replicas if arrival is Arrival.LOCAL_PRESCALED and reduction == "sum" else 1
    results = _reduce_some([grads[i] for i in plain], [variables[i] for i in plain], replicas, op)
    for i, result in zip(plain, results):
        reduced[i] = None if result is None else _scaled(result, factor)
    return reduced


def _collective(arrival: Arrival, reduction: Reduction) -> ReduceOp:
    # A prescaled gradient is divided by N already, so its plain sum is the mean.
    return "mean" if arrival is Arrival.LOCAL and reduction == "mean" else "sum"


def _factor(arrival: Arrival, reduction: Reduction, num_replicas: int) -> float:
    """What to multiply gradients with that no collective has to touch."""
    if arrival is Arrival.SUMMED:
        return 1 / num_replicas if reduction == "mean" else 1
    return 1 if reduction == "mean" else num_replicas


def _reduce_some(
    grads: Gradients, variables: Sequence[Variable], replicas: ReplicaBackend, op: ReduceOp
) -> list[Tensor | None]:
    """Reduces gradients of which some are None."""
    if replicas.runs_one_program:
        present = [i for i, grad in enumerate(grads) if grad is not None]
        result: list[Tensor | None] = [None] * len(grads)
        for i, grad in zip(present, replicas.all_reduce([grads[i] for i in present], op)):
            result[i] = grad
        return result
    # Each replica ran its own program: a branch taken on one and not on another leaves None where others have a
    # gradient, and a list that is shorter on one replica pairs the wrong tensors or hangs. So all send zeros for
    # None, and along with them which gradients they have.
    filled = [ops.zeros(v.shape, v.dtype) if grad is None else grad for grad, v in zip(grads, variables)]
    if not filled:
        return []
    presence = ops.convert_to_tensor([grad is not None for grad in grads], dtype=filled[0].dtype)
    *sums, counts = replicas.all_reduce([*filled, presence], op)
    if all(grad is not None for grad in grads):
        return list(sums)  # without looking at the counts, which would wait for the device
    anywhere = ops.convert_to_numpy(ops.cast(counts, "float32")) > 0
    return [grad if has else None for grad, has in zip(sums, anywhere)]


def _scaled(grad: Tensor, factor: float) -> Tensor:
    # Not `grad * 1`: alone, a replica must cost nothing and change no bit.
    return grad if factor == 1 else ops.multiply(grad, factor)
