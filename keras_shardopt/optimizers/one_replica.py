"""A shortcut for one replica: a `CrossShard` without further options calls the inner optimizer directly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_shardopt.backends.active import runtime
from keras_shardopt.numerics import Gradients, Variable
from keras_shardopt.update.context import CrossShardProtocol
from keras_shardopt.wrapping.chain import Wrapping


class OneReplicaShortcut:
    """A mixin for `CrossShard`: with one replica, calls the inner optimizer directly unless an option prevents that."""

    _is_idle = False
    """Whether a single replica can call the inner optimizer directly. Set by `build`."""

    def build(self: Any, variables: Sequence[Variable]) -> None:
        """Builds the optimizer. Determines whether one replica can call the inner optimizer directly."""
        super().build(variables)  # type: ignore[misc]
        self._is_idle = _has_nothing_to_do(self)

    @runtime.no_autograph
    def apply(self: Any, grads: Gradients, trainable_variables: Sequence[Variable] | None = None) -> None:
        """Updates the variables: directly through the inner optimizer if possible."""
        variables = trainable_variables
        if self._is_idle and self.pipeline.is_idle and self._observer is None and isinstance(variables, list):
            is_single = runtime.communicator(self.axis_name).num_replicas == 1
            if is_single and len(grads) == len(variables) and not self._computed:
                self.pipeline.run_idle(self.inner.apply, grads, variables)
                return
        super().apply(grads, variables)  # type: ignore[misc]


def _has_nothing_to_do(optimizer: CrossShardProtocol) -> bool:
    # Traced backends run this Python code once per compilation, so the shortcut saves nothing there.
    runs_each_step = all(runtime.version(variable) is not None for variable in optimizer._trainable_variables[:1])
    uses = (optimizer._options.compression, optimizer._options.group_assignment, optimizer._shards, optimizer._rollback)
    is_around_plain = not any(isinstance(part, Wrapping) for part in optimizer._inside)
    return runs_each_step and is_around_plain and all(each is None for each in uses)
