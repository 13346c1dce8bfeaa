"""From gradients as they arrive to gradients that are global.

Hides which collective and which factor each state of the gradients needs, and in which units a replica's own gradient
arrives. It knows no framework, so a fake with any number of replicas tests every row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn

from keras import ops

from keras_shardopt.backends import for_backend
from keras_shardopt.backends.active import runtime
from keras_shardopt.backends.communicator import Communicator, GradientState
from keras_shardopt.backends.side_channel import SideChannel
from keras_shardopt.numerics import (
    Gradients,
    ReduceOp,
    Tensor,
    Variable,
    dtype_of,
    is_sparse,
    map_values,
    overwrites_variable,
)

Reduction = Literal["mean", "sum"]


def global_gradients(
    grads: Gradients,
    variables: Sequence[Variable],
    replicas: Communicator,
    reduction: Reduction = "mean",
    gradient_state: GradientState | None = None,
    trained: Sequence[bool] | None = None,
) -> list[Tensor | None]:
    r"""Reduces the gradients of all replicas to the one that every replica then applies.

    With $N$ replicas and $g_r$ the gradient of the mean loss of replica $r$, the result is
    $\frac{1}{N} \sum_r g_r$ for `"mean"` and $\sum_r g_r$ for `"sum"`; in a group, over its members.

    Args:
        grads: one tensor or None per variable. A variable that has a gradient on some replicas only counts as
            zero on the others; one that has none anywhere stays None.
        variables: the variables of `grads`. Those with `overwrite_with_gradient` (float8 scales) hold their next
            value instead of a gradient, and take the largest of all replicas' values, as Keras does when it
            accumulates.
        replicas: who exchanges what.
        reduction: "mean" or "sum".
        gradient_state: how the gradients arrive; None asks `replicas`. In a group, it must be local or prescaled.
        trained: for each variable whether this replica trains it; None for all of them. Each replica gives all
            variables that any trains.

    Returns:
        A list like `grads`, equal on all replicas.

    Raises:
        ValueError: on every replica, if not all train the same variables.
    """
    return global_gradients_and_flags(grads, variables, replicas, reduction, gradient_state, None, trained)[0]


def global_gradients_and_flags(
    grads: Gradients,
    variables: Sequence[Variable],
    replicas: Communicator,
    reduction: Reduction,
    gradient_state: GradientState | None,
    flags: Callable[[str], Tensor] | None,
    trained: Sequence[bool] | None = None,
) -> tuple[list[Tensor | None], Tensor | None]:
    """As `global_gradients`, with some numbers that travel along.

    `flags` makes the numbers in a dtype. Of them a reduction leaves those positive that are so on some replica.

    Returns:
        The gradients; and the reduced numbers, or None where nothing travels.
    """
    if gradient_state is None:
        gradient_state = replicas.gradient_state(grads, variables)
    if gradient_state is GradientState.GLOBAL or gradient_state is GradientState.SUMMED:
        factor = _factor(gradient_state, reduction, replicas.num_replicas)
        return [
            grad if grad is None or overwrites_variable(variable) else _scaled(grad, factor)
            for grad, variable in zip(grads, variables)
        ], None
    reduced: list[Tensor | None] = list(grads)
    plain = [i for i, v in enumerate(variables) if not overwrites_variable(v)]
    op = collective(gradient_state, reduction)
    factor = rescaling(reduction, replicas) if gradient_state is GradientState.LOCAL_PRESCALED else 1
    travelling = None if flags is None or not plain else flags(dtype_of(variables[plain[0]]))
    results, travelled = _reduce_some(
        [grads[i] for i in plain],
        [variables[i] for i in plain],
        replicas,
        op,
        travelling,
        trained=None if trained is None else [trained[i] for i in plain],
    )
    for i, result in zip(plain, results):
        reduced[i] = None if result is None else _scaled(result, factor)
    # Last, when it is clear that all replicas have the same of them.
    next_values = [i for i, v in enumerate(variables) if grads[i] is not None and overwrites_variable(v)]
    for i, value in zip(next_values, replicas.all_reduce([grads[i] for i in next_values], "max")):
        reduced[i] = value
    return reduced, travelled


def collective(gradient_state: GradientState, reduction: Reduction) -> ReduceOp:
    """Which reduction makes local or prescaled gradients global, but for the factor `rescaling`."""
    # A prescaled gradient is divided by N already, so its plain sum is the mean.
    return "mean" if gradient_state is GradientState.LOCAL and reduction == "mean" else "sum"


def rescaling(reduction: Reduction, replicas: Communicator) -> float:
    """What to multiply the sum of prescaled gradients with."""
    # Each is divided by the number of all replicas, also where only those of a group are added.
    return replicas.world.num_replicas / (1 if reduction == "sum" else replicas.num_replicas)


def _factor(gradient_state: GradientState, reduction: Reduction, num_replicas: int) -> float:
    """What to multiply gradients with that no collective has to touch."""
    if gradient_state is GradientState.SUMMED:
        return 1 / num_replicas if reduction == "mean" else 1
    return 1 if reduction == "mean" else num_replicas


def _shaped(grad: Tensor, variable: Variable) -> Tensor:
    """A gradient of its variable's shape, of which a trace of TensorFlow may know only a part."""
    return grad if is_sparse(grad) or None not in tuple(grad.shape) else ops.reshape(grad, variable.shape)


def _reduce_some(
    grads: Gradients,
    variables: Sequence[Variable],
    replicas: Communicator,
    op: ReduceOp,
    flags: Tensor | None = None,
    trains: bool = True,
    trained: Sequence[bool] | None = None,
) -> tuple[list[Tensor | None], Tensor | None]:
    """Reduces gradients of which some are None, and flags. A replica that has ended training says `trains=False`."""
    if replicas.is_spmd:
        present = [i for i, grad in enumerate(grads) if grad is not None]
        result: list[Tensor | None] = [None] * len(grads)
        along = [] if flags is None else [flags]
        sums = replicas.all_reduce([*[_shaped(grads[i], variables[i]) for i in present], *along], op)
        for i, grad in zip(present, sums):
            result[i] = grad
        return result, None if flags is None else sums[-1]
    filled = [ops.zeros(v.shape, v.dtype) if grad is None else grad for grad, v in zip(grads, variables)]
    if not filled:
        return [], flags
    # Whether another group has failed, which the members of this one may find at different times.
    is_group = replicas.world is not replicas
    ranks = _ranks_of(replicas) if is_group else None
    has_failed = ranks is not None and runtime.is_cheap_to_read(filled[0]) and ranks.others_have_failed()
    failed = [has_failed] if is_group else []
    channel = SideChannel(replicas, variables, [grad is not None for grad in grads], trained, trains, failed)
    *sums, told = replicas.all_reduce([*filled, channel.pack(dtype_of(filled[0]), flags)], op)
    heard, told = channel.unpack(told, op)
    flags = None if flags is None else told
    if heard is None:
        return list(sums), flags
    if any(heard.more):
        raise_failure_of_others(replicas)
    try:
        heard.check_all_train()
        heard.check_same_variables()
    except ValueError as error:
        if ranks is not None:
            ranks.say_failure(str(error), replicas.members[0])
        raise
    return [grad if has else None for grad, has in zip(sums, heard.present)], flags


def raise_failure_of_others(replicas: Communicator) -> NoReturn:
    """Raises the ValueError that the replicas of another group have raised."""
    ranks = _ranks_of(replicas)
    words = "" if ranks is None else ranks.take_failure()
    raise ValueError(words or "All groups must train. Received: an error in another one.")


# Where the replicas of other groups are somewhere else when those of one fail.
_ranks = for_backend({"torch": "keras_shardopt.backends.torch.communicator"})


def _ranks_of(replicas: Communicator) -> Any:
    """All ranks, which can tell those of other groups of an error; None where nobody can."""
    world = replicas.world
    return world if _ranks is not None and isinstance(world, _ranks.TorchProcessGroup) else None


def join_uneven_inputs(variables: Sequence[Variable], replicas: Communicator, num_flags: int = 0) -> None:
    """Tells the other replicas that this one has ended training, where they might wait for it.

    It is one more reduction, of zeros: whoever still trains takes part in it with an update, and both notice.

    Args:
        variables: the trainable variables.
        replicas: who exchanges what.
        num_flags: how many numbers travel along with gradients.

    Raises:
        ValueError: on every replica, if some have ended and others have not.
    """
    # Next values travel by themselves, and only some of them, so that another replica may be somewhere else.
    if not replicas.is_spmd and not any(overwrites_variable(v) for v in variables):
        flags = ops.zeros((num_flags,)) if num_flags else None
        _reduce_some([None] * len(variables), variables, replicas, "sum", flags, trains=False)


def _scaled(grad: Tensor, factor: float) -> Tensor:
    # Not `grad * 1`: a single replica must cost nothing and change no bit.
    return grad if factor == 1 else map_values(lambda value: ops.multiply(value, factor), grad)
