"""The arguments of `CrossShard`, checked.

Private names of Keras touched here (a test holds each of them):
    `Optimizer._exclude_from_weight_decay` - the keys of variables that do not decay, after `exclude_from_weight_decay`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import keras

from keras_shardopt import arguments as check
from keras_shardopt.backends.communicator import Communicator, GradientState
from keras_shardopt.numerics import Groups, Variable
from keras_shardopt.update.plugs import plug_of
from keras_shardopt.update.step import Stage
from keras_shardopt.wrapping.chain import Wrapping, get_optimizer, shown
from keras_shardopt.wrapping.stored_state import portable

LocalTransform = Callable[[list[Any], list[Variable]], Sequence[Any]]
"""`(grads, variables) -> grads`, for the gradients of one replica."""

# TF1's CrossShardOptimizer accepted the names of `tf.compat.v1.losses.Reduction`.
_REDUCTIONS = {"mean": "mean", "sum": "sum", "weighted_mean": "mean", "weighted_sum": "sum"}

_WARMUP_ROUNDS = 5
"""Default length of the synchronous warm-up with an outer optimizer, in units of `sync_every` updates."""

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
    fused: str | bool = "auto"
    overlap: str | bool = "auto"
    bucket_mib: float = 25.0
    group_assignment: Sequence[Sequence[int]] | None = None
    replica_clipnorm: float | None = None
    replica_transform: LocalTransform | None = None
    compression: Any = None
    virtual_replicas: int | None = None
    sync_every: int | Callable[[Any], Any] | None = None
    outer_optimizer: Any = None
    sync_fragments: int = 1
    sync_warmup: int | None = None
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
        for name in ("fused", "overlap"):
            if getattr(self, name) is not False:
                _one_of(name, getattr(self, name), ("auto",), '"auto" or False')
        check.real("bucket_mib", self.bucket_mib, above=0, fix="The default is 25.")
        if not isinstance(self.axis_name, str):
            raise TypeError(f"`axis_name` must be a str. Received: axis_name={self.axis_name!r}")
        if self.replica_clipnorm is not None:
            fix = "Leave it out to not clip."
            check.real("replica_clipnorm", self.replica_clipnorm, above=0, finite=False, fix=fix)
        if self.replica_transform is not None and not callable(self.replica_transform):
            raise TypeError(
                "`replica_transform` must be a function `(grads, variables) -> grads`, or None. "
                f"Received: replica_transform={self.replica_transform!r}"
            )
        groups = group_assignment_of(self.group_assignment)
        num_steps = self.gradient_accumulation_steps
        if num_steps is not None:
            fix = "Leave it out to not accumulate."
            num_steps = check.integer("gradient_accumulation_steps", num_steps, fix=fix)
        check.flag("shard_state", self.shard_state)
        num_virtual = check_virtual_replicas(self, groups)
        if self.shard_state and groups is not None:
            raise ValueError(
                "`shard_state=True` divides one state, and with `group_assignment` each group has its own. "
                f"Received: group_assignment={self.group_assignment!r}. Leave one of them out."
            )
        if not isinstance(self.stages, (list, tuple)) or not all(isinstance(stage, Stage) for stage in self.stages):
            raise TypeError(
                "`stages` must be a list of `keras_shardopt.Stage` objects. "
                f"Received: stages={self.stages!r}. Use for example `stages=[MyStage()]`."
            )
        if len({id(stage) for stage in self.stages}) < len(self.stages):
            raise ValueError(f"`stages` must hold each stage once. Received: stages={list(self.stages)!r}")
        if self.sync_every is not None:
            self._check_rounds()
        elif self.outer_optimizer is not None or self.sync_fragments != 1 or self.sync_warmup is not None:
            named = ("outer_optimizer", "sync_fragments", "sync_warmup")
            more = [f"{name}={getattr(self, name)!r}" for name in named if getattr(self, name) not in (None, 1)]
            raise ValueError(
                "`outer_optimizer`, `sync_fragments` and `sync_warmup` are about replicas that train apart. "
                f"Received: {', '.join(more)} without `sync_every`. Use for example `sync_every=50` with them."
            )
        given = {
            "reduction": _REDUCTIONS[self.reduction],
            "gradient_accumulation_steps": num_steps,
            "bucket_mib": float(self.bucket_mib),
            "replica_clipnorm": None if self.replica_clipnorm is None else float(self.replica_clipnorm),
            "group_assignment": groups,
            "virtual_replicas": num_virtual,
            "stages": tuple(self.stages),
            "compression": sends,
        }
        for name, value in given.items():
            object.__setattr__(self, name, value)

    def _check_rounds(self) -> None:
        """Check the arguments of local SGD, and create the outer optimizer from its name or config."""
        fix = "Give it in updates, or a function of the number of updates so far."
        if not callable(self.sync_every):
            object.__setattr__(self, "sync_every", check.integer("sync_every", self.sync_every, fix=fix))
        check.integer("sync_fragments", self.sync_fragments, fix="Leave it out for one round of all variables.")
        if self.sync_warmup is not None:
            check.integer("sync_warmup", self.sync_warmup, at_least=0, fix="Give it in updates.")
        if isinstance(self.sync_every, int) and self.sync_fragments > self.sync_every:
            raise ValueError(
                "`sync_fragments` must be at most `sync_every`, so that their rounds come one after the other. "
                f"Received: sync_fragments={self.sync_fragments}, sync_every={self.sync_every}."
            )
        others = {
            "`shard_state=True`": self.shard_state,
            "`group_assignment`": self.group_assignment,
            "`virtual_replicas`": self.virtual_replicas,
            '`reduction="sum"`': _REDUCTIONS[self.reduction] == "sum",
            '`on_nonfinite="raise"`': self.on_nonfinite == "raise",
            f"`gradients={self.gradients!r}`": self.gradients in ("summed", "global"),
        }
        for name, is_given in others.items():
            if is_given:
                raise ValueError(
                    "With `sync_every` each replica updates all weights with its own gradients, and takes part in the "
                    f"mean of the weights. Received: {name}. Leave one of them out."
                    + (' Use `on_nonfinite="skip"`.' if "nonfinite" in name else "")
                )
        if self.outer_optimizer is None:
            return
        outer = get_optimizer(self.outer_optimizer, "CrossShard", "outer_optimizer")
        wraps = isinstance(outer, (Wrapping, keras.optimizers.LossScaleOptimizer)) or hasattr(outer, "optimizers")
        if wraps or outer.gradient_accumulation_steps or outer.built:
            raise ValueError(
                "`outer_optimizer` must be a new optimizer of Keras without accumulation, which no other is around. "
                f"Received: outer_optimizer={shown(outer)}. "
                "Use for example `keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)`."
            )
        ignored = [name for name in ("use_ema", "loss_scale_factor") if getattr(outer, name)]
        if hasattr(outer, "_exclude_from_weight_decay"):
            ignored.append("exclude_from_weight_decay")
        if ignored:
            raise ValueError(
                "`outer_optimizer` moves the weights at rounds, and has no part in losses, in what `fit` does when it "
                f"ends, or in the names of weights. Received: outer_optimizer={shown(outer)} with `{ignored[0]}`. "
                "Leave it out, or give it to the inner optimizer."
            )
        object.__setattr__(self, "outer_optimizer", outer)

    @property
    def updates_per_round(self) -> Callable[[Any], Any]:
        """Function of the number of updates so far (int or tensor): the local updates until the next sync."""
        every = self.sync_every
        return every if callable(every) else lambda count: every

    @property
    def warmup_steps(self) -> int:
        """The number of initial synchronous updates of local SGD."""
        if self.sync_warmup is not None:
            return self.sync_warmup
        return 0 if self.outer_optimizer is None else _WARMUP_ROUNDS * int(self.updates_per_round(0))

    @property
    def looks_at_own_gradients(self) -> bool:
        """Whether an argument or a stage uses each replica's gradients before the reduction."""
        asked = self.replica_clipnorm is not None or self.replica_transform is not None
        return asked or any(stage.needs_local_gradients for stage in self.stages)

    @property
    def is_plain(self) -> bool:
        """Whether nothing processes a replica's gradients between backward pass and reduction."""
        others = (self.group_assignment, self.virtual_replicas, self.sync_every)
        looks = any(stage._overrides("collect", "local") for stage in self.stages)
        return all(value is None for value in others) and not self.looks_at_own_gradients and not looks

    def needing_local_gradients(self) -> list[str]:
        """Return the arguments that need each replica's gradients, as `name=value`."""
        names = ["sync_every", "replica_clipnorm", "replica_transform", "compression"]
        names = ["group_assignment", *names] if len(self.group_assignment or ()) > 1 else names
        given = [f"{name}={getattr(self, name)!r}" for name in names if getattr(self, name) is not None]
        needing = [stage for stage in self.stages if stage.needs_local_gradients]
        return [*given, *([f"stages={needing!r}"] if needing else [])]

    def config(self) -> dict[str, Any]:
        """Return the serialized arguments, for files."""
        config = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        config["replica_transform"] = keras.saving.serialize_keras_object(self.replica_transform)
        config["group_assignment"] = self.group_assignment and [list(group) for group in self.group_assignment]
        config["stages"] = [keras.saving.serialize_keras_object(stage) for stage in self.stages]
        if not isinstance(self.compression, (str, type(None))):
            config["compression"] = keras.saving.serialize_keras_object(self.compression)
        config["sync_every"] = keras.saving.serialize_keras_object(self.sync_every)
        config["outer_optimizer"] = portable(keras.saving.serialize_keras_object(self.outer_optimizer))
        later: dict[str, Any] = {
            "stages": [],
            "virtual_replicas": None,
            "sync_every": None,
            "outer_optimizer": None,
            "sync_fragments": 1,
            "sync_warmup": None,
        }
        return {name: value for name, value in config.items() if name not in later or value != later[name]}

    @staticmethod
    def from_config(config: dict[str, Any], custom_objects: dict[str, Any] | None) -> dict[str, Any]:
        """Return the arguments from a `config`, with functions and stages deserialized."""

        def made(value: Any) -> Any:
            if not isinstance(value, dict):
                return value
            return keras.saving.deserialize_keras_object(value, custom_objects=custom_objects)

        functions = ("replica_transform", "compression", "sync_every", "outer_optimizer")
        found = {name: made(portable(config.get(name))) for name in functions}
        return {**config, **found, "stages": [made(stage) for stage in config.get("stages", ())]}

    def shown(self) -> str:
        """Return `reduction` and the arguments that differ from their defaults, for `repr`."""
        given = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name == "reduction" or getattr(self, field.name) != field.default
        }
        words = {"bucket_mib": format(self.bucket_mib, "g"), "stages": str(list(self.stages))}
        words["outer_optimizer"] = shown(self.outer_optimizer)
        return "".join(f", {name}={words.get(name, repr(value))}" for name, value in given.items())


def _option(name: str, doc: str) -> Any:
    def refuse(optimizer: Any, value: Any) -> None:
        raise AttributeError(
            f"`{name}` of a `{type(optimizer).__name__}` cannot be changed. Received: {value!r}. Make a new one."
        )

    return property(lambda optimizer: getattr(optimizer._options, name), refuse, doc=doc)


class HasOptions:
    """The options of an optimizer as read-only attributes."""

    _options: CrossShardOptions
    reduction: str = _option("reduction", '"mean" or "sum".')
    group_assignment: list[list[int]] | None = _option("group_assignment", "Lists of replica ids, or None.")
    gradients: str = _option("gradients", "How gradients arrive, as was told.")
    replica_clipnorm: float | None = _option("replica_clipnorm", "The largest norm of a replica's gradient, or None.")
    replica_transform: LocalTransform | None = _option(
        "replica_transform", "What is done to a replica's own gradients, or None."
    )
    on_nonfinite: str = _option("on_nonfinite", '"ignore", "skip" or "raise".')
    shard_state: bool = _option("shard_state", "Whether the optimizer state is divided.")
    sync_every: Any = _option("sync_every", "How many updates a round takes, a function, or None.")
    outer_optimizer: Any = _option("outer_optimizer", "What moves the weights at rounds, or None.")
    sync_fragments: int = _option("sync_fragments", "In how many parts weights are joined.")
    sync_warmup: int | None = _option("sync_warmup", "How many updates come before the first round, or None.")
    compression: Any = _option("compression", "How gradients are sent, or None for as they are.")
    fused: Literal["auto", False] = _option("fused", '"auto" or False.')
    overlap: Literal["auto", False] = _option("overlap", '"auto" or False.')
    virtual_replicas: int | None = _option("virtual_replicas", "Into how many parts each batch is cut, or None.")
    stages: Sequence[Stage] = _option("stages", "Further stages, in their order.")
    bucket_mib: float = _option("bucket_mib", "How many MiB of gradients are sent at a time.")
    axis_name: str = _option("axis_name", "The mapped axis of replicas on JAX.")


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
            raise ValueError(
                f"`group_assignment` must hold replica ids, which are ints. {received}, with {replica!r} in it"
            )
    twice = sorted({replica for replica in ids if ids.count(replica) > 1})
    if twice:
        raise ValueError(
            f"`group_assignment` must name every replica once. {received}, in which {twice} stand more than once"
        )
    if set(ids) != set(range(len(ids))):
        raise ValueError(
            f"`group_assignment` must name every replica, from 0 to the number of replicas - 1. {received}, "
            f"which names {len(ids)} replicas, but not {sorted(set(range(len(ids))) - set(ids))}"
        )
    if len({len(group) for group in groups}) > 1:
        raise ValueError(
            f"`group_assignment` must have groups of one size. {received}, with sizes {[len(g) for g in groups]}"
        )
    return [[int(replica) for replica in group] for group in groups]


def check_virtual_replicas(options: CrossShardOptions, groups: Groups | None) -> int | None:
    """Return the number of virtual replicas, or None.

    Raises:
        ValueError: unless it is a power of two, or if another argument needs more than the sum over the parts.
    """
    if options.virtual_replicas is None:
        return None
    fix = "Leave it out for one part on each replica."
    number = check.integer("virtual_replicas", options.virtual_replicas, fix=fix)
    if number & (number - 1):
        raise ValueError(
            "`virtual_replicas` must be a power of two, as the parts are added up in a binary tree. "
            f"Received: virtual_replicas={number!r}. Use for example `virtual_replicas={2 ** number.bit_length()}`."
        )
    seeing = [stage for stage in options.stages if stage.needs_local_gradients]
    accumulates = (options.gradient_accumulation_steps or 1) > 1
    others = {
        "group_assignment": groups is not None,
        "compression": options.compression is not None,
        "gradients": options.gradients not in ("auto", "local"),
        "stages": bool(seeing),
        "gradient_accumulation_steps": accumulates and options.looks_at_own_gradients,
    }
    for name, is_given in others.items():
        if is_given:
            value = seeing if name == "stages" else getattr(options, name)
            why = "" if name != "gradient_accumulation_steps" else " together with `replica_clipnorm` or a transform"
            raise ValueError(
                "`virtual_replicas` adds up the gradients of the parts of each batch by itself. "
                f"Received: virtual_replicas={number!r} and {name}={value!r}{why}. Leave one of them out."
            )
    return number


def check_groups(groups: Groups | None, replicas: Communicator) -> None:
    """Raise ValueError unless the groups contain every replica."""
    num_named = 0 if groups is None else sum(map(len, groups))
    if groups is not None and num_named != replicas.num_replicas:
        raise ValueError(
            "`group_assignment` must name each replica of the program once. "
            f"Received: group_assignment={[list(g) for g in groups]}, with {num_named} replicas, where there are "
            f"{replicas.num_replicas}. Leave `group_assignment` out to average over all of them."
        )
