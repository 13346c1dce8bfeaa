"""Where variables live, and how replicas' copies and parts of them are read and set."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from keras import ops

from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.numerics import Optimizer, Variable

StateSharding = Literal["slices", "copies", "layout"]
"""Each replica is a process with slices of its own; each copy of a variable is a slice; or arrays lie over devices."""

Layout = Literal["replicated", "sharded", "per_replica"]


class Placement:
    """Where variables live, and how copies and parts of them are read and set. The defaults are right for one replica.

    A new backend with several replicas writes `before_build` and `check`, which refuse what would train wrongly in
    silence, and `fingerprints`. If one program holds all copies of a variable, it also writes `replica_values` and
    `assign_replica_values`; if variables are made in a scope, `colocate_with` and `outside_strategy`; if arrays lie
    over devices, `place`; if processes hold copies, `broadcast_state`. `state_sharding` says which way of dividing
    optimizer state works. Only speed: `dividing_axes`.
    """

    state_sharding: StateSharding | None = None
    """How replicas hold a part of the optimizer state each; None where they cannot."""

    def before_build(
        self, variables: Sequence[Variable], optimizer: Optimizer, innermost: Sequence[Any], shards_state: bool
    ) -> None:
        """Called before an optimizer that reduces gradients is built for these trainable variables.

        From here on replicas draw different random numbers in training steps, and the optimizers `innermost` in it
        reduce nothing where the `scope_inside` of `optimizer` is reduced.

        Raises:
            ValueError: if variables or optimizer were made for fewer replicas than train now; if it `shards_state` and
                these variables are where state cannot be divided.
        """
        del variables, optimizer, innermost, shards_state

    def check(
        self,
        variables: Sequence[Variable],
        optimizers: Sequence[Any],
        is_loaded: bool = False,
        shards_state: bool = False,
    ) -> None:
        """Called before each update, or before each trace of one. Warns if a loaded model trains on one device only.

        Raises:
            ValueError: if updates of these variables by these innermost optimizers would go wrong.
        """
        del variables, optimizers, is_loaded, shards_state

    def colocate_with(self, variable: Variable) -> contextlib.AbstractContextManager[Any]:
        """A scope, also inside `outside_strategy`, in which variables are made and synchronised as this one is."""
        del variable
        return contextlib.nullcontext()

    def outside_strategy(self, function: Callable[[], Any]) -> Any:
        """Calls `function()` as in a program without replicas, where making a variable involves no other process."""
        return function()

    def dividing_axes(self, variables: Sequence[Variable]) -> list[int | None]:
        """Along which dimension `place(..., "sharded")` divides what is shaped and laid out as each variable is."""
        return [None for _ in variables]

    def place(self, variables: Sequence[Variable], how: Layout) -> str | None:
        """Lays new variables, with equal values on all replicas, over the devices of one program.

        Args:
            variables: to be placed.
            how: "replicated"; "sharded", as far as shapes allow; or "per_replica": with a first dimension that has an
                entry, zero, for each replica.

        Returns:
            The name of the axis of replicas; None where there is one replica only.
        """
        del variables, how
        return None

    def replica_values(self, variable: Variable) -> list[np.ndarray]:
        """The values of the copies in this process, read outside of a step; of a divided variable the first part."""
        return [ops.convert_to_numpy(variable)]

    def assign_replica_values(self, variable: Variable, arrays: Sequence[np.ndarray]) -> None:
        """Assigns an array to each copy in this process, or one to all, outside of a step and in this process only."""
        (array,) = arrays
        variable.assign(array)

    def fingerprints(self, variables: Sequence[Variable]) -> np.ndarray:
        """A number for each replica's copy of each variable. All processes call it together, with the same result.

        Copies that differ in one bit differ in it; copies that differ otherwise, also in the order of their elements,
        agree in it once in about 2**32 times.

        Returns:
            Unsigned integers of shape `[num_replicas, num_variables]`; 0 for a variable that is divided.

        Raises:
            ValueError: on every process, if they do not have equally many variables.
        """
        return np.zeros((1, len(variables)), "uint64")

    def broadcast_state(
        self,
        variables: Sequence[Variable],
        optimizer_variables: Sequence[Variable],
        replicas: Communicator | None = None,
    ) -> float:
        """Gives all processes, or those of some replicas, the first one's values of weights and state, bit for bit.

        Nothing to do where one process holds all replicas. Before the first update they are given the `replicas`, each
        a process, and seeds become equal, too.

        Returns:
            The factor for this replica's first gradients: 1 if all had equal weights before; else 0 where they were not
            the first one's, and more than 1 elsewhere, so that the mean is one of gradients of what all now have.

        Raises:
            ValueError: on every process, if shapes or dtypes differ between them.
        """
        del variables, optimizer_variables, replicas
        return 1.0
