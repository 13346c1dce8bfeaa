"""The objects that users pass to `CrossShard(extensions=...)`, and their stages (steps of an update)."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import keras
import numpy as np

from keras_shardopt.backends.traffic import Collective
from keras_shardopt.numerics import Variable
from keras_shardopt.update.context import StageContext
from keras_shardopt.update.plugs import Place
from keras_shardopt.update.step import Stage
from keras_shardopt.wrapping.chain import shown
from keras_shardopt.wrapping.configs import portable

if TYPE_CHECKING:
    from typing_extensions import Self


class Configured:
    """Base class of objects with one attribute per constructor argument. The attributes give config and `repr`."""

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor, serialized."""
        return {name: portable(keras.saving.serialize_keras_object(value)) for name, value, _ in self._arguments()}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Create an object from the result of `get_config`."""
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
    """Base class of immutable objects that hold arguments of `CrossShard`."""

    old_arguments: ClassVar[Mapping[str, Any]] = {}
    """The former arguments of `CrossShard` that this class replaces, with defaults. They work for one more release."""

    spelling: ClassVar[str]
    """The argument that a `DeprecationWarning` recommends, such as `extensions=[{}]`, with `{}` for the object."""

    @classmethod
    def from_old(cls, arguments: Mapping[str, Any]) -> Self:
        """Create the object from former arguments of `CrossShard`."""
        raise NotImplementedError

    def to_old(self) -> dict[str, Any]:
        """Return the values of `old_arguments`. They stay attributes of the optimizer for one more release."""
        return {}

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            raise AttributeError(
                f"`{name}` of a `{type(self).__name__}` cannot be changed. Received: {value!r}. Create a new object."
            )
        super().__setattr__(name, value)


class Extension(Settings):
    """Base class of the features that users pass to `CrossShard(extensions=[...])`."""

    place: ClassVar[Place]
    """When the extension's stages run, relative to the built-in stages of `CrossShard`."""

    needs_local_gradients: ClassVar[bool] = False
    """Whether the extension needs each replica's unreduced gradients."""

    spelling = "extensions=[{}]"

    def check(self, options: Any) -> None:
        """Raise ValueError if `options` (a `CrossShardOptions`) contradict the extension."""

    def from_options(self, options: Any, context: StageContext) -> list[Stage]:
        """Return the stages (steps of an update) of this extension, for a `CrossShard` under construction."""
        raise NotImplementedError


def made(value: Any, custom_objects: Any = None) -> Any:
    """If `value` is a serialized config (a dict), return the object that it describes; otherwise return `value`."""
    if not isinstance(value, dict):
        return value
    return keras.saving.deserialize_keras_object(portable(value), custom_objects=custom_objects)


class ExtensionStage(Stage):
    """Base class of the stages (steps of an update) of extensions. Methods that are not overridden have no effect."""

    keeps_state: ClassVar[bool] = False
    """Whether files (`saved_variables`) and backups (`save_state`) contain state of the stage."""

    keeps_bits: ClassVar[bool] = False
    """Whether results must be bitwise independent of the number of replicas."""

    reducer: Any = None
    """Reduces gradients over replicas in place of the default reducer; None for the default."""

    optimizers: Sequence[Any] = ()
    """The stage's own optimizers, such as one that updates averaged weights."""

    saved_variables: Sequence[Variable] = ()
    """The stage's variables that optimizer files contain."""

    replica_state: Sequence[Variable] = ()
    """Optimizer state that each replica updates separately."""

    weights_differ: bool = False
    """Whether replicas have different weights now, as between two averages of local SGD."""

    divides_weights: bool = False
    """Whether a replica keeps only its slices of the weights between steps. Requires `shard_state`."""

    restores_skipped_updates: bool = False
    """Whether this stage restores moving statistics after skipped updates. If False, the optimizer restores them."""

    @classmethod
    def found_in(cls, optimizers: Iterable[Any]) -> list[Self]:
        """Return the stages of this class in these optimizers. Optimizers other than `CrossShard` have none."""
        stages = [stage for each in optimizers for stage in getattr(each, "extension_stages", ())]
        return [stage for stage in stages if isinstance(stage, cls)]

    def before_reading(self) -> None:
        """Prepare weights for reading or saving. Called on all processes together."""

    def sent(self, collectives: Sequence[Collective]) -> tuple[list[Collective], int]:
        """Return the collectives of a period, such as from one weight average to the next, and its number of updates.

        Args:
            collectives: the collectives of each update without this stage.
        """
        return list(collectives), 1

    def save_state(self) -> list[np.ndarray]:
        """Return the state of all replicas for a backup, if `keeps_state`. Called on all processes together."""
        raise NotImplementedError

    def load_state(self, arrays: Sequence[np.ndarray]) -> None:
        """Restore the state from the arrays that `save_state` returned."""
        raise NotImplementedError
