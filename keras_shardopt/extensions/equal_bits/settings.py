"""The argument of bitwise equal results on any number of replicas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import keras

from keras_shardopt import arguments as check
from keras_shardopt.backends.active import placement
from keras_shardopt.extensions.equal_bits.stage import SumOfParts
from keras_shardopt.update.context import StageContext
from keras_shardopt.update.extension import Extension
from keras_shardopt.update.options import CrossShardOptions
from keras_shardopt.update.plugs import Place
from keras_shardopt.update.step import Stage
from keras_shardopt.wrapping.chain import descendants

if TYPE_CHECKING:
    from typing_extensions import Self


@keras.saving.register_keras_serializable(package="keras_shardopt")
class VirtualReplicas(Extension):
    """Bitwise equal results on any number of replicas that divides `number`.

    Args:
        number: a power of two. Each batch is cut into this number of parts, whose gradients are added up in one fixed
            order. See [equal bits](../randomness.md).

    Raises:
        TypeError: if it is not an int.
        ValueError: if it is not a power of two.

    Example:
        >>> import keras, keras_shardopt as ks
        >>> optimizer = ks.CrossShard(keras.optimizers.Adam(), extensions=[ks.VirtualReplicas(8)])
    """

    place = Place.OUTERMOST
    old_arguments: ClassVar[Mapping[str, Any]] = {"virtual_replicas": None}

    def __init__(self, number: int) -> None:
        self.number = check.integer("number", number, fix="It is the number of parts of each batch.")
        if self.number & (self.number - 1):
            raise ValueError(
                "`number` must be a power of two, as the parts are added up in a binary tree. "
                f"Received: number={number!r}. Use for example `VirtualReplicas({2 ** self.number.bit_length()})`."
            )

    @classmethod
    def from_old(cls, arguments: Mapping[str, Any]) -> Self:
        """See `Settings.from_old`."""
        return cls(arguments["virtual_replicas"])

    def to_old(self) -> dict[str, Any]:
        """See `Settings.to_old`."""
        return {"virtual_replicas": self.number}

    def check(self, options: CrossShardOptions) -> None:
        """See `Extension.check`."""
        seeing = [stage for stage in options.stages if stage.needs_local_gradients]
        accumulates = (options.gradient_accumulation_steps or 1) > 1
        others = {
            "group_assignment": options.group_assignment is not None,
            "compression": options.compression is not None,
            "gradients": options.gradients not in ("auto", "local"),
            "stages": bool(seeing),
            "gradient_accumulation_steps": accumulates and options.looks_at_own_gradients,
        }
        for name, is_given in others.items():
            if is_given:
                value = seeing if name == "stages" else getattr(options, name)
                why = "" if name != "gradient_accumulation_steps" else " with `replica_clipnorm` or a transform"
                raise ValueError(
                    "`VirtualReplicas` adds up the gradients of the parts of each batch by itself. "
                    f"Received: {self!r} and {name}={value!r}{why}. Leave one of them out."
                )

    def from_options(self, options: CrossShardOptions, context: StageContext) -> list[Stage]:
        """See `Extension.from_options`."""
        if options.shard_state and placement.state_sharding != "layout":
            for inside in descendants(context.optimizer):
                if getattr(inside, "_adds_up_slices", False):
                    raise ValueError(
                        "`VirtualReplicas` adds up in one order on any number of replicas, and where `shard_state` "
                        "divides state into slices, a norm over all gradients is added up slice by slice. "
                        f"Received: {inside!r}, with {self!r}, shard_state=True. Leave one of the three out."
                    )
        return [SumOfParts(self.number, context)]
