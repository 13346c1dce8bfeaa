"""`CommunicationReport`: the bytes that replicas send per update."""

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
    """Bytes that each replica sends per update. `print` shows them as text.

    Bytes are computed from the tensors' shapes and dtypes at each collective call, for the ring algorithm: a
    replica sends $2 (N - 1) / N$ of the bytes of an all-reduce, $(N - 1) / N$ of a reduce-scatter or all-to-all, and
    $N - 1$ times those of an all-gather. A trainer's exchange of rows, losses and metrics is not counted.
    """

    collectives: list[Collective]
    """The collective calls of the last update, or those in the compiled step. With `PowerSGD`, calls after its warm-up.

    With `LocalSGD`, the calls of the last step that averages weights (a sync step), after the warm-up.
    """

    float32_bytes: float
    """The bytes that a replica would send if it reduced the same gradients uncompressed, in float32."""

    num_updates: int = 1
    """The number of updates that send `collectives` together: with `LocalSGD`, the updates per sync step."""

    @property
    def bytes_per_update(self) -> float:
        """Bytes that each replica sends per update, on average."""
        return sum(collective.bytes_sent for collective in self.collectives) / self.num_updates

    @property
    def ratio(self) -> float:
        """`bytes_per_update` divided by `float32_bytes`; 0 without communication."""
        return self.bytes_per_update / self.float32_bytes if self.float32_bytes else 0.0

    def __str__(self) -> str:
        lines = [f"{self.bytes_per_update:,.0f} bytes per replica and update, {self.ratio:.3f} of the bytes in float32"]
        if self.num_updates > 1:
            lines.append(f"  per {self.num_updates} updates (one sync step):")
        grouped: dict[tuple[str, ...], list[Collective]] = collections.defaultdict(list)
        for each in self.collectives:
            grouped[(each.kind, *each.dtypes)].append(each)
        for (kind, *dtypes), found in grouped.items():
            sent = sum(each.bytes_sent for each in found)
            lines.append(f"  {len(found)} {kind} of {', '.join(dtypes)}: {sent:,.0f} bytes")
        return "\n".join(lines)


class ReportsCommunication:
    """Reports the communication of an optimizer's last update."""

    pipeline: Pipeline
    extension_stages: list[ExtensionStage]
    _trainable_variables: list[Variable]

    def communication_report(self) -> CommunicationReport:
        """Reports the bytes that each replica sends per update, their ratio to float32, and the collectives.

        The report is empty before the first update, with one replica, and if the optimizer receives reduced gradients:
        under PyTorch's DDP, and in `fit` on JAX without `prepare(model)` or without options for each replica's own
        gradients. With `LocalSGD`, the report is the mean over the updates from one average of weights to the next. On
        PyTorch, it is empty between the warm-up of `LocalSGD` and the first average.

        Returns:
            A `CommunicationReport` with `bytes_per_update`, `float32_bytes`, `ratio`, `collectives`, `num_updates`.

        Example:
            >>> import keras, keras_shardopt as ks
            >>> optimizer = ks.CrossShard(keras.optimizers.SGD(), compression="int8")
            >>> print(optimizer.communication_report())  # one replica sends nothing
            0 bytes per replica and update, 0.000 of the bytes in float32
        """
        found, num_updates = self.pipeline.collectives, 1
        for extension in self.extension_stages:
            found, number = extension.sent(found)
            num_updates *= number
        size = max((collective.num_replicas for collective in found), default=1)
        trained = [variable for variable in self._trainable_variables if not overwrites_variable(variable)]
        num_elements = sum(int(np.prod(variable.shape)) for variable in trained)
        return CommunicationReport(found, 8 * num_elements * (size - 1) / size, num_updates)
