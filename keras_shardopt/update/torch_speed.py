"""The speed settings of `CrossShard` on PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import keras

from keras_shardopt import arguments as check
from keras_shardopt.update.extension import Settings

if TYPE_CHECKING:
    from typing_extensions import Self


@keras.saving.register_keras_serializable(package="keras_shardopt")
class TorchSpeed(Settings):
    """Settings of `CrossShard(torch=...)`. Other backends ignore the settings.

    Args:
        fused: "auto" (default) or False. Whether to use fused kernels, which update in one pass over memory. Results
            differ from Keras' by rounding. [Speed on PyTorch](../torch_speed.md) lists the optimizers.
        overlap: "auto" (default) or False. Whether `fit` sends gradients during the backward pass.
        bucket_mib: float > 0, 25 by default. The bucket size in MiB: the amount of gradients sent at a time.

    Raises:
        TypeError: if `bucket_mib` is not a number.
        ValueError: if an argument has an invalid value.

    Example:
        >>> import keras, keras_shardopt as ks
        >>> ks.CrossShard(keras.optimizers.Adam(), torch=ks.TorchSpeed(fused=False)).fused
        False
    """

    old_arguments: ClassVar[Mapping[str, Any]] = {"fused": "auto", "overlap": "auto", "bucket_mib": 25.0}
    spelling = "torch={}"

    def __init__(
        self,
        fused: Literal["auto", False] = "auto",
        overlap: Literal["auto", False] = "auto",
        bucket_mib: float = 25.0,
    ) -> None:
        for name, value in (("fused", fused), ("overlap", overlap)):
            if value is not False and not (isinstance(value, str) and value == "auto"):
                raise ValueError(f'`{name}` must be "auto" or False. Received: {name}={value!r}')
        check.real("bucket_mib", bucket_mib, above=0, fix="The default is 25.")
        self.fused = fused
        self.overlap = overlap
        self.bucket_mib = float(bucket_mib)

    @classmethod
    def from_old(cls, arguments: Mapping[str, Any]) -> Self:
        return cls(**arguments)

    def to_old(self) -> dict[str, Any]:
        return dict(vars(self))
