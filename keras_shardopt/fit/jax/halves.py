"""The two halves of Keras's training step: the forward and backward pass, and the metrics of their outputs.

Private names of Keras touched here (a test checks that each exists):
    `Model.compute_loss_and_updates` - forward pass and loss of the trainer's step.
    `keras.src.backend.common.masking.get_keras_mask`, `set_keras_mask` - the mask of a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask


def gradients_of_rows(
    model: Any, weights: Any, others: Any, metrics: Any, optimizer_variables: Any, data: Any
) -> tuple[Any, ...]:
    """Run the forward and backward pass on the rows `data`. `others` has the values of non-trainable variables.

    Returns:
        The gradients; the loss; the predictions and their masks (separate, because JAX drops the masks of arrays); and
        the values of the non-trainable variables, None if unchanged.
    """

    def with_masks_of(*args: Any, **kwargs: Any) -> Any:
        scaled, (loss, y_pred, *changed) = model.compute_loss_and_updates(*args, **kwargs)
        return scaled, (loss, (y_pred, [get_keras_mask(leaf) for leaf in jax.tree.leaves(y_pred)]), *changed)

    (_, (loss, outputs, changed, _)), grads = jax.value_and_grad(with_masks_of, has_aux=True)(
        weights, others, metrics, *data, training=True, optimizer_variables=optimizer_variables
    )
    return grads, loss, outputs, [None if new is old else new for old, new in zip(others, changed)]


def metrics_of_losses(model: Any, variables: Sequence[Any], outputs: Any, data: Any) -> Any:
    """Return the values of metric variables, updated with the losses of all rows as one batch.

    `variables` has the values of the trainable, non-trainable and metric variables. `outputs` has the predictions and
    their masks.
    """
    (y_pred, masks), (x, y, sample_weight) = outputs, data
    y_pred = with_masks(jax.tree.map(jax.numpy.copy, y_pred), masks)  # on copies, so the caller's arrays get no masks
    _, (_, _, metrics) = model.stateless_compute_loss(
        *variables, x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True
    )
    return metrics


def with_masks(y_pred: Any, masks: Any) -> Any:
    """Attach Keras masks (one or None per array) to predictions, and return the predictions."""
    for leaf, mask in zip(jax.tree.leaves(y_pred), masks):
        if mask is not None:
            set_keras_mask(leaf, mask)
    return y_pred


def on_every_device(values: Any, distribution: Any) -> Any:
    """Copy values to all devices. Metrics then sum the values in the same order on any number of devices."""
    if distribution is None:
        return values
    layout = NamedSharding(distribution.device_mesh.backend_mesh, PartitionSpec())
    return jax.tree.map(lambda value: jax.lax.with_sharding_constraint(value, layout), values)


def without_replica_state(cross_shard: Any, variables: Sequence[Any], state: Sequence[Any]) -> list[Any]:
    """Return `state`, the values of optimizer variables, with None for those sharded or different on each replica.

    Code inside the `shard_map` does not need these, and would gather a sharded variable on every device.
    """
    omitted = {id(v) for v in [*cross_shard.pipeline.replica_state, *cross_shard._divided_arrays]}
    return [None if id(v) in omitted else value for v, value in zip(variables, state)]


def with_zeros(variables: Sequence[Any], state: Sequence[Any]) -> list[Any]:
    """Return the state with zeros for each None, because every optimizer variable needs some value."""
    return [jax.numpy.zeros(v.shape, v.dtype) if value is None else value for v, value in zip(variables, state)]
