"""Stores wrappers in TensorFlow's `tf.train.Checkpoint` and SavedModels. Other backends never call this code.

A wrapper exposes the objects of its innermost optimizer under the same names, and its own variables next to them.
Checkpoints can therefore be exchanged between `Adam()` and a wrapper around it.

Private names of TensorFlow touched here (tests/unit/wrapping/test_tensorflow_checkpoint.py checks that each exists):
    `Trackable._trackable_children`, `_lookup_dependency` - the named objects below an object.
    `Trackable._deferred_dependencies`, `_handle_deferred_dependencies` - restored values without an object yet.
"""

from __future__ import annotations

from typing import Any

from keras_shardopt.numerics import Variable
from keras_shardopt.wrapping.chain import base_optimizers


class InCheckpoints:
    """Exposes the innermost optimizer's objects in TensorFlow's object graph."""

    built: bool
    _inner: tuple[Any, ...]
    _saved_wrapper_state: Any
    _trainable_variables: list[Variable]
    _wrappers: Any

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        self._notify_wrappers(loads=False)
        core = self._wrappers[0].inner
        children: dict[str, Any] = {**core._trackable_children(save_type, **kwargs), **self._own_children()}
        pairs = zip(core._trainable_variables, self._trainable_variables)
        # If the wrapped optimizer updates slices of these variables, omit its list of variables, so no file has slices.
        if any(inside is not variable for inside, variable in pairs):
            del children["_trainable_variables"]
        return children

    def _lookup_dependency(self, name: str, cached_dependencies: Any = None) -> Any:
        if cached_dependencies is None:  # the call is for an attribute, not for a file
            return super()._lookup_dependency(name)  # type: ignore[misc]
        self._notify_wrappers(loads=True)
        return self._trackable_children().get(name)

    def _notify_wrappers(self, loads: bool) -> None:
        for wrapper in self._wrappers:
            wrapper._before_file_access(loads)

    def _before_file_access(self, loads: bool) -> None:
        """Called before the state is written to a file (`loads` is False), and when it is read from a file (True)."""

    def _own_children(self) -> dict[str, Any]:
        if not self.built:  # nothing yet, because `build` creates some of the variables
            return {}
        # Keras' `MultiOptimizer` omits the state of its optimizers from TensorFlow's checkpoints, so add it here.
        several = leaves if len(leaves := base_optimizers(self)) > 1 else []
        children = {"wrapper_state": self._saved_wrapper_state.variables, "optimizer": several}
        return {f"{name}_{i}": child for name, found in children.items() for i, child in enumerate(found)}

    @property
    def _deferred_dependencies(self) -> Any:
        # The base class's constructor reads this property before an inner optimizer exists.
        owner: Any = self._wrappers[0].inner if self._inner else super()
        return owner._deferred_dependencies

    def _restore_deferred(self) -> None:
        """Assign values from a checkpoint that was restored before the optimizer's variables existed."""
        restore: Any = getattr(self, "_handle_deferred_dependencies", None)
        for name, child in {} if restore is None else self._own_children().items():
            restore(name=name, trackable=child)
