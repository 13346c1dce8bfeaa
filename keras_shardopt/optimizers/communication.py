"""How many bytes the replicas of an optimizer send each other in an update."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np

from keras_shardopt.backends.traffic import Collective
from keras_shardopt.numerics import Variable, overwrites_variable
from keras_shardopt.update.extension import ExtensionStage
from keras_shardopt.update.pipeline import Pipeline


@dataclasses.dataclass(frozen=True)
class CommunicationReport:
    """What each replica sends in an update. `print` shows it in words.

    Counted where a framework's collectives are called, from the tensors that they are given, as if replicas formed a
    ring: a replica sends $2 (N - 1) / N$ of what is reduced to all, $(N - 1) / N$ of what is reduced in slices or
    exchanged, and $N - 1$ times what is gathered. What a trainer says about rows, losses and metrics is not counted.
    """

    collectives: list[Collective]
    """Those of the last update; where steps are compiled, those in the compiled step. PowerSGD: after the warm-up.

    With `LocalSGD`, once its warm-up is over, those of a round: of the last one, or of those in the compiled step.
    """

    float32_bytes: float
    """What the reduction of the same gradients sends, where they are float32 and sent as they are."""

    num_updates: int = 1
    """In how many updates these collectives come: with `LocalSGD` in those of a round."""

    @property
    def bytes_per_update(self) -> float:
        """How many bytes each replica sends, on average over these updates."""
        return sum(collective.bytes_sent for collective in self.collectives) / self.num_updates

    @property
    def ratio(self) -> float:
        """`bytes_per_update` in units of `float32_bytes`; 0 where nothing is sent."""
        return self.bytes_per_update / self.float32_bytes if self.float32_bytes else 0.0

    def __str__(self) -> str:
        lines = [f"{self.bytes_per_update:,.0f} bytes per replica and update, {self.ratio:.3f} of float32's"]
        if self.num_updates > 1:
            lines.append(f"  in a round of {self.num_updates} updates:")
        alike: dict[tuple[str, ...], list[Collective]] = collections.defaultdict(list)
        for each in self.collectives:
            alike[(each.kind, *each.dtypes)].append(each)
        for (kind, *dtypes), found in alike.items():
            sent = sum(each.bytes_sent for each in found)
            lines.append(f"  {len(found)} {kind} of {', '.join(dtypes)}: {sent:,.0f} bytes")
        return "\n".join(lines)


class ReportsCommunication:
    """Has a report of what the replicas of its last update have sent."""

    pipeline: Pipeline
    extension_stages: list[ExtensionStage]
    _trainable_variables: list[Variable]

    def communication_report(self) -> CommunicationReport:
        """What each replica sends in an update: the bytes, their ratio to those of float32, and the collectives.

        Nothing before the first update, with one replica, and where gradients come reduced (`fit` of a JAX model that
        is not prepared, or needs no local gradients; PyTorch's DDP). With `LocalSGD` it is the mean over the updates
        of a round; on PyTorch nothing between the warm-up and the first one.

        Returns:
            A `CommunicationReport`, to `print` or to read: `bytes_per_update`, `float32_bytes`, `ratio`, `collectives`,
            `num_updates`.

        Example:
            >>> import keras, keras_shardopt as ks
            >>> optimizer = ks.CrossShard(keras.optimizers.SGD(), compression="int8")
            >>> print(optimizer.communication_report())  # one replica sends nothing
            0 bytes per replica and update, 0.000 of float32's
        """
        found, num_updates = self.pipeline.collectives, 1
        for extension in self.extension_stages:
            found, number = extension.sent(found)
            num_updates *= number
        size = max((collective.num_replicas for collective in found), default=1)
        trained = [variable for variable in self._trainable_variables if not overwrites_variable(variable)]
        num_elements = sum(int(np.prod(variable.shape)) for variable in trained)
        return CommunicationReport(found, 8 * num_elements * (size - 1) / size, num_updates)
