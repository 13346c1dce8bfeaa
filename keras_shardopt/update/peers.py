"""The replicas that train the same: whether they do, and that they start equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras import ops

from keras_shardopt.backends.active import placement, processes, runtime
from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.backends.user_warnings import warn
from keras_shardopt.numerics import Variable
from keras_shardopt.update.agreement import check_agreement, described, losses_that_add_up
from keras_shardopt.update.options import check_groups
from keras_shardopt.update.trainer_context import current_share
from keras_shardopt.wrapping.chain import base_optimizers


class Peers:
    """What an optimizer finds out about its replicas before the first update, once.

    Args:
        optimizer: a `CrossShard` that is just being made.
        members: of replicas those that this one averages with.
    """

    def __init__(self, optimizer: Any, members: Callable[[Communicator], Communicator]) -> None:
        self._optimizer = optimizer
        self._members = members
        self.started: Communicator | None = None
        """The replicas that have started with equal weights, on PyTorch."""
        self.is_loaded = False
        """Whether the optimizer comes from a file, and has not been used yet."""
        # What it was built as, in words, and whether all processes have found that they have the same.
        self._described: Any = None
        self._agree = False
        self._leaves: list[Any] = []

    def before_build(self, variables: Sequence[Variable]) -> None:
        """Called before the optimizer makes its variables."""
        self._leaves = base_optimizers(self._optimizer)
        outers = [outer for extension in self._optimizer.extensions for outer in extension.optimizers]
        placement.before_build(variables, self._optimizer, [*self._leaves, *outers], self._optimizer.shard_state)
        if processes.process()[0] > 1:
            # Not later: callbacks change the rate, and a step that is being traced cannot read it.
            self._described = described(self._optimizer, variables)
            if processes.creates_variables_collectively():
                self._compare(variables)

    def ready(self, variables: Sequence[Variable], comm: Communicator) -> float:
        """Makes sure that these replicas may train, and start with equal weights and state.

        Returns:
            The factor for this replica's gradients, as `Placement.broadcast_state` returns it.

        Raises:
            ValueError: on every replica, if they do not have the same optimizer and variables.
        """
        optimizer = self._optimizer
        is_loaded, self.is_loaded = self.is_loaded, False
        placement.check(variables, self._leaves, is_loaded, optimizer.shard_state)
        optimizer._check_shards(variables, comm)
        self.check(comm)
        if comm.is_spmd or self.started is comm:
            return 1.0
        runtime.no_compile(self._warn_of_sums, comm.num_replicas)
        weights, state = optimizer._trainable_variables, optimizer._shared_variables
        check_groups(optimizer.group_assignment, comm)
        factor = placement.broadcast_state(weights, state, self._members(comm))
        self.started = comm
        return factor

    def still_there(self) -> Communicator | None:
        """The replicas that have started together, if they are those around the caller."""
        if self.started is None:
            return None
        try:
            return self.started if runtime.communicator(self._optimizer.axis_name) is self.started else None
        except ValueError:  # of ranks whose group is closed
            return None

    def check(self, comm: Communicator | None = None) -> None:
        """Makes sure, once, that the processes train the same with the same optimizer. All must call it together.

        Raises:
            ValueError: on every process, if they do not. It names what differs.
        """
        comm = runtime.communicator(self._optimizer.axis_name) if comm is None else comm
        if self._agree or not comm.is_multi_process:
            return
        if self._described is None:
            if not self._optimizer.built:
                return
            self._described = described(self._optimizer, self._optimizer._trainable_variables)
        runtime.no_compile(self._compare, self._optimizer._trainable_variables)

    def check_parts(self) -> None:
        """Makes sure, where state is divided, that its parts still belong together. All processes call it together.

        For what gives all processes the first one's values: parts of the state cannot come from there.

        Raises:
            ValueError: on every process, if they do not.
        """
        if self._agree:
            self._check_start()

    def _compare(self, variables: Sequence[Variable]) -> None:
        check_agreement(self._described, self._optimizer, variables)
        self._check_start()
        self._agree = True

    def _check_start(self) -> None:
        shards = self._optimizer._shards
        if shards is not None:
            shards.check_start(int(ops.convert_to_numpy(self._optimizer.iterations)))

    def _warn_of_sums(self, num_replicas: int) -> None:
        """Warns of a loss that is a sum over its replica's rows, where nobody computes that of the whole batch."""
        if self._optimizer.reduction == "sum" or current_share() is not None:
            return
        for loss in losses_that_add_up(self._optimizer, self._optimizer._trainable_variables)[:1]:
            warn(
                f"A loss that adds up over rows has gradients that add up over replicas, and their mean is "
                f"{num_replicas} times too small. Received: {type(loss).__name__}(reduction='sum') with "
                f"{self._optimizer!r}. "
                'Use `CrossShard(..., reduction="sum")`, or call `keras_shardopt.prepare(model)` before `fit`.',
            )
