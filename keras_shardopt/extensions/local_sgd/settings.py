"""The arguments of local SGD.

Private names of Keras touched here (a test checks that each exists):
    `Optimizer._exclude_from_weight_decay` - the keys of variables passed to `exclude_from_weight_decay`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import keras

from keras_shardopt import arguments as check
from keras_shardopt.extensions.local_sgd.stage import LocalUpdates
from keras_shardopt.update.context import StageContext
from keras_shardopt.update.extension import Extension
from keras_shardopt.update.options import CrossShardOptions
from keras_shardopt.update.plugs import Place
from keras_shardopt.update.step import Stage
from keras_shardopt.wrapping.chain import Wrapping, get_optimizer, shown

if TYPE_CHECKING:
    from typing_extensions import Self

_WARMUP_SYNCS = 5
"""With an outer optimizer, the default `warmup` is this number times `every`."""


@keras.saving.register_keras_serializable(package="keras_shardopt")
class LocalSGD(Extension):
    """Replicas update with their own gradients, and average their weights periodically.

    See [local SGD](../local_sgd.md).

    Args:
        every: int >= 1, or a function of the number of updates so far. Number of updates between averages of weights
            (called sync steps).
        outer_optimizer: a Keras optimizer, its name or config, or None (default). In sync steps, it updates the weights
            of the last sync step, with the mean change over replicas as gradient (DiLoCo). Usually
            `SGD(0.7, momentum=0.9, nesterov=True)`.
        fragments: int >= 1. Number of weight groups with separate sync steps, spread over `every`. Default 1.
        warmup: int >= 0 or None. Number of initial synchronous updates. Default: `5 * every` with an
            `outer_optimizer`, otherwise 0.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if a number is too small, `fragments` is larger than `every`, or `outer_optimizer` wraps another
            optimizer, was used before, or has settings without effect in sync steps.

    Example:
        >>> import keras, keras_shardopt as ks
        >>> outer = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
        >>> local_sgd = ks.LocalSGD(every=50, outer_optimizer=outer)
        >>> optimizer = ks.CrossShard(keras.optimizers.AdamW(), extensions=[local_sgd])

    References:
        Stich, "Local SGD Converges Fast and Communicates Little", 2019; Douillard et al., "DiLoCo", 2023.
    """

    place = Place.WINDOW
    needs_local_gradients = True
    old_arguments: ClassVar[Mapping[str, Any]] = {
        "sync_every": None,
        "outer_optimizer": None,
        "sync_fragments": 1,
        "sync_warmup": None,
    }

    def __init__(
        self,
        every: int | Callable[[Any], Any],
        outer_optimizer: Any = None,
        fragments: int = 1,
        warmup: int | None = None,
    ) -> None:
        fix = "Pass a number of updates, or a function of the number of updates so far."
        self.every = every if callable(every) else check.integer("every", every, fix=fix)
        self.fragments = check.integer("fragments", fragments, fix="Omit `fragments` to average all weights together.")
        if warmup is not None:
            check.integer("warmup", warmup, at_least=0, fix="Pass a number of updates.")
        self.warmup = warmup
        if isinstance(self.every, int) and self.fragments > self.every:
            raise ValueError(
                "`fragments` must be at most `every`: all fragments of the weights are averaged in turn within `every` "
                "updates, at most one in each. "
                f"Received: fragments={fragments}, every={self.every}."
            )
        self.outer_optimizer = None if outer_optimizer is None else _checked(outer_optimizer)

    @classmethod
    def from_old(cls, arguments: Mapping[str, Any]) -> Self:
        """Create the extension from former arguments of `CrossShard`, such as `sync_every`."""
        if "sync_every" not in arguments:
            more = [f"{name}={value!r}" for name, value in arguments.items()]
            raise ValueError(
                "`outer_optimizer`, `sync_fragments` and `sync_warmup` require `sync_every`. "
                f"Received: {', '.join(more)} without `sync_every`. Use for example "
                "`extensions=[LocalSGD(every=50, outer_optimizer=...)]`."
            )
        return cls(**{cls._new_name(name): value for name, value in arguments.items()})

    def to_old(self) -> dict[str, Any]:
        """Return the former arguments of `CrossShard`, so the optimizer still has these as attributes."""
        return {name: getattr(self, self._new_name(name)) for name in self.old_arguments}

    @staticmethod
    def _new_name(old: str) -> str:
        return old.removeprefix("sync_")

    def check(self, options: CrossShardOptions) -> None:
        """Raise ValueError if other arguments of `CrossShard` contradict local updates."""
        if self.outer_optimizer is not None:
            _checked(self.outer_optimizer)  # check again, because another `CrossShard` may use it by now
        others = {
            "`shard_state=True`": options.shard_state,
            "`group_assignment`": options.group_assignment,
            "another extension": len(options.extensions) > 1,
            '`reduction="sum"`': options.reduction == "sum",
            '`on_nonfinite="raise"`': options.on_nonfinite == "raise",
            f"`gradients={options.gradients!r}`": options.gradients in ("summed", "global"),
        }
        for name, is_given in others.items():
            if is_given:
                raise ValueError(
                    "`LocalSGD` updates all weights with each replica's own gradients, and averages weights over all "
                    f"replicas. Received: `LocalSGD` with {name}. Remove one of the two."
                    + (' Use `on_nonfinite="skip"`.' if "nonfinite" in name else "")
                )

    def from_options(self, options: CrossShardOptions, context: StageContext) -> list[Stage]:
        """Return the object that updates with each replica's own gradients, and averages weights periodically."""
        return [LocalUpdates(self, options, context)]

    @property
    def updates_per_sync(self) -> Callable[[Any], Any]:
        """A function that takes the number of updates so far, and returns the number until the next average."""
        every = self.every
        return every if callable(every) else lambda count: every

    @property
    def warmup_steps(self) -> int:
        """The number of initial updates with gradients averaged over replicas (the warm-up)."""
        if self.warmup is not None:
            return self.warmup
        return 0 if self.outer_optimizer is None else _WARMUP_SYNCS * int(self.updates_per_sync(0))


def _checked(outer_optimizer: Any) -> Any:
    """Create an outer optimizer from its name or config. Raise ValueError if `LocalSGD` does not support it."""
    outer = get_optimizer(outer_optimizer, "LocalSGD", "outer_optimizer")
    wraps = isinstance(outer, (Wrapping, keras.optimizers.LossScaleOptimizer)) or hasattr(outer, "optimizers")
    if wraps or outer.gradient_accumulation_steps or outer.built:
        raise ValueError(
            "`outer_optimizer` must be a new Keras optimizer without accumulation and without wrappers. Received: "
            f"outer_optimizer={shown(outer)}. Use for example `keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)`."
        )
    ignored = [name for name in ("use_ema", "loss_scale_factor") if getattr(outer, name)]
    if hasattr(outer, "_exclude_from_weight_decay"):
        ignored.append("exclude_from_weight_decay")
    if ignored:
        raise ValueError(
            f"`outer_optimizer` updates only the averaged weights, and ignores `{ignored[0]}`. Received: "
            f"outer_optimizer={shown(outer)}. Remove this setting, or set it on the inner optimizer."
        )
    return outer
