"""The way of gradients through one update: stages around one reduction."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from keras import ops

from keras_shardopt.backends.active import runtime
from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.backends.traffic import Collective, recording
from keras_shardopt.numerics import Gradients, Tensor, Variable
from keras_shardopt.update.extension import Extension
from keras_shardopt.update.fused import FusedUpdate
from keras_shardopt.update.step import Proceed, Stage, Step
from keras_shardopt.update.transport import Transport

_NOTHING_KNOWN = Step((), ())
# Each replica's own: those of TensorFlow are threads that take turns in the middle of an update.
_resumed: contextvars.ContextVar[Step] = contextvars.ContextVar("resumed", default=_NOTHING_KNOWN)
_resumed_lock = threading.Lock()


class Reducer(Protocol):
    """Makes each replica's own gradients global: by an all-reduce, a reduce-scatter, or while they are computed."""

    transport: Transport
    """What takes gradients to other replicas."""

    def watch(self, loss: Tensor, row_share: Any) -> None:
        """Called with each loss before it is differentiated."""

    @property
    def has_finished(self) -> bool:
        """Whether the gradients of this step are global already, as it has reduced them in the backward pass."""

    def reduced_early(self, step: Step, comm: Communicator) -> Step | None:
        """The step with gradients that were, or now are, reduced in a way that no stage sees; None where not."""

    def reduce(self, step: Step, comm: Communicator) -> Step:
        """The step with global gradients: all of them, or those of this replica's slices."""

    def own_part(self, step: Step) -> Step:
        """Of a step that was reduced elsewhere, what this replica updates with."""

    def dividing_axes(self, variables: Sequence[Variable]) -> list[int | None]:
        """Along which dimension of each gradient `reduce` can leave slices, if `Step.axes` asks for them."""

    def finish(self, comm: Communicator) -> None:
        """Tells the other replicas that this one has ended training, so that none waits for it."""


class Pipeline:
    """Takes steps through `collect` of all stages, the reduction, and `commit` of all stages, to the update.

    Args:
        stages: from the outside in.
        reducer: makes gradients global.
        update: gets the step in the end.
        axis_name: of the mapped axis of replicas on JAX.
        classify: fills in how gradients arrive.
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
        """Ends what `watch_noise` has begun."""
        self._update = update
        self._axis_name = axis_name
        self._classify = classify
        self._commit = update
        self._reducing: list[Collective] = []
        self._committing: list[Collective] = []
        self._num_resumed = 0

    def build(self, variables: Sequence[Variable], add_variable: Callable[..., Variable]) -> None:
        """Builds the stages, and then the transport."""
        for stage in self.stages:
            stage.build(variables, add_variable)
        self.transport.build(variables, add_variable)

    @property
    def transport(self) -> Transport:
        """What takes gradients to other replicas."""
        return self.reducer.transport

    def change(self, stages: Sequence[Stage], reducer: Reducer) -> None:
        """Goes on with other stages, between two steps. A compiled step must be compiled anew."""
        self.stages, self.reducer = list(stages), reducer
        self._collect: Proceed | None = None
        self._fused = next((stage for stage in stages if isinstance(stage, FusedUpdate)), None)
        self.is_idle = all(stage is self._fused for stage in stages)
        """Whether no stage looks at the gradients, nor changes them."""

    def micro_batch(self, step: Step, starts: Any) -> None:
        """Shows the gradients of a micro-batch to the stages that look at them."""
        for stage in self.stages:
            if stage._looks_at_micro_batches:
                stage._micro_batch(step, starts, runtime.communicator(self._axis_name))

    def reset(self) -> None:
        """Lets all stages begin anew: state was loaded."""
        for stage in self.stages:
            stage.reset()
        self.transport.reset()

    def before_look(self) -> None:
        """Tell extensions that somebody reads or saves weights. All processes call it together."""
        for stage in self.stages:
            if isinstance(stage, Extension):
                stage.before_look()

    def run(self, step: Step) -> None:
        """One call of `apply`."""
        if self._collect is None:
            self._collect = self._through("collect", self._reduce_and_commit)
            self._commit = self._through("commit", self._update)
        self._collect(step)

    def run_idle(self, update: Callable[..., None], grads: Gradients, variables: Sequence[Variable]) -> None:
        """The same by `update(grads, variables)`, where the pipeline `is_idle` and there is nothing to reduce."""
        if self._fused is None:
            update(grads, variables)
        else:
            self._fused.run(grads, update, grads, variables)

    def reduce(self, step: Step) -> Step:
        """What happens up to the update, on one replica; perhaps inside a `shard_map`."""
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
        """Those of the last update, or of its last trace."""
        return [*self._reducing, *self._committing]

    @property
    def carried(self) -> list[Variable]:
        """The variables that each reduction reads and leaves, with another value on each replica."""
        return [variable for kept in self.transport.carried.values() for variable in kept]

    @property
    def replica_state(self) -> list[Variable]:
        """The variables of stages and transport that hold another value on each replica."""
        return [*[variable for stage in self.stages for variable in stage.replica_state], *self.carried]

    @contextlib.contextmanager
    def resuming(self, step: Step) -> Iterator[None]:
        """For trainers: the gradients that come during the block are of this step, which `reduce` has returned."""
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
        """What is known of gradients that come reduced."""
        # Not asked for nothing: torch.compile breaks a step apart at every look into a context variable.
        return _resumed.get() if self._num_resumed else _NOTHING_KNOWN

    def carried_in(self, variables: Sequence[Variable], values: Sequence[Tensor]) -> list[Tensor]:
        """Of the values of an optimizer's variables, those of `carried`."""
        by_id = {id(variable): value for variable, value in zip(variables, values)}
        return [by_id[id(variable)] for variable in self.carried]

    def _reduce_and_commit(self, step: Step) -> None:
        if step.is_reduced:
            step = self.reducer.own_part(step)
        elif step.replica_axis is None:
            step = self.reduce(step)
        else:
            step = self._reduce_stacked(step)
        with recording() as self._committing:
            self._commit(self.transport.keep(step))

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
