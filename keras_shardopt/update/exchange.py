"""Reduce the gradients of all replicas, together with flags such as "a gradient is not finite".

This module imports no framework, so its tests can use fake replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from keras import ops

from keras_shardopt.backends import for_backend
from keras_shardopt.backends.active import runtime
from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.backends.side_channel import SideChannel
from keras_shardopt.numerics import Tensor, Variable, dtype_of, is_sparse, overwrites_variable
from keras_shardopt.update.reduction import Reduction, scaled
from keras_shardopt.update.transport import Transfer


class Moved(NamedTuple):
    """The result of a reduction of gradients."""

    grads: list[Tensor | None]
    """Gradients reduced over all replicas, or this replica's slices of them."""

    nonfinite_flags: Tensor | None
    """Reduced marks: an element is above 0 if a replica has found a nonfinite gradient. None without a check."""

    in_slices: bool = False
    """Whether `grads` are slices, different on each replica."""


def move(reduction: Reduction, transfer: Transfer, members: Communicator) -> Moved:
    """Reduce the gradients in `reduction` over the replicas `members`. Each replica receives the results.

    Raises:
        ValueError: on every replica, if not all train the same variables.
    """
    plain = [i for i, variable in enumerate(reduction.variables) if not overwrites_variable(variable)]
    sums, nonfinite_flags = _sums(reduction, plain, transfer, members)
    reduced: list[Tensor | None] = list(reduction.grads)
    for i, result in zip(plain, sums):
        reduced[i] = None if result is None else scaled(result, reduction.factor)
    return Moved(with_next_values(reduction, reduced, members), nonfinite_flags)


def with_next_values(reduction: Reduction, reduced: list[Tensor | None], members: Communicator) -> list[Tensor | None]:
    """Return `reduced`, with the next value of each float8 scale (the maximum over replicas) in place of a gradient."""
    nexts = [i for i, v in enumerate(reduction.variables) if reduction.grads[i] is not None and overwrites_variable(v)]
    for i, value in zip(nexts, members.all_reduce([reduction.grads[i] for i in nexts], "max") if nexts else []):
        reduced[i] = value
    return reduced


def _sums(
    reduction: Reduction, plain: Sequence[int], transfer: Transfer, members: Communicator
) -> tuple[list[Tensor | None], Tensor | None]:
    """Return reduced gradients of the variables at the indices `plain`, and reduced marks of nonfinite gradients."""
    grads, variables = [reduction.grads[i] for i in plain], [reduction.variables[i] for i in plain]
    make_flags = reduction.nonfinite_flags
    nonfinite_flags = None if make_flags is None or not plain else make_flags(dtype_of(variables[0]))
    if members.is_spmd:
        return _sums_in_one_program(reduction, plain, transfer, nonfinite_flags)
    filled = [ops.zeros(v.shape, v.dtype) if grad is None else grad for grad, v in zip(grads, variables)]
    if not filled:
        return [], None
    # Replicas of a group can detect an error of another group in different steps. So they exchange a flag with the
    # gradients, and raise in the same step.
    is_group = members.world is not members
    ranks = _ranks_of(members) if is_group else None
    has_failed = ranks is not None and runtime.is_cheap_to_read(filled[0]) and ranks.failures.has_new()
    failed = [has_failed] if is_group else []
    trained = None if reduction.trained is None else [reduction.trained[i] for i in plain]
    channel = SideChannel(members, variables, [g is not None for g in grads], trained, reduction.trains, failed)
    flags = channel.pack(dtype_of(filled[0]), nonfinite_flags)
    sums, reduced_flags = transfer.all_reduce([reduction.places[i] for i in plain], filled, flags, reduction.op)
    assert reduced_flags is not None
    received_flags, rest = channel.unpack(reduced_flags, reduction.op)
    nonfinite_flags = None if nonfinite_flags is None else rest
    if received_flags is None:
        return list(sums), nonfinite_flags
    if any(received_flags.more):
        raise_failure_of_others(members)
    try:
        received_flags.check_all_train()
        received_flags.check_same_variables()
    except ValueError as error:
        if ranks is not None:
            ranks.failures.report(str(error), members.members[0])
        raise
    return [total if has else None for total, has in zip(sums, received_flags.present)], nonfinite_flags


def _sums_in_one_program(
    reduction: Reduction, plain: Sequence[int], transfer: Transfer, nonfinite_flags: Tensor | None
) -> tuple[list[Tensor | None], Tensor | None]:
    """Do what `_sums` does if one program runs all replicas: they need no check that they send the same gradients."""
    sent = {i: _shaped(grad, reduction.variables[i]) for i in plain if (grad := reduction.grads[i]) is not None}
    places = [reduction.places[i] for i in sent]
    sums, nonfinite_flags = transfer.all_reduce(places, list(sent.values()), nonfinite_flags, reduction.op)
    found = dict(zip(sent, sums))
    return [found.get(i) for i in plain], nonfinite_flags


def raise_failure_of_others(replicas: Communicator) -> NoReturn:
    """Raise the ValueError that the replicas of another group have raised before."""
    ranks = _ranks_of(replicas)
    words = "" if ranks is None else ranks.failures.read()
    raise ValueError(words or "Another group of replicas has failed. Read the error of that group.")


# PyTorch only, because only there can one group of replicas fail while another group waits in a collective.
_ranks = for_backend({"torch": "keras_shardopt.backends.torch.communicator"})


def _ranks_of(replicas: Communicator) -> Any:
    """Return the communicator of all PyTorch ranks, to report an error to other groups; None on other backends."""
    world = replicas.world
    return world if _ranks is not None and isinstance(world, _ranks.TorchProcessGroup) else None


def _shaped(grad: Tensor, variable: Variable) -> Tensor:
    """Return a gradient with its variable's shape, because a gradient's shape can be unknown in a TensorFlow graph."""
    return grad if is_sparse(grad) or None not in tuple(grad.shape) else ops.reshape(grad, variable.shape)
