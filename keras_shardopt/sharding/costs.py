"""The cost of the update of each variable, counted with a fresh optimizer. Replicas count the same without messages."""

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

# Backends that can run an update on shapes alone.
_work = for_backend({"torch": "keras_shardopt.backends.torch.work"})


def update_costs(optimizer: Optimizer, variables: Sequence[Variable]) -> list[tuple[float, int]]:
    """Return the work and the number of operations of each variable's update.

    Runs one update for each kind of variable, without memory: variables with slots of the same names and shapes are of
    one kind.

    Args:
        optimizer: an optimizer with an update rule. It is not changed.
        variables: the variables that replicas divide. They are not changed.

    Returns:
        A pair for each variable: its size and 1 for an optimizer of another package, or if an update needs values.
    """
    by_size = [(float(size_of(variable)), 1) for variable in variables]
    # Other optimizers may keep tensors, for example in a cache, and these would have no values.
    if _work is None or not type(optimizer).__module__.startswith(("keras.", "keras_shardopt.")):
        return by_size
    try:
        # Averages would be updated for all variables at once, with each kind.
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
