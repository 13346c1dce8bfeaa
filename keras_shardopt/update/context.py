"""The types through which other modules use a `CrossShard`, because importing its module would be circular."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from keras_shardopt.backends.active import runtime
from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.backends.gradient_scope import GradientScope
from keras_shardopt.numerics import Optimizer, Variable
from keras_shardopt.wrapping.chain import descendants


class CrossShardProtocol(Optimizer, Protocol):
    """The attributes of a `CrossShard` that other modules use, as a type."""

    axis_name: str
    shard_state: bool
    loss_scale: Any
    inner: Any
    accumulation: Any
    extension_stages: Sequence[Any]
    peers: Any
    pipeline: Any
    state_finder: Any
    scope_inside: GradientScope
    _options: Any
    _inside: list[Any]
    _rollback: Any
    _shards: Any
    _skips_inside: bool
    _lays_out_state: bool
    _shared_variables: list[Variable]
    _check_shards: Callable[..., None]
    _position: Callable[[Variable], int]
    _written: Callable[[], list[Variable]]


class StageContext:
    """Gives the components of a `CrossShard` access to the optimizer, even during its construction."""

    def __init__(self, optimizer: CrossShardProtocol) -> None:
        self._optimizer = optimizer

    @property
    def optimizer(self) -> CrossShardProtocol:
        """The optimizer itself."""
        return self._optimizer

    @property
    def trainable(self) -> Sequence[Variable]:
        """The trainable variables of the optimizer."""
        variables: Sequence[Variable] = self._optimizer._trainable_variables
        return variables

    def positions(self, variables: Sequence[Variable]) -> Sequence[int]:
        """Return the indices of `variables` in `trainable`. Before `build`, `variables` must be all of these."""
        trainable = self.trainable
        if not trainable or (len(variables) == len(trainable) and all(map(operator.is_, variables, trainable))):
            return range(len(variables))
        return [int(self._optimizer._position(variable)) for variable in variables]

    @property
    def counter(self) -> Any:
        """The variable that counts updates, or micro-batches if an inner optimizer accumulates gradients."""
        return self._optimizer._iterations

    @property
    def loss_scale(self) -> Any:
        """The factor by which loss scaling multiplies the loss."""
        return self._optimizer.loss_scale

    def communicator(self) -> Communicator:
        """Return the communicator of all replicas."""
        return runtime.communicator(self._optimizer.axis_name)

    @property
    def written(self) -> list[Variable]:
        """All variables that an update reads or assigns, except the sums of an accumulation window."""
        return list(self._optimizer._written())

    @property
    def state_finder(self) -> Any:
        """The `GradientStateFinder`, which finds how gradients arrive: not reduced yet, or summed, for example."""
        return self._optimizer.state_finder

    @property
    def pipeline(self) -> Any:
        """The `Pipeline`, which runs the stages and the reduction."""
        return self._optimizer.pipeline

    @property
    def lays_out_state(self) -> bool:
        """Whether `shard_state=True` divides each array of state over devices with a JAX sharding."""
        return bool(self._optimizer._lays_out_state)

    @property
    def started(self) -> Communicator | None:
        """PyTorch: the communicator of all ranks, once they have equal weights; None before the first update."""
        comm: Communicator | None = self._optimizer.peers.started
        return comm

    @property
    def updates_differ(self) -> bool:
        """Whether replicas update with different gradients (local SGD), so each may skip an update independently."""
        return bool(self._optimizer.scope_inside.updates_differ)

    @property
    def skips_inside(self) -> bool:
        """Whether a wrapped optimizer, such as a loss-scaling one, skips updates with nonfinite gradients."""
        return bool(self._optimizer._skips_inside)

    @property
    def decides_with_all(self) -> bool:
        """Whether a wrapped optimizer skips an update in all groups if a gradient of one group is not finite."""
        return any(getattr(part, "_skips_overflows", False) for part in descendants(self._optimizer))
