"""Where variables live, and how replicas' copies and parts of them are read and set."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from keras import ops

from keras_shardopt._typing import Variable

StateSharding = Literal["slices", "copies", "layout"]
"""Each replica is a process, with slices of its own; each copy of a variable is one slice; arrays lie over devices."""

Layout = Literal["replicated", "sharded", "per_replica"]


class Placement:
    """Where variables live, and how copies and parts of them are read and set. The defaults know one replica."""

    state_sharding: StateSharding | None = None
    """How replicas can hold a part of the optimizer state each; None where they cannot."""

    def before_build(
        self, variables: Sequence[Variable], optimizer: Any, innermost: Sequence[Any], shards_state: bool
    ) -> None:
        """Called before an optimizer that reduces gradients is built for these trainable variables.

        In the steps that train them replicas draw random numbers of their own from here on, and those `innermost` in
        the optimizer reduce nothing by themselves inside `claim_reduction()`.

        Raises:
            ValueError: if variables and optimizer were made where there are fewer replicas than train now, or are where
                state cannot be divided although it `shards_state`.
        """
        del variables, optimizer, innermost, shards_state

    def check(
        self,
        variables: Sequence[Variable],
        optimizers: Sequence[Any],
        is_loaded: bool = False,
        shards_state: bool = False,
    ) -> None:
        """Called before each update, or before each trace of one. Warns if what `is_loaded` trains on one device only.

        Raises:
            ValueError: if updates of these variables by these innermost optimizers would go wrong, or their state is
                not divided although it should be.
        """
        del variables, optimizers, is_loaded, shards_state

    def colocate_with(self, variable: Variable) -> contextlib.AbstractContextManager[Any]:
        """A scope in which new variables are made where this one is, and its processes reach each other.

        Also inside `outside_strategy`.
        """
        del variable
        return contextlib.nullcontext()

    def place(self, variables: Sequence[Variable], how: Layout) -> str | None:
        """Puts new variables where the replicas of one program expect them.

        Args:
            variables: with values that are equal on all replicas.
            how: "replicated" for a copy on each; "sharded" to divide each as far as its shape allows; "per_replica" to
                give each a first dimension with an entry, zero, for every replica.

        Returns:
            The name of the axis of replicas; None where there is one replica only.
        """
        del variables, how
        return None

    def replica_values(self, variable: Variable) -> list[np.ndarray]:
        """The values of the copies in this process; of a variable that replicas divide, the first one's part alone.

        Called outside of the replicas' program, as `assign_replica_values` is.
        """
        return [ops.convert_to_numpy(variable)]

    def assign_replica_values(self, variable: Variable, arrays: Sequence[np.ndarray]) -> None:
        """Assigns an array to each of the copies in this process, or one to all; other processes need not know."""
        (array,) = arrays
        variable.assign(array)

    def outside_strategy(self, function: Callable[[], Any]) -> Any:
        """Calls `function()` as in a program without replicas, which makes variables without asking other processes."""
        return function()

    def full_value(self, variable: Variable) -> np.ndarray:
        """All of a variable as an array. All processes call it together where its parts lie in several."""
        return ops.convert_to_numpy(variable)

    def fingerprints(self, variables: Sequence[Variable]) -> np.ndarray:
        """A number for each replica's copy of each variable, made of all its bits and their places.

        Copies that differ in a single bit always differ in it. Copies that differ otherwise, also by elements that
        changed places, agree in it once in about 2**32 times. A NaN is bits like any other. All processes must call
        it together, and it returns the same on all of them.

        Returns:
            An array of unsigned integers, of shape `[num_replicas, num_variables]`. A variable of which there are no
            copies, because each replica holds another part of it, has the number 0 on all of them.

        Raises:
            ValueError: on every process, if they do not have equally many variables.
        """
        return np.zeros((1, len(variables)), "uint64")

    def reading_is_collective(self, variables: Sequence[Variable]) -> bool:
        """Whether all processes must be there when the values of these variables are read."""
        del variables
        return False

    def broadcast_state(self, variables: Sequence[Variable], optimizer_variables: Sequence[Variable]) -> None:
        """Gives all processes the first one's values of these variables, bit for bit.

        The default does nothing, which is right wherever one process holds all replicas.

        Raises:
            ValueError: on every process, if shapes or dtypes differ between them.
        """
        del variables, optimizer_variables
