"""The `VirtualReplicas` extension and its argument."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import keras

from keras_shardopt import arguments as check
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
    """Makes results bitwise identical on any number of replicas that divides `number`.

    See [reproducibility](../randomness.md).

    Args:
        number: int, a power of two. Number of parts of each batch. Their gradients are summed in a fixed order.

    Raises:
        TypeError: if `number` is not an int.
        ValueError: if `number` is not a power of two.

    Example:
        >>> import keras, keras_shardopt as ks
        >>> optimizer = ks.CrossShard(keras.optimizers.Adam(), extensions=[ks.VirtualReplicas(8)])
    """

    place = Place.OUTERMOST
    old_arguments: ClassVar[Mapping[str, Any]] = {"virtual_replicas": None}

    def __init__(self, number: int) -> None:
        self.number = check.integer("number", number, fix="Pass the number of parts of each batch.")
        if self.number & (self.number - 1):
            raise ValueError(
                "`number` must be a power of two, because the parts are summed in a binary tree. "
                f"Received: number={number!r}. Use for example `VirtualReplicas({2 ** self.number.bit_length()})`."
            )

    @classmethod
    def from_old(cls, arguments: Mapping[str, Any]) -> Self:
        """Create the extension from the former argument `virtual_replicas` of `CrossShard`."""
        return cls(arguments["virtual_replicas"])

    def to_old(self) -> dict[str, Any]:
        """Return the former argument of `CrossShard`, so the optimizer still has it as an attribute."""
        return {"virtual_replicas": self.number}

    def check(self, options: CrossShardOptions) -> None:
        """Raise ValueError if other arguments of `CrossShard` prevent equal results on any number of replicas."""
        local_stages = [stage for stage in options.stages if stage.needs_local_gradients]
        accumulates = (options.gradient_accumulation_steps or 1) > 1
        others = {
            "group_assignment": options.group_assignment is not None,
            "compression": options.compression is not None,
            "gradients": options.gradients not in ("auto", "local"),
            "stages": bool(local_stages),
            "gradient_accumulation_steps": accumulates and options.uses_local_gradients,
        }
        for name, is_given in others.items():
            if is_given:
                value = local_stages if name == "stages" else getattr(options, name)
                why = "" if name != "gradient_accumulation_steps" else " with `replica_clipnorm` or a transform"
                raise ValueError(
                    f"`VirtualReplicas` sums gradients in its own order, and does not support `{name}`{why}. Received: "
                    f"{self!r} and {name}={value!r}. Remove one of the two."
                )

    def from_options(self, options: CrossShardOptions, context: StageContext) -> list[Stage]:
        """Return the stage that sums gradients. Raise ValueError if a wrapper needs a norm of sharded gradients."""
        if options.gives_slices:
            for inside in descendants(context.optimizer):
                if getattr(inside, "_sums_over_slices", False):
                    raise ValueError(
                        "`VirtualReplicas` does not support a norm over all gradients with `shard_state=True`, because "
                        f"the rounding of the norm would depend on the number of replicas. Received: {inside!r}, with "
                        f"{self!r} and shard_state=True. Remove one of the three."
                    )
        return [SumOfParts(self.number, context)]
