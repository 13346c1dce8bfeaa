"""Extensions of an update: the objects that users pass to `CrossShard(extensions=...)`, and their stages."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import keras
import numpy as np

from keras_shardopt.backends.traffic import Collective
from keras_shardopt.numerics import Variable
from keras_shardopt.update.context import StageContext
from keras_shardopt.update.plugs import Place
from keras_shardopt.update.step import Stage
from keras_shardopt.wrapping.chain import shown
from keras_shardopt.wrapping.stored_state import portable

if TYPE_CHECKING:
    from typing_extensions import Self


class Configured:
    """An object whose attributes are the arguments of its constructor. Its config and `repr` follow from them."""

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor, serialized."""
        return {name: portable(keras.saving.serialize_keras_object(value)) for name, value, _ in self._arguments()}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """The reverse of `get_config`."""
        return cls(**{name: made(value) for name, value in config.items()})

    def __repr__(self) -> str:
        given = [f"{name}={_shown(value)}" for name, value, default in self._arguments() if value != default]
        return f"{type(self).__name__}({', '.join(given)})"

    def _arguments(self) -> list[tuple[str, Any, Any]]:
        """Return `(name, value, default)` of each argument of the constructor."""
        parameters = inspect.signature(type(self)).parameters
        return [(name, getattr(self, name), parameter.default) for name, parameter in parameters.items()]


def _shown(value: Any) -> str:
    return shown(value) if isinstance(value, keras.optimizers.Optimizer) else repr(value)


class Settings(Configured):
    """Base class of the objects that hold some arguments of `CrossShard`. They cannot be changed."""

    old_arguments: ClassVar[Mapping[str, Any]] = {}
    """The arguments of `CrossShard` that they replace, with their defaults. They work for one more release."""

    spelling: ClassVar[str]
    """The new spelling in a `DeprecationWarning`, with `{}` for the object."""

    @classmethod
    def from_old(cls, arguments: Mapping[str, Any]) -> Self:
        """Return the object for the old arguments in `arguments`."""
        raise NotImplementedError

    def to_old(self) -> dict[str, Any]:
        """Return the old arguments, as attributes of the optimizer for one more release."""
        return {}

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            raise AttributeError(
                f"`{name}` of a `{type(self).__name__}` cannot be changed. Received: {value!r}. Make a new one."
            )
        super().__setattr__(name, value)


class Extension(Settings):
    """Base class of the features that users pass to `CrossShard(extensions=[...])`."""

    place: ClassVar[Place]
    """The place of its stage."""

    needs_local_gradients: ClassVar[bool] = False
    """Whether it needs each replica's gradients, before they are reduced."""

    spelling = "extensions=[{}]"

    def check(self, options: Any) -> None:
        """Raise ValueError if these `CrossShardOptions` contradict it."""

    def from_options(self, options: Any, context: StageContext) -> list[Stage]:
        """Return its stages for a `CrossShard` under construction."""
        raise NotImplementedError


def made(value: Any, custom_objects: Any = None) -> Any:
    """Return the object of a serialized one, and anything else unchanged."""
    if not isinstance(value, dict):
        return value
    return keras.saving.deserialize_keras_object(portable(value), custom_objects=custom_objects)


class ExtensionStage(Stage):
    """Base class of the stages of extensions. All hooks do nothing by default."""

    keeps_state: ClassVar[bool] = False
    """Whether files and backups contain its state."""

    keeps_bits: ClassVar[bool] = False
    """Whether results must be bitwise independent of the number of replicas."""

    reducer: Any = None
    """The reducer that replaces the usual one, or None."""

    optimizers: Sequence[Any] = ()
    """Its optimizers, in addition to the inner one."""

    lasting: Sequence[Variable] = ()
    """Its variables in optimizer files."""

    private: Sequence[Variable] = ()
    """The variables that differ among replicas, in addition to `_replica_state`."""

    are_apart: bool = False
    """Whether replicas have different weights now."""

    settles_skips: bool = False
    """Whether it restores the changes of a skipped update on each replica."""

    def check_outside(self, outer: Any) -> None:
        """Raise ValueError if a loss-scaling optimizer `outer` must not wrap this one."""

    def before_look(self) -> None:
        """Prepare weights for reading or saving. All processes call it together."""

    def sent(self, collectives: Sequence[Collective]) -> tuple[list[Collective], int]:
        """Return the collectives for a traffic report, and the number of updates that share them."""
        return list(collectives), 1

    def save_state(self) -> list[np.ndarray]:
        """Return the state of all replicas for a backup, if `keeps_state`. All processes call it together."""
        raise NotImplementedError

    def load_state(self, arrays: Sequence[np.ndarray]) -> None:
        """Continue from the arrays of `save_state`."""
        raise NotImplementedError
