"""The interface through which replicas place, read and assign their copies and shards of variables."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from keras import ops

from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.numerics import Optimizer, Variable

StateSharding = Literal["slices", "copies", "layout"]
"""How optimizer state is sharded: a slice in each process ("slices"), a slice in each of a mirrored variable's copies
("copies"), or one array laid out over devices ("layout")."""

Layout = Literal["replicated", "sharded", "per_replica"]


class Placement:
    """How variables are placed, and how copies and shards are read and assigned. The defaults fit one replica.

    A new backend with several replicas sets `state_sharding` and implements `fingerprints`. In `before_build` and
    `check`, it rejects setups that would train wrongly without an error. If one program holds several copies of a
    variable, it implements `replica_values` and `assign_replica_values`. If each process holds a copy, it implements
    `broadcast_state`. If variables are created in a scope, it implements `colocate_with` and `outside_strategy`. If
    arrays lie on several devices, it implements `place`. `dividing_axes` only affects speed.
    """

    state_sharding: StateSharding | None = None
    """How replicas shard optimizer state. None if replicas cannot."""

    def before_build(
        self, variables: Sequence[Variable], optimizer: Optimizer, innermost: Sequence[Any], shards_state: bool
    ) -> None:
        """Prepare to build `optimizer`, which reduces the gradients of these trainable variables.

        After this call, replicas draw different random numbers in training steps, and the optimizers inside `optimizer`
        (`innermost`) do not reduce gradients a second time.

        Raises:
            ValueError: if variables or optimizer were created for fewer replicas, or state cannot be sharded.
        """
        del variables, optimizer, innermost, shards_state

    def check(
        self,
        variables: Sequence[Variable],
        optimizers: Sequence[Any],
        is_loaded: bool = False,
        shards_state: bool = False,
    ) -> None:
        """Check variables before an update. Warn if they are from a file (`is_loaded`) and on one device only.

        Raises:
            ValueError: if variables are not on all replicas, or options of `optimizers` cannot work with replicas.
        """
        del variables, optimizers, is_loaded, shards_state

    def colocate_with(self, variable: Variable) -> contextlib.AbstractContextManager[Any]:
        """Return a scope in which new variables get the placement of `variable`, even in `outside_strategy`."""
        del variable
        return contextlib.nullcontext()

    def outside_strategy(self, function: Callable[[], Any]) -> Any:
        """Call `function()` outside any strategy or distribution, so this process can create variables alone."""
        return function()

    def dividing_axes(self, variables: Sequence[Variable]) -> list[int | None]:
        """Return, for each variable, the dimension that `place(..., "sharded")` divides among replicas, or None."""
        return [None for _ in variables]

    def place(self, variables: Sequence[Variable], how: Layout) -> str | None:
        """Place new variables on the devices of this program.

        `how` is "replicated", "sharded" (as far as shapes allow), or "per_replica" (zeros for each replica, along a new
        first dimension). Return the name of the replica axis, or None with one replica.
        """
        del variables, how
        return None

    def replica_values(self, variable: Variable) -> list[np.ndarray]:
        """Return each copy of a variable in this process. For a sharded variable, return only the first shard."""
        return [ops.convert_to_numpy(variable)]

    def assign_replica_values(self, variable: Variable, arrays: Sequence[np.ndarray]) -> None:
        """Assign to all copies of a variable in this process: one array to each copy, or one array to all."""
        (array,) = arrays
        variable.assign(array)

    def bytes_held(self, variables: Sequence[Variable]) -> int:
        """Return the bytes of these variables on one replica: the maximum over the replicas of this process."""
        return sum(self.replica_values(variable)[0].nbytes for variable in variables)

    def fingerprints(self, variables: Sequence[Variable]) -> np.ndarray:
        """Hash each replica's copy of each variable. All processes must call this together.

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
        """Copy weights and state bitwise from the first process to all processes, or to the processes in `replicas`.

        Returns:
            The factor for this replica's first gradients: 1 if all replicas had equal weights. Otherwise 0 on replicas
            with other weights than the first process, because their gradients belong to those weights. The factor on
            the remaining replicas is above 1, to keep the mean over replicas exact.

        Raises:
            ValueError: on every process, if shapes or dtypes differ.
        """
        del variables, optimizer_variables, replicas
        return 1.0
