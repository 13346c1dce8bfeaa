"""The files of a wrapper that divides its optimizer state: they contain undivided arrays."""

from __future__ import annotations

from typing import Any

from keras_shardopt.backends.active import placement, processes
from keras_shardopt.sharding.shards import Shards
from keras_shardopt.wrapping.stored_state import StoredState, assign_all, build_for_its_model, named_store, save_all
from keras_shardopt.wrapping.wrapper import OptimizerWrapper

BARRIER_SECONDS = 60.0
"""The seconds that a saving replica waits until the other replicas save too."""

_SAVE_TOGETHER = (
    "With `shard_state=True` each rank has only a part of the state that `model.save`, `model.save_weights` and "
    "`optimizer.save_own_variables` store. Call `keras_shardopt.save_model(model, path)` (or `save_weights`) on every "
    "rank. One rank writes the file."
)


class ShardedFiles(OptimizerWrapper):
    """Stores state that a subclass divides."""

    shard_state: bool
    _shards: Shards | None = None  # None also if JAX shardings divide the state without padding

    @property
    def _lays_out_state(self) -> bool:
        return self.shard_state and placement.state_sharding == "layout"

    @property
    def _holds_slices(self) -> bool:
        """Whether each replica has only its slices of the state, in separate variables or copies of variables."""
        return self._shards is not None and not self._lays_out_state

    @property
    def _saving_needs_all_replicas(self) -> bool:
        """Whether processes divide the state, so all of them must take part in saving it."""
        is_laid_out = self._lays_out_state and processes.process()[0] > 1
        return is_laid_out or self._holds_slices

    def save_own_variables(self, store: Any) -> None:
        """Write the state like the inner optimizer without a wrapper. All replicas must call this if state is divided.

        Raises:
            RuntimeError: if state is divided, and another replica does not make this call in time. The limit is the
                `timeout` of the `data_parallel` scope, or a minute without one.
        """
        if self._shards is None and not self._lays_out_state:
            super().save_own_variables(store)
            return
        processes.barrier("save", BARRIER_SECONDS, _SAVE_TOGETHER)
        save_all(self, named_store(self, store), self._inner_state)

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        # Omit the state from a SavedModel, which stores variables unchanged: it would have only one replica's part.
        is_divided = self._shards is not None and save_type != "checkpoint"
        return {} if is_divided else super()._trackable_children(save_type, **kwargs)

    def _before_file_access(self, loads: bool) -> None:
        super()._before_file_access(loads)
        if loads and self.shard_state and not self.built:
            build_for_its_model(self)
            if not self.built and len(placement.replica_values(self.iterations)) > 1:
                raise ValueError(
                    "With `shard_state=True` the optimizer must be built before a checkpoint is restored, because each "
                    f"replica takes a part of the state. Received: {self!r}, not built. Compile the model with this "
                    "optimizer first, or call `optimizer.build(model.trainable_variables)`."
                )

    @property
    def _stored_state(self) -> StoredState:
        return super()._stored_state if self._shards is None else self._shards.state

    def _load_inner(self, store: Any) -> None:
        if self._shards is None:
            super()._load_inner(store)
        else:
            assign_all(self, store, self._inner_state)
