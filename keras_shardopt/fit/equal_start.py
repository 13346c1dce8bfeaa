"""The equal start of an epoch: if values differ between processes, all processes take those of process 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras_shardopt import arguments as check
from keras_shardopt.backends.active import placement
from keras_shardopt.backends.models import optimizers_of
from keras_shardopt.backends.user_warnings import warn
from keras_shardopt.numerics import Variable
from keras_shardopt.wrapping.chain import shared_variables


def optimizer_state(model: Any) -> list[Variable]:
    """Return the variables of the model's built optimizers that must be equal on all replicas."""
    return [
        variable for optimizer in optimizers_of(model) if optimizer.built for variable in shared_variables(optimizer)
    ]


def start_equal(
    variables: Sequence[Variable],
    announce: Callable[[str, int], list[int]],
    take_from_first: Callable[[list[Variable]], Any],
) -> None:
    """Make variables equal on all processes. PyTorch has its own `start_equal`, which also compares seeds.

    Args:
        variables: the variables of the model and its optimizers.
        announce: the backend's function that announces the next call, and returns the numbers of all processes.
        take_from_first: gives the variables that differ the values of process 0. All processes call it together.
    """
    # If the numbers of variables differ, a process has not built its model. Return, because the optimizer raises later.
    counts = announce("compares the values of a prepared model", len(variables))
    if len(set(counts)) > 1 or not variables:
        return
    prints = placement.fingerprints(variables)
    differing = [v for v, differs in zip(variables, (prints != prints[0]).any(axis=0)) if differs]
    if differing:
        take_from_first(differing)
        warn_of_unequal_start([v.path for v in differing])


def warn_of_unequal_start(names: Sequence[str]) -> None:
    """Warn, in one message, of all variables that differ between processes when an epoch begins."""
    warn(
        "All processes must begin an epoch with equal variables, so all now use the values of process 0. Received: "
        f"different values of {check.listed(names, ', ')} on some processes. Assign equal values on all processes.",
    )
