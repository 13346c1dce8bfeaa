"""A wrapper that can divide its optimizer state among replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_shardopt.backends.active import placement, runtime
from keras_shardopt.backends.communicator import Communicator, GlobalView
from keras_shardopt.backends.gradient_scope import GradientScope
from keras_shardopt.backends.keras_callers import running_instance
from keras_shardopt.backends.models import model_compiled_with
from keras_shardopt.numerics import Gradients, Variable
from keras_shardopt.sharding.even_slices import PaddedShards
from keras_shardopt.sharding.padded_layout import PaddedLayout, needs_padding
from keras_shardopt.sharding.report import MemoryReport, laid_out_report
from keras_shardopt.sharding.sharded_files import ShardedFiles
from keras_shardopt.sharding.shards import Shards
from keras_shardopt.sharding.slices import FlatShards
from keras_shardopt.wrapping.chain import chain_of, innermost


class ShardedState(ShardedFiles):
    """Divides state among processes (`FlatShards`), replicas of one program (`PaddedShards`), or by JAX shardings."""

    axis_name: str
    scope_inside: GradientScope

    def _divided(self, variables: Sequence[Variable]) -> Shards | None:
        """Create the object that divides the state. Return None if the inner optimizer updates whole weights."""
        divide = _STRATEGIES.get(placement.state_sharding)
        return None if divide is None else divide(self, variables)

    def _variables_inside(self, variables: Sequence[Variable]) -> list[Variable]:
        return list(variables) if self._shards is None else self._shards.inside(variables)

    def _inner_is_built(self) -> None:
        if self._shards is not None:
            self.scope_inside.holds_slices = self._holds_slices
            self._shards.bind_state(self)
        if self._lays_out_state:
            placement.place(self._state, "sharded")

    @property
    def _divided_arrays(self) -> list[Variable]:
        """The arrays of state that JAX shardings divide among devices."""
        return [v for v in self._state if len(v.shape)] if self._lays_out_state else []

    def _check_shards(self, comm: Communicator) -> None:
        """Raise ValueError if the state was not divided among these replicas."""
        if self._shards is not None and self._holds_slices:
            if comm.num_replicas != self._shards.num_replicas:
                raise ValueError(
                    "The number of replicas must not change after the build, because each replica holds a part of the "
                    f"state. Received: {comm.num_replicas} replicas, and state divided among "
                    f"{self._shards.num_replicas}. Build the model again, and load a checkpoint. A checkpoint fits any "
                    "number of replicas."
                )
        elif self.shard_state and comm.num_replicas > 1 and not isinstance(comm, GlobalView):
            raise ValueError(
                "On JAX, `shard_state=True` cannot be used inside `shard_map` or `pmap`, because each replica has only "
                f"a part of an array there. Received: axis_name={self.axis_name!r}, an axis of {comm.num_replicas} "
                "replicas. Train with `model.fit` inside `with keras_shardopt.data_parallel():`, or use "
                "`shard_state=False`."
            )

    def update_inner(self, grads: Gradients, variables: Sequence[Variable]) -> None:
        """Update this replica's slices if state is divided, then the weights on all replicas."""
        if self._shards is None:
            super().update_inner(grads, variables)
        else:
            runtime.no_compile(self._shards.update, self.inner, grads, variables)

    def finalize_variable_values(self, var_list: Sequence[Variable]) -> None:
        """Set the final values of weights after training. With `use_ema`, the values are averages."""
        if self._shards is None:
            super().finalize_variable_values(var_list)
        elif self.use_ema or _finalizes(innermost(self)):
            self._shards.finalize(self.inner, var_list)

    @property
    def _replica_state(self) -> list[Variable]:
        if self._shards is None or not self._holds_slices:
            return []
        return [v for v in self.inner.variables if self._shards.state.is_divided(v)]

    @property
    def _state(self) -> list[Variable]:
        """The state of the wrapped optimizers, without this optimizer's own variables."""
        own = {id(v) for v in self._variables}
        return [v for v in self.variables if id(v) not in own]

    def _state_report(self) -> MemoryReport:
        """Return the bytes of optimizer state on each replica."""
        return laid_out_report(self._state) if self._shards is None else self._shards.state.memory_report(self._state)

    def get_slot(self, variable: Variable, name: str) -> Variable | None:
        """Return the state of that name for a trainable variable.

        Raises:
            ValueError: if each replica holds only a part of the state.
        """
        if self._holds_slices:
            raise ValueError(
                "With `shard_state=True` a replica has only the slots of its own slices. "
                f"Received: get_slot({getattr(variable, 'path', variable)!r}, {name!r}). "
                "To get whole arrays, call `optimizer.save_own_variables(store)` with a dict `store` on all processes."
            )
        return super().get_slot(variable, name)

    def _observe(self, observer: Any) -> None:
        """Pass the gradients of each update to `observer`.

        Raises:
            ValueError: if each replica has only slices of the gradients.
        """
        if self.shard_state and observer is not None and not self._lays_out_state:
            raise ValueError(
                "Summaries of gradients need all gradients, but with `shard_state=True` a replica has only its slices. "
                "Use `TrainingSummaries(summaries=[])`, or `shard_state=False`."
            )
        super()._observe(observer)

    @property
    def _model_variables_moving_average(self) -> list[Variable]:
        if self._shards is not None:
            raise ValueError(
                "`SwapEMAWeights` cannot swap weights with `shard_state=True`, because a replica has only the moving "
                "averages of its slices. Remove the callback: at the end, `fit` sets the weights to the averages."
            )
        return super()._model_variables_moving_average


def _own_slices(optimizer: ShardedState, variables: Sequence[Variable]) -> FlatShards | None:
    replicas = runtime.communicator(optimizer.axis_name)
    if replicas.num_replicas == 1:
        return None
    _refuse_several()
    with runtime.init_scope():
        return FlatShards(optimizer, variables, replicas)


def _slices_in_copies(optimizer: ShardedState, variables: Sequence[Variable]) -> PaddedShards | None:
    with runtime.init_scope():
        num_copies = max((len(placement.replica_values(variable)) for variable in variables[:1]), default=1)
        if num_copies == 1:
            return None
        _refuse_several()
        return PaddedShards(optimizer, variables, num_copies)


def _padded_rows(optimizer: ShardedState, variables: Sequence[Variable]) -> PaddedLayout | None:
    chain = chain_of(optimizer)
    if any(one.use_ema for one in chain) or not needs_padding(variables):
        return None  # do not pad moving averages: callbacks swap them with weights, so both need the same shape
    if model_compiled_with(optimizer) is None:
        return None  # a model with several optimizers can save their variables directly, so these keep their shapes
    return PaddedLayout(optimizer, variables)


_STRATEGIES: dict[str | None, Callable[..., Shards | None]] = {
    "slices": _own_slices,
    "copies": _slices_in_copies,
    "layout": _padded_rows,
}
"""For each value of `Placement.state_sharding`, the function that divides the state of an optimizer."""


def _refuse_several() -> None:
    several = getattr(keras.optimizers, "MultiOptimizer", ())  # Keras before 3.15 has none
    if running_instance(several, "build") is not None:
        raise ValueError(
            "`shard_state=True` cannot be inside a `MultiOptimizer`, because a `MultiOptimizer` would store only one "
            "replica's part of the state. Use `CrossShard(MultiOptimizer(...))` and `shard_state=False`."
        )


def _finalizes(leaf: Any) -> bool:
    """Whether a custom optimizer overrides `finalize_variable_values`, called at the end of training."""
    return type(leaf).finalize_variable_values is not keras.optimizers.Optimizer.finalize_variable_values
