"""Whether all replicas train the same variables, found out in the reduction of their gradients.

A replica that has frozen a layer would leave its gradients out of the mean, and keep its weights while others move
theirs. So each marks, in twenty flags that travel with its gradients, which variables it trains. It marks ten of them,
so of two sets of variables each has a mark that the other lacks (but for one pair in 184,756), and every replica sees
in the sum of all marks, which need not be exact, whether somebody trains other variables than itself.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import ops

from keras_shardopt._typing import Variable
from keras_shardopt.backends.communicator import Communicator

NUM_MARKS = 20

_OF_ALL = [True] * (NUM_MARKS // 2) + [False] * (NUM_MARKS // 2)

_NUM_NAMES = 8


def marks(trained: Sequence[bool] | None) -> list[bool]:
    """The marks of a set of variables: for each variable, whether it is trained (None: all of them)."""
    if trained is None or all(trained):
        return _OF_ALL
    chosen = random.Random(hashlib.sha256(bytes(trained)).digest()).sample(range(NUM_MARKS), NUM_MARKS // 2)
    return [i in chosen for i in range(NUM_MARKS)]


def check_same_variables(
    trained: Sequence[bool] | None,
    marked: Sequence[float],
    variables: Sequence[Variable],
    replicas: Communicator,
    all_look: bool = True,
) -> None:
    """Compares this replica's marks with those of all replicas.

    Args:
        trained: for each of the variables, whether this replica trains it; None for all of them.
        marked: the sum or mean of all marks.
        variables: the trainable variables, equal on all replicas.
        replicas: whose marks these are.
        all_look: whether all replicas make this call, so that they can tell each other more.

    Raises:
        ValueError: on every replica that calls it, if not all train the same. It names the variables and, where all
            look, the replicas.
    """
    if not any(count > 0 and not mine for count, mine in zip(marked, marks(trained))):
        return
    size, me = int(replicas.num_replicas), int(replicas.replica_id)
    frozen = np.zeros((size, len(variables)), "float32")
    if trained is not None:
        frozen[me] = [not is_trained for is_trained in trained]
    seen = [me]
    if all_look:
        (rows,) = replicas.all_reduce([ops.convert_to_tensor(frozen.reshape(-1))], "max")
        frozen = ops.convert_to_numpy(rows).reshape(size, -1)
        seen = list(range(size))
    received = [
        f"{_names(frozen[i], variables)} {'not ' if frozen[i].any() else ''}trained on replica {replicas.members[i]}"
        for i in seen
    ]
    advice = "" if all_look else " Others have gone on, as they look at no gradients on this device."
    raise ValueError(
        "All replicas must train the same variables. "
        f"Received: {'; '.join(received)}. Freeze and unfreeze layers on all replicas, before the same batch.{advice}"
    )


def _names(frozen: Any, variables: Sequence[Variable]) -> str:
    chosen = [f"`{getattr(v, 'path', i)}`" for i, v in enumerate(variables) if frozen[i]]
    if not chosen:
        return "all"
    more = f" and {len(chosen) - _NUM_NAMES} more" if len(chosen) > _NUM_NAMES else ""
    return f"{', '.join(chosen[:_NUM_NAMES])}{more}"
