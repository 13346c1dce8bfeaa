"""Run one update: its stages (such as clipping), and among them the reduction of gradients over replicas."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from keras import ops

from keras_shardopt.backends import phases
from keras_shardopt.backends.active import runtime
from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.backends.traffic import Collective, recording
from keras_shardopt.numerics import Gradients, Variable
from keras_shardopt.update.extension import ExtensionStage
from keras_shardopt.update.fused import FusedUpdate
from keras_shardopt.update.reducers import Reducer
from keras_shardopt.update.step import Proceed, Stage, Step
from keras_shardopt.update.transport import Transport

_NO_STEP = Step((), ())
# The step set by `resuming`. A context variable, because TensorFlow's replicas are threads that alternate in an update.
_resumed: contextvars.ContextVar[Step] = contextvars.ContextVar("resumed", default=_NO_STEP)
_resumed_lock = threading.Lock()


class Pipeline:
    """Runs `collect`, then `local`, of all stages (`Stage`), the reduction, `commit` of all stages, and the update.

    Args:
        stages: from the outermost to the innermost.
        reducer: averages or sums gradients over replicas.
        update: updates the weights with the final step.
        axis_name: str. JAX: the mapped axis of the replicas.
        classify: returns the step with its `gradient_state`.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        reducer: Reducer,
        update: Proceed,
        axis_name: str,
        classify: Callable[[Step, Communicator], Step],
    ) -> None:
        self.change(stages, reducer)
        self.end_watch: Callable[[], None] | None = None
        """A function that removes the temporary stage of `update.watch`, or None."""
        self._update = update
        self._axis_name = axis_name
        self._classify = classify
        self._reducing: list[Collective] = []
        self._committing: list[Collective] = []
        self._num_resumed = 0

    def build(self, variables: Sequence[Variable], add_variable: Callable[..., Variable]) -> None:
        """Create the variables of the stages, then those of the transport (the object that sends gradients)."""
        for stage in self.stages:
            stage.build(variables, add_variable)
        self.transport.build(variables, add_variable)

    @property
    def transport(self) -> Transport:
        """Encodes and sends gradients between replicas."""
        return self.reducer.transport

    def change(self, stages: Sequence[Stage], reducer: Reducer) -> None:
        """Replace the stages and the reducer between two steps. Compiled steps must then be recompiled."""
        self.stages, self.reducer = list(stages), reducer
        self._collect: Proceed | None = None
        self._fused = next((stage for stage in stages if isinstance(stage, FusedUpdate)), None)
        self.is_idle = all(stage is self._fused for stage in stages)
        """Whether no stage reads or changes the gradients."""

    def micro_batch(self, step: Step, starts: Any) -> None:
        """Pass a micro-batch's gradients to stages that need them. `starts` is true for the first of an update."""
        comm = runtime.communicator(self._axis_name)
        for stage in self.stages:
            stage._micro_batch(step, starts, comm)

    def reset(self) -> None:
        """Reset all stages and the transport, because state was loaded."""
        for stage in self.stages:
            stage.reset()
        self.transport.reset()

    def before_reading(self) -> None:
        """Notify extensions that weights are about to be read or saved. Called on all processes together."""
        for stage in self.stages:
            if isinstance(stage, ExtensionStage):
                stage.before_reading()

    def run(self, step: Step) -> None:
        """Process the gradients of one call of `apply`."""
        if self._collect is None:
            self._collect = self._through("collect", self._reduce_and_commit)
            self._commit = self._through("commit", self._update)
        self._collect(step)

    def run_idle(self, update: Callable[..., None], grads: Gradients, variables: Sequence[Variable]) -> None:
        """Run `update(grads, variables)` directly, if no stage processes gradients and nothing must be reduced."""
        if self._fused is None:
            update(grads, variables)
        else:
            self._fused.run(grads, update, grads, variables)

    def reduce(self, step: Step) -> Step:
        """Run `local` of all stages and the reduction for one replica, possibly inside a `shard_map`."""
        comm = runtime.communicator(self._axis_name)
        with recording() as self._reducing:
            early = self.reducer.reduced_early(step, comm)
            if early is not None:
                return early
            step = self._classify(step, comm)
            for stage in self.stages:
                step = stage.local(step, comm)
            return self.reducer.reduce(step, comm)

    @property
    def collectives(self) -> list[Collective]:
        """The collectives (calls that communicate) of the last update, recorded while tracing if it is compiled."""
        return [*self._reducing, *self._committing]

    @property
    def carried(self) -> list[Variable]:
        """The variables with values for the next reduction, such as compression errors (`Transport.carried`)."""
        return [variable for kept in self.transport.carried.values() for variable in kept]

    @property
    def replica_state(self) -> list[Variable]:
        """All variables of the stages and the transport that have a different value on each replica."""
        return [*[variable for stage in self.stages for variable in stage._replica_state], *self.carried]

    @contextlib.contextmanager
    def resuming(self, step: Step) -> Iterator[None]:
        """In the block, `CrossShard` skips the reduction, because a trainer has called `reduce`, with result `step`."""
        self._count_resumed(1)
        token = _resumed.set(step)
        try:
            yield
        finally:
            _resumed.reset(token)
            self._count_resumed(-1)

    def _count_resumed(self, change: int) -> None:
        with _resumed_lock:
            self._num_resumed += change

    @property
    def resumed(self) -> Step:
        """The step passed to `resuming`; outside it, an empty step."""
        # Check the count first, because each read of a context variable splits the graph of torch.compile.
        return _resumed.get() if self._num_resumed else _NO_STEP

    def _reduce_and_commit(self, step: Step) -> None:
        if step.is_reduced:
            step = self.reducer.own_part(step)
        elif step.replica_axis is None:
            step = self.reduce(step)
        else:
            step = self._reduce_stacked(step)
        phases.change("updating")
        with recording() as self._committing:
            self._commit(self.transport.keep(step))
        phases.change(None)

    def _reduce_stacked(self, step: Step) -> Step:
        known = isinstance(step.row_share, float)

        def reduced(own: Any) -> Any:
            grads, shares, carried = own
            share = step.row_share if known else shares[0]
            mine = step.replace(grads=grads, row_share=share, replica_axis=None, own=carried, axes=axes)
            result = self.reduce(mine)
            return result.grads, (result.found_inf, dict(result.notes)), list(result.own or ())

        axes = self.reducer.dividing_axes(step.variables)
        carried = [ops.convert_to_tensor(variable) for variable in self.carried]
        stacked = (list(step.grads), [] if known else [step.row_share], carried)
        grads, (found_inf, notes), carried = runtime.map_replicas(reduced, stacked, axes)
        return step.replace(grads=grads, found_inf=found_inf, notes=notes, own=carried, replica_axis=None)

    def _through(self, hook: str, last: Proceed) -> Proceed:
        for stage in reversed(self.stages):
            if stage._overrides(hook):
                last = functools.partial(getattr(stage, hook), proceed=last)
        return last
