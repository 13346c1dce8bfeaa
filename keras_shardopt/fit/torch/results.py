"""Results of all ranks (processes): metrics, other logs, and predictions.

Private names of Keras touched here (a test checks that each exists):
    `keras.src.utils.python_utils.pythonify_logs` - converts logs to Python numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import keras
import torch
from keras.src.utils.python_utils import pythonify_logs

from keras_shardopt.backends.torch.communicator import TorchProcessGroup, _bytes
from keras_shardopt.fit.torch.shared_batches import Phase, SharedBatches, exchange


@torch.no_grad()
def metrics_of_all(model: Any, ranks: TorchProcessGroup, result: Callable[[], Any]) -> Any:
    """Aggregate metric variables over ranks, return `result()`, and restore this rank's values of the variables."""
    mine = [v.value for v in model.metrics_variables]
    before = [tensor.clone() for tensor in mine]
    for op in ("sum", "mean"):
        chosen = [v.value for v in model.metrics_variables if v.aggregation == op]
        for tensor, value in zip(chosen, ranks.all_reduce(chosen, op)):
            tensor.copy_(value)
    found = result()
    for tensor, value in zip(mine, before):
        tensor.copy_(value)
    return found


def metric_logs(model: Any, ranks: TorchProcessGroup) -> dict[str, Any]:
    """Return the metrics of all ranks as Python numbers."""
    found: dict[str, Any] = metrics_of_all(model, ranks, lambda: pythonify_logs(model.get_metrics_result()))
    return found


def mean_logs(model: Any, ranks: TorchProcessGroup, logs: Any, num_rows: int) -> Any:
    """Return logs that are not metrics, averaged over ranks. A rank's weight is `num_rows`, its rows in the batch."""
    if not isinstance(logs, dict):
        return logs
    floats = {name: value for name, value in pythonify_logs(logs).items() if isinstance(value, float)}
    # A rank without rows may have NaN, so send 0.
    mine = [float(num_rows), *[value * num_rows if num_rows else 0.0 for value in floats.values()]]
    device = model.trainable_variables[0].value.device
    (sums,) = ranks.all_reduce([torch.tensor(mine, dtype=torch.float64, device=device)], "sum")
    rows, *totals = sums.tolist()
    return {**logs, **{name: total / rows for name, total in zip(floats, totals)}} if rows else logs


@torch.compiler.disable
@torch.no_grad()
def rows_of_all(ranks: TorchProcessGroup, outputs: Any, batches: SharedBatches) -> Any:
    """End the step of a batch. Gather the outputs of all ranks for it, in the order of its rows."""
    rows = batches.rows()
    batches.end_step()
    mine = rows[ranks.replica_id]
    num_run = max(mine, 1)  # a rank without rows has run the model on one row
    tensors = [keras.ops.convert_to_tensor(leaf).detach() for leaf in keras.tree.flatten(outputs)]
    # An output may have several rows per row of the batch.
    factors = [t.shape[0] // num_run if t.dim() and not t.shape[0] % num_run else 0 for t in tensors]
    kinds = [(tuple(t.shape[1:]), t.dtype, factor) for t, factor in zip(tensors, factors)]
    messages = exchange(Phase.PREDICTED, int(all(factors)), zlib.crc32(repr(kinds).encode()))
    if any(each != [1, messages[0][1]] for each in messages):
        raise ValueError(
            "The outputs of `predict_step` must have as many rows as the batch, so that ranks can gather the "
            f"outputs. Received: {num_run} rows, and outputs of shapes {[tuple(t.shape) for t in tensors]}. Use "
            "`keras_shardopt.prepare(model, gather=False)`. Each rank then predicts its rows alone."
        )
    # Send all tensors as bytes, because dtypes can differ. Pad each to the row count of the rank with most rows.
    sizes = [t[:1].numel() * t.element_size() * factor for t, factor in zip(tensors, factors)]
    parts = []
    for tensor, factor, size in zip(tensors, factors, sizes):
        part = _bytes(tensor[: mine * factor])
        parts.append(torch.nn.functional.pad(part, (0, size * max(rows) - part.numel())))
    (everyones,) = ranks.all_gather([torch.cat(parts)])
    columns = everyones.view(len(rows), -1).split([size * max(rows) for size in sizes], dim=1)
    found = []
    for tensor, size, column in zip(tensors, sizes, columns):
        joined = torch.cat([part[: size * num] for part, num in zip(column, rows)])
        found.append(joined.view(tensor.dtype).view(-1, *tensor.shape[1:]))
    return keras.tree.pack_sequence_as(outputs, found)
