"""The checks before the first update: same model and optimizer on all processes, equal weights and state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras import ops

from keras_shardopt.backends.active import placement, processes, runtime
from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.backends.user_warnings import warn
from keras_shardopt.numerics import Variable
from keras_shardopt.update.agreement import check_agreement, described, sum_losses_of
from keras_shardopt.update.context import StageContext
from keras_shardopt.update.options import check_groups
from keras_shardopt.update.trainer_context import current_share
from keras_shardopt.wrapping.chain import base_optimizers


class Peers:
    """Checks and synchronizes the replicas of a `CrossShard`, once before the first update.

    Args:
        context: gives access to the `CrossShard`.
        members: a function that takes the communicator of all replicas and returns that of this replica's group.
    """

    def __init__(self, context: StageContext, members: Callable[[Communicator], Communicator]) -> None:
        self._context = context
        self._members = members
        self.started: Communicator | None = None
        """PyTorch: the communicator of all ranks, once they have equal weights; None before the first update."""
        self.is_loaded = False
        """Whether the optimizer comes from a file and has not been used yet."""
        # The text that describes this training (`agreement.py`), and whether it was equal on all processes.
        self._described: Any = None
        self._agree = False
        self._leaves: list[Any] = []

    def before_build(self, variables: Sequence[Variable]) -> None:
        """Check and describe the variables before the optimizer is built."""
        optimizer = self._context.optimizer
        self._leaves = base_optimizers(optimizer)
        outers = [outer for extension in optimizer.extension_stages for outer in extension.optimizers]
        placement.before_build(variables, optimizer, [*self._leaves, *outers], optimizer.shard_state)
        if processes.process()[0] > 1:
            # Describe the optimizer now: callbacks change its learning rate later, and a traced step cannot read it.
            self._described = described(optimizer, variables)
            if processes.creates_variables_collectively():
                self._compare(variables)

    def ready(self, variables: Sequence[Variable], comm: Communicator) -> float:
        """Check that the replicas of `comm` can train together. Before the first update, make weights and state equal.

        Returns:
            The factor for this replica's first gradients. It is 0 if the weights of these gradients were replaced.

        Raises:
            ValueError: on every replica, if their optimizers or variables differ.
        """
        optimizer = self._context.optimizer
        is_loaded, self.is_loaded = self.is_loaded, False
        placement.check(variables, self._leaves, is_loaded, optimizer.shard_state)
        optimizer._check_shards(comm)
        self.check(comm)
        if comm.is_spmd or self.started is comm:
            return 1.0
        runtime.no_compile(self._warn_of_sums, comm.num_replicas)
        weights, state = optimizer._trainable_variables, optimizer._shared_variables
        check_groups(optimizer._options.group_assignment, comm)
        factor = placement.broadcast_state(weights, state, self._members(comm))
        self.started = comm
        return factor

    def connected_ranks(self) -> Communicator | None:
        """Return the communicator of the ranks, or None before the first update or without a process group."""
        if self.started is None:
            return None
        try:
            return self.started if self._context.communicator() is self.started else None
        except ValueError:  # the process group is closed
            return None

    def check(self, comm: Communicator | None = None) -> None:
        """Check, once, that all processes train the same model with the same optimizer. All must call this together.

        Raises:
            ValueError: on every process, if they differ. The message names the difference.
        """
        comm = self._context.communicator() if comm is None else comm
        if self._agree or not comm.is_multi_process:
            return
        if self._described is None:
            if not self._context.optimizer.built:
                return
            self._described = described(self._context.optimizer, self._context.trainable)
        runtime.no_compile(self._compare, self._context.trainable)

    def check_parts(self) -> None:
        """Check that the parts of divided optimizer state on all processes belong to the same update.

        All processes must call this together, before values of process 0 are copied to all processes, because the copy
        contains no divided state. Raises ValueError on every process.
        """
        if self._agree:
            self._check_start()

    def _compare(self, variables: Sequence[Variable]) -> None:
        check_agreement(self._described, self._context.optimizer, variables)
        self._check_start()
        self._agree = True

    def _check_start(self) -> None:
        shards = self._context.optimizer._shards
        if shards is not None:
            shards.check_start(int(ops.convert_to_numpy(self._context.counter)))

    def _warn_of_sums(self, num_replicas: int) -> None:
        """Warn of a loss summed over a replica's rows, unless the trainer sums the loss over the whole batch."""
        optimizer = self._context.optimizer
        if optimizer._options.reduction == "sum" or current_share() is not None:
            return
        for loss in sum_losses_of(optimizer, self._context.trainable)[:1]:
            warn(
                "The gradients of a loss that sums over rows must be summed over replicas. Their mean is "
                f"{num_replicas} times too small. Received: {type(loss).__name__}(reduction='sum') with "
                f'{optimizer!r}. Use `CrossShard(..., reduction="sum")`, or call `keras_shardopt.prepare(model)` '
                "before `fit`.",
            )
