"""Counts the work (FLOPs and bytes) of each variable's update, in a trial update on tensors without values."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from keras import ops

from keras_shardopt.backends import for_backend
from keras_shardopt.numerics import Optimizer, Variable, dtype_of
from keras_shardopt.sharding.report import size_of
from keras_shardopt.sharding.separability import VISIBLE, fresh_copy
from keras_shardopt.wrapping.slots import empty_name_scope, named_like, slots_of

# PyTorch only (otherwise None): counts the work of an update on shapes alone, without values.
_work = for_backend({"torch": "keras_shardopt.backends.torch.work"})


def update_costs(optimizer: Optimizer, variables: Sequence[Variable]) -> list[tuple[float, int]]:
    """Return the work (FLOPs and moved bytes) and the number of operations of each variable's update.

    Runs one update for each kind of variable, on tensors without values. Variables of one kind have the same shape
    and dtype, and slots (state such as a momentum) of the same names and shapes.

    Args:
        optimizer: an optimizer with an update rule. It is not changed.
        variables: the variables that replicas divide. They are not changed.

    Returns:
        A pair (work, number of operations) for each variable. If the optimizer is of another package, or its update
        needs values, each pair is (size of the variable, 1).
    """
    by_size = [(float(size_of(variable)), 1) for variable in variables]
    # A trial update uses tensors without values. Optimizers of other packages could keep these tensors, so use sizes.
    if _work is None or not type(optimizer).__module__.startswith(("keras.", "keras_shardopt.")):
        return by_size
    try:
        # With `use_ema`, an update of one variable would also update the moving averages of all variables.
        outside = fresh_copy(optimizer, **VISIBLE, use_ema=False)
        config = outside.get_config()
        with _work.without_memory():
            fresh = type(outside).from_config(config)
            made = [named_like(v, initializer="zeros", shape=tuple(v.shape), dtype=dtype_of(v)) for v in variables]
            with empty_name_scope():
                fresh.build(made)
            slots: list[list[Any]] = [[] for _ in made]
            for i, name, slot in slots_of(fresh, made):
                slots[i].append((name, tuple(slot.shape)))
            kinds = [(tuple(v.shape), dtype_of(v), *own) for v, own in zip(made, slots)]
            costs: dict[tuple[Any, ...], tuple[float, int]] = {}
            for kind, variable in zip(kinds, made):
                if kind not in costs:
                    grad = ops.zeros(tuple(variable.shape), dtype_of(variable))
                    costs[kind] = _work.count(functools.partial(fresh.apply, [grad], [variable]))
            return [costs[kind] for kind in kinds]
    except Exception:  # updates may raise anything without values
        return by_size
