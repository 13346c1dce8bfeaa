"""Wrappers in TensorFlow's own files: `tf.train.Checkpoint` and SavedModels.

A wrapper shows the objects of the optimizer inside it under the same names, and its own variables next to them. So
these files, too, move between `Adam()` and a wrapper around it. Other backends never call this.

Private names of TensorFlow touched here (tests/unit/wrapping/test_tensorflow_checkpoint.py holds each of them):
    `Trackable._trackable_children`, `_lookup_dependency` - the named objects below an object; the second in restoring.
    `Trackable._deferred_dependencies`, `_handle_deferred_dependencies` - values that wait for an object of their name.
"""

from __future__ import annotations

from typing import Any

from keras_shardopt.numerics import Variable
from keras_shardopt.wrapping.chain import base_optimizers


class InCheckpoints:
    """Stands for the optimizer inside all wrappers, in TensorFlow's object graph."""

    built: bool
    _inner: tuple[Any, ...]
    _saved_apart: Any
    _trainable_variables: list[Variable]
    _wrappers: Any

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        self._tell_wrappers(loads=False)
        core = self._wrappers[0].inner
        children: dict[str, Any] = {**core._trackable_children(save_type, **kwargs), **self._own_children()}
        pairs = zip(core._trainable_variables, self._trainable_variables)
        if any(inside is not variable for inside, variable in pairs):  # a plain optimizer has no stand-ins
            del children["_trainable_variables"]
        return children

    def _lookup_dependency(self, name: str, cached_dependencies: Any = None) -> Any:
        if cached_dependencies is None:  # of its own attributes
            return super()._lookup_dependency(name)  # type: ignore[misc]
        self._tell_wrappers(loads=True)
        return self._trackable_children().get(name)

    def _tell_wrappers(self, loads: bool) -> None:
        for wrapper in self._wrappers:
            wrapper._on_file(loads)

    def _on_file(self, loads: bool) -> None:
        """Called when a checkpoint is about to take the state; or if it `loads`, gives another one or has given it."""

    def _own_children(self) -> dict[str, Any]:
        if not self.built:  # some variables are made in `build`
            return {}
        # Keras' `MultiOptimizer` leaves the state of its optimizers out of such files.
        several = leaves if len(leaves := base_optimizers(self)) > 1 else []
        children = {"wrapper_state": self._saved_apart.variables, "optimizer": several}
        return {f"{name}_{i}": child for name, found in children.items() for i, child in enumerate(found)}

    @property
    def _deferred_dependencies(self) -> Any:
        # The base class's constructor asks before there is an inner optimizer.
        owner: Any = self._wrappers[0].inner if self._inner else super()
        return owner._deferred_dependencies

    def _restore_deferred(self) -> None:
        """Takes values of a checkpoint that was restored before there were these variables."""
        restore: Any = getattr(self, "_handle_deferred_dependencies", None)
        for name, child in {} if restore is None else self._own_children().items():
            restore(name=name, trackable=child)
