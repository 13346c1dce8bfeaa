"""The storage of variables: how replicas' copies and shards are placed, read and assigned."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from keras import ops

from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.numerics import Optimizer, Variable

StateSharding = Literal["slices", "copies", "layout"]
"""How optimizer state is sharded: by process ("slices"), by copy of a variable, or as a layout over devices."""

Layout = Literal["replicated", "sharded", "per_replica"]


class Placement:
    """How variables are placed, and how copies and shards are read and assigned. The defaults fit one replica.

    A new backend with several replicas sets `state_sharding`. It implements `fingerprints`, and rejects setups that
    would silently train wrongly in `before_build` and `check`. Copies in one program need `replica_values` and
    `assign_replica_values`, and copies in processes `broadcast_state`. Variables created in a scope need
    `colocate_with` and `outside_strategy`, and arrays over devices `place`. `dividing_axes` only affects speed.
    """

    state_sharding: StateSharding | None = None
    """How replicas shard optimizer state. None if they cannot."""

    def before_build(
        self, variables: Sequence[Variable], optimizer: Optimizer, innermost: Sequence[Any], shards_state: bool
    ) -> None:
        """Called before building an optimizer that reduces gradients for these trainable variables.

        From then on, replicas draw different random numbers in training steps. The `innermost` optimizers reduce
        nothing while `optimizer.scope_inside` is reduced.

        Raises:
            ValueError: if variables or optimizer were created for fewer replicas, or cannot shard their state.
        """
        del variables, optimizer, innermost, shards_state

    def check(
        self,
        variables: Sequence[Variable],
        optimizers: Sequence[Any],
        is_loaded: bool = False,
        shards_state: bool = False,
    ) -> None:
        """Called before each update, or before each trace. Warns if a loaded model trains on one device only.

        Raises:
            ValueError: if these innermost optimizers would update the variables wrongly.
        """
        del variables, optimizers, is_loaded, shards_state

    def colocate_with(self, variable: Variable) -> contextlib.AbstractContextManager[Any]:
        """Return a scope that creates variables with this one's placement, even in `outside_strategy`."""
        del variable
        return contextlib.nullcontext()

    def outside_strategy(self, function: Callable[[], Any]) -> Any:
        """Call `function()` without replicas, so creating a variable involves no other process."""
        return function()

    def dividing_axes(self, variables: Sequence[Variable]) -> list[int | None]:
        """Return the dimension of each variable that `place(..., "sharded")` divides."""
        return [None for _ in variables]

    def place(self, variables: Sequence[Variable], how: Layout) -> str | None:
        """Place new variables, with equal values on all replicas, on the devices of one program.

        `how` is "replicated", "sharded" (as far as shapes allow), or "per_replica" (a new first dimension of zeros).
        Return the name of the replica axis, or None with one replica.
        """
        del variables, how
        return None

    def replica_values(self, variable: Variable) -> list[np.ndarray]:
        """Read the copies in this process, outside a step. A sharded variable returns its first shard."""
        return [ops.convert_to_numpy(variable)]

    def assign_replica_values(self, variable: Variable, arrays: Sequence[np.ndarray]) -> None:
        """Assign one array per copy in this process, or one array to all, outside a step."""
        (array,) = arrays
        variable.assign(array)

    def fingerprints(self, variables: Sequence[Variable]) -> np.ndarray:
        """Hash each replica's copy of each variable. All processes call it together and get the same result.

        The uint64 result has the shape `[num_replicas, num_variables]`, with 0 for sharded variables. Copies that
        differ in a single bit always have different hashes. Other differences, including permutations, collide with a
        probability of about 1 in 2**32.

        Raises:
            ValueError: on every process, if the numbers of variables differ.
        """
        return np.zeros((1, len(variables)), "uint64")

    def broadcast_state(
        self,
        variables: Sequence[Variable],
        optimizer_variables: Sequence[Variable],
        replicas: Communicator | None = None,
    ) -> float:
        """Copy weights and state bitwise from the first process to all processes, or to those of `replicas`.

        Does nothing if one process holds all replicas. The call before the first update passes `replicas`, each a
        process, and also makes seeds equal.

        Returns:
            The factor for this replica's first gradients: 1 if all weights were equal. Otherwise 0 on replicas with
            other weights than the first, and more than 1 on the rest, so the mean is exact.

        Raises:
            ValueError: on every process, if shapes or dtypes differ.
        """
        del variables, optimizer_variables, replicas
        return 1.0
