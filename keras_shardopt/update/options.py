"""The checked arguments of `CrossShard`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_shardopt import arguments as check
from keras_shardopt.backends.active import placement
from keras_shardopt.backends.communicator import Communicator, GradientState
from keras_shardopt.numerics import Groups, Variable
from keras_shardopt.update.extension import Extension, Settings, made
from keras_shardopt.update.old_arguments import KINDS, in_spelling_of, old_attributes, with_objects
from keras_shardopt.update.plugs import plug_of
from keras_shardopt.update.step import Stage
from keras_shardopt.update.torch_speed import TorchSpeed

LocalTransform = Callable[[list[Any], list[Variable]], Sequence[Any]]
"""`(grads, variables) -> grads`, for the gradients of one replica."""

# TF1's CrossShardOptimizer accepted the names of `tf.compat.v1.losses.Reduction`.
_REDUCTIONS = {"mean": "mean", "sum": "sum", "weighted_mean": "mean", "weighted_sum": "sum"}

GRADIENT_STATES = {"auto": None, **{state.value: state for state in GradientState}}
"""The state of the gradients for each value of the argument `gradients`; None to detect it."""


@dataclasses.dataclass(frozen=True)
class CrossShardOptions:
    """The checked arguments of `CrossShard`, documented there.

    Raises:
        TypeError: if an argument has a wrong type.
        ValueError: if an argument has an invalid value, or two contradict each other.
    """

    reduction: Any = "mean"
    gradient_accumulation_steps: int | None = None
    on_nonfinite: str = "ignore"
    shard_state: bool = False
    torch: TorchSpeed | None = None
    group_assignment: Sequence[Sequence[int]] | None = None
    replica_clipnorm: float | None = None
    replica_transform: LocalTransform | None = None
    compression: Any = None
    extensions: Sequence[Extension] = ()
    stages: Sequence[Stage] = ()
    gradients: str = "auto"
    axis_name: str = "batch"

    def __post_init__(self) -> None:
        _one_of("reduction", self.reduction, _REDUCTIONS, '"mean" or "sum" (or "weighted_mean", "weighted_sum")')
        _one_of("gradients", self.gradients, GRADIENT_STATES, f"one of {list(GRADIENT_STATES)}")
        _one_of("on_nonfinite", self.on_nonfinite, ("ignore", "skip", "raise"), '"ignore", "skip" or "raise"')
        sends = self.compression
        if sends is not None and not (isinstance(sends, str) and sends in ("float16", "bfloat16")):
            sends = plug_of("compression").made(sends)
        if self.replica_clipnorm is not None:
            fix = "Omit `replica_clipnorm` to train without clipping."
            check.real("replica_clipnorm", self.replica_clipnorm, above=0, finite=False, fix=fix)
        if self.replica_transform is not None and not callable(self.replica_transform):
            raise TypeError(
                "`replica_transform` must be a function `(grads, variables) -> grads`, or None. "
                f"Received: replica_transform={self.replica_transform!r}"
            )
        groups = group_assignment_of(self.group_assignment)
        num_steps = self.gradient_accumulation_steps
        if num_steps is not None:
            fix = "Omit the argument to train without accumulation."
            num_steps = check.integer("gradient_accumulation_steps", num_steps, fix=fix)
        check.flag("shard_state", self.shard_state)
        if self.shard_state and groups is not None:
            raise ValueError(
                "`shard_state=True` cannot be combined with `group_assignment`, because each group has its own state. "
                f"Received: group_assignment={self.group_assignment!r}. Remove one of the two."
            )
        self._check_objects()
        given = {
            "reduction": _REDUCTIONS[self.reduction],
            "gradient_accumulation_steps": num_steps,
            "replica_clipnorm": None if self.replica_clipnorm is None else float(self.replica_clipnorm),
            "group_assignment": groups,
            "extensions": tuple(self.extensions),
            "stages": tuple(self.stages),
            "compression": sends,
        }
        for name, value in given.items():
            object.__setattr__(self, name, value)
        for extension in self.extensions:
            extension.check(self)

    def _check_objects(self) -> None:
        if not isinstance(self.torch, (TorchSpeed, type(None))):
            raise TypeError(
                f"`torch` must be a `keras_shardopt.TorchSpeed` or None. Received: torch={self.torch!r}. "
                "Use for example `torch=TorchSpeed(fused=False)`."
            )
        if not isinstance(self.axis_name, str):
            raise TypeError(f"`axis_name` must be a str. Received: axis_name={self.axis_name!r}")
        if not isinstance(self.stages, (list, tuple)) or not all(isinstance(stage, Stage) for stage in self.stages):
            raise TypeError(
                "`stages` must be a list of `keras_shardopt.Stage` objects. "
                f"Received: stages={self.stages!r}. Use for example `stages=[MyStage()]`."
            )
        if len({id(stage) for stage in self.stages}) < len(self.stages):
            raise ValueError(f"`stages` must contain each stage once. Received: stages={list(self.stages)!r}")
        known = " or ".join(kind.__name__ for kind in KINDS if issubclass(kind, Extension))
        if not isinstance(self.extensions, (list, tuple)) or not all(isinstance(e, Extension) for e in self.extensions):
            raise TypeError(
                f"`extensions` must be a list of {known} objects. "
                f"Received: extensions={self.extensions!r}. Put the object into a list."
            )
        if len({type(extension) for extension in self.extensions}) < len(self.extensions):
            raise ValueError(
                f"`extensions` must contain at most one object of each class. "
                f"Received: extensions={list(self.extensions)!r}. Remove the duplicates."
            )

    @property
    def speed(self) -> TorchSpeed:
        """The argument `torch`, or its defaults."""
        return self.torch or TorchSpeed()

    @property
    def gives_slices(self) -> bool:
        """Whether `commit` and the optimizers inside receive only this replica's slices of gradients."""
        return self.shard_state and placement.state_sharding != "layout"

    @property
    def uses_local_gradients(self) -> bool:
        """Whether an argument or a stage uses each replica's gradients before the reduction."""
        has_option = self.replica_clipnorm is not None or self.replica_transform is not None
        return has_option or any(stage.needs_local_gradients for stage in self.stages)

    def needing_local_gradients(self) -> list[str]:
        """Return the arguments that need each replica's gradients, as `name=value`."""
        names = ["replica_clipnorm", "replica_transform", "compression"]
        names = ["group_assignment", *names] if len(self.group_assignment or ()) > 1 else names
        given = [f"{name}={getattr(self, name)!r}" for name in names if getattr(self, name) is not None]
        for name in ("extensions", "stages"):
            needing = [each for each in getattr(self, name) if each.needs_local_gradients]
            given += [f"{name}={needing!r}"] if needing else []
        return given

    def config(self) -> dict[str, Any]:
        """Return the serialized arguments, for files."""
        config = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        config["replica_transform"] = keras.saving.serialize_keras_object(self.replica_transform)
        config["group_assignment"] = self.group_assignment and [list(group) for group in self.group_assignment]
        for name in ("extensions", "stages"):
            config[name] = [keras.saving.serialize_keras_object(each) for each in getattr(self, name)]
        for name in ("compression", "torch"):
            if not isinstance(config[name], (str, type(None))):
                config[name] = keras.saving.serialize_keras_object(config[name])
        omitted: dict[str, Any] = {"extensions": [], "stages": [], "torch": None}  # earlier versions reject these
        return {name: value for name, value in config.items() if name not in omitted or value != omitted[name]}

    @staticmethod
    def from_config(config: dict[str, Any], custom_objects: dict[str, Any] | None, kind: type) -> dict[str, Any]:
        """Return the arguments of the class `kind` from a `config`, which may contain old arguments."""
        old = old_attributes()
        names = [name for name in ("replica_transform", "compression", "torch", *old) if name in config]
        found = {name: made(config[name], custom_objects) for name in names}
        for name in ("extensions", "stages"):
            found[name] = [made(each, custom_objects) for each in config.get(name, ())]
        given = {name: found.pop(name) for name in old if name in found}
        found |= with_objects(found["extensions"], found.get("torch"), given, warns=False)
        others = {name: value for name, value in config.items() if name not in old}
        return in_spelling_of(kind, {**others, **found})

    def shown(self) -> str:
        """Return `reduction` and the arguments that differ from their defaults, for `repr`."""
        given = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name == "reduction" or getattr(self, field.name) != field.default
        }
        words = {name: str(list(getattr(self, name))) for name in ("extensions", "stages")}
        return "".join(f", {name}={words.get(name, repr(value))}" for name, value in given.items())


def _option(name: str, doc: str) -> Any:
    def refuse(optimizer: HasOptions, value: Any) -> None:
        raise AttributeError(
            f"`{name}` of a `{type(optimizer).__name__}` cannot be changed. Received: {value!r}. Create a new one."
        )

    return property(lambda optimizer: getattr(optimizer._options, name), refuse, doc=doc)


class HasOptions:
    """The options of an optimizer as read-only attributes."""

    _options: CrossShardOptions
    reduction: str = _option("reduction", '"mean" or "sum".')
    group_assignment: list[list[int]] | None = _option("group_assignment", "Lists of replica ids, or None.")
    gradients: str = _option("gradients", "Whether gradients arrive reduced, as set by the constructor.")
    replica_clipnorm: float | None = _option("replica_clipnorm", "The largest norm of a replica's gradient, or None.")
    replica_transform: LocalTransform | None = _option("replica_transform", "Changes a replica's gradients, or None.")
    on_nonfinite: str = _option("on_nonfinite", '"ignore", "skip" or "raise".')
    shard_state: bool = _option("shard_state", "Whether replicas divide the optimizer state.")
    compression: Any = _option("compression", "The compression of gradients between replicas, or None.")
    torch: TorchSpeed | None = _option("torch", "The speed settings on PyTorch, or None for the defaults.")
    extensions: Sequence[Extension] = _option("extensions", "Objects for optional features, each with its arguments.")
    stages: Sequence[Stage] = _option("stages", "The user's stages, in their order.")
    axis_name: str = _option("axis_name", "The name of the mapped axis of replicas on JAX.")


def _old_option(name: str) -> Any:
    def value(optimizer: HasOptions) -> Any:
        return old_attributes((optimizer._options.speed, *optimizer._options.extensions))[name]

    return property(value, _option(name, "").fset, doc="A former argument, now set by an object such as `TorchSpeed`.")


def register_settings(kind: type[Settings]) -> None:
    """Register a class that replaces old arguments. Optimizers keep the old arguments as attributes."""
    KINDS.append(kind)
    for name in kind.old_arguments:
        setattr(HasOptions, name, _old_option(name))


register_settings(TorchSpeed)


def _one_of(name: str, value: Any, known: Any, rule: str) -> None:
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"`{name}` must be {rule}. Received: {name}={value!r}")


def group_assignment_of(groups: Any) -> list[list[int]] | None:
    """Return the groups as lists of ints, or None for None or an empty list.

    Raises:
        ValueError: unless `groups` is a list of equal-length lists that together contain each id 0, 1, ... once.
    """
    if groups is None or (isinstance(groups, (list, tuple)) and not groups):
        return None
    received = f"Received: group_assignment={groups!r}"
    if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
        raise ValueError(f"`group_assignment` must be a list of lists of replica ids. {received}")
    ids = [replica for group in groups for replica in group]
    for replica in ids:
        if not isinstance(replica, (int, float)) and not hasattr(replica, "__index__"):
            raise ValueError(f"`group_assignment` must contain integer replica ids. {received}, with {replica!r} in it")
    twice = sorted({replica for replica in ids if ids.count(replica) > 1})
    if twice:
        raise ValueError(f"`group_assignment` must contain every replica once. {received}, with {twice} more than once")
    if set(ids) != set(range(len(ids))):
        raise ValueError(
            f"`group_assignment` must contain every replica, from 0 to the number of replicas - 1. {received}, "
            f"with {len(ids)} replicas, but without {sorted(set(range(len(ids))) - set(ids))}"
        )
    if len({len(group) for group in groups}) > 1:
        raise ValueError(
            f"`group_assignment` must have groups of equal size. {received}, with sizes {[len(g) for g in groups]}"
        )
    return [[int(replica) for replica in group] for group in groups]


def check_groups(groups: Groups | None, replicas: Communicator) -> None:
    """Raise ValueError unless the groups contain every replica."""
    num_named = 0 if groups is None else sum(map(len, groups))
    if groups is not None and num_named != replicas.num_replicas:
        raise ValueError(
            "`group_assignment` must contain each replica of the program once. "
            f"Received: group_assignment={[list(g) for g in groups]}, with {num_named} replicas, but the program has "
            f"{replicas.num_replicas}. Omit `group_assignment` to average over all replicas."
        )
