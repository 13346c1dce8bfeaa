"""A step on several parts of a batch, one after another, as `CrossShard(virtual_replicas=...)` asks for.

XLA gives the same operations other last digits in other surroundings, because it fuses across whatever it can. So each
replica computes its parts in a loop, the body of which has equal shapes for any number of replicas and is compiled by
itself. What parts do to moving statistics is added up in the tree in which gradients are.

Private names of Keras touched here (a test holds each of them):
    `Model.compute_loss_and_updates` - forward pass and loss of the trainer's step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import keras
from jax.sharding import NamedSharding, PartitionSpec

from keras_shardopt.backends.jax.communicator import MappedAxis, batch_size_of, seed_offset
from keras_shardopt.backends.jax.runtime import OWN_GRADIENTS
from keras_shardopt.backends.scopes import assigning_nothing
from keras_shardopt.fit.jax.batches import padded
from keras_shardopt.fit.overrides import num_rows
from keras_shardopt.numerics import Tensor
from keras_shardopt.update.step import Step
from keras_shardopt.update.trainer_context import BatchShare, batch_shared, row_share
from keras_shardopt.update.virtual_replicas import PartOfBatch, Tree, VirtualReplicas, first_found, parts_of_each


def in_parts(model: Any, reducer: Any, distribution: Any, state: Any, data: Any, num_parts: int) -> tuple[Any, ...]:
    """Forward and backward passes of each replica on its parts of a batch.

    Returns:
        The gradients of all parts together, what is found in them and notes; the loss of the whole batch; the
        predictions of all rows; and the variables that are not trained.
    """
    axis, num_replicas = distribution.batch_dim_name, batch_size_of(distribution)
    all_rows = num_rows(data)
    rows = -(-all_rows // num_parts)  # of each part, those at the end with the first row as padding
    num_missing = rows * num_parts - all_rows
    each = parts_of_each(num_parts, num_replicas)
    stage = next(stage for stage in reducer.pipeline.stages if isinstance(stage, VirtualReplicas))
    variables, kept = model.trainable_variables, model.non_trainable_variables
    is_seed = [v.name == "seed_generator_state" for v in kept]
    is_moving = [not seed and keras.backend.is_float_dtype(v.dtype) for v, seed in zip(kept, is_seed)]

    iterations = [v is model.optimizer.iterations for v in model.optimizer.variables].index(True)
    weights, others, optimizer_state, metrics = state
    optimizer_state = without_own(reducer, model.optimizer.variables, optimizer_state)

    def local(weights: Any, others: Any, optimizer_state: Any, metrics: Any, data: Any) -> Any:
        optimizer_state = with_zeros(model.optimizer.variables, optimizer_state)
        replicas = MappedAxis(axis)
        first = replicas.replica_id * each
        step = jax.value_and_grad(model.compute_loss_and_updates, has_aux=True)

        def of_part(index: Tensor, own: Any) -> Any:
            mine = jax.numpy.clip(all_rows - index * rows, 0, rows) if num_missing else rows
            other = seed_offset(index)
            inputs = [v + other if seed else v for v, seed in zip(others, is_seed)]
            part = PartOfBatch(index, num_parts, is_first=True, is_last=True)
            share = BatchShare(mine, all_rows, part, ends_early=bool(num_missing), rows_here=rows)
            with batch_shared(share):
                (_, (loss, y_pred, changed, _)), grads = step(
                    weights, inputs, metrics, *own, training=True, optimizer_variables=optimizer_state
                )
                with keras.StatelessScope(state_mapping=list(zip(model.optimizer.variables, optimizer_state))):
                    scale = model.optimizer.scale_loss(1.0)
                    with assigning_nothing(OWN_GRADIENTS):
                        grads, found = stage.of_part(
                            Step(grads, variables, row_share=row_share(), loss_scale=scale), part
                        )
            counts = jax.numpy.asarray(mine > 0)
            moved = [
                jax.numpy.where(counts, after - before, 0)
                for before, after, moves in zip(others, changed, is_moving)
                if moves
            ]
            changed = [after - other if seed else after for after, seed in zip(changed, is_seed)]
            return [*grads, loss, *moved], found, changed, y_pred

        def add(i: Tensor, carry: Any) -> Any:
            levels, found_before, _, outputs = carry
            own = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, i * rows, rows), data)
            total, found, changed, y_pred = of_part(first + i, own)
            level = jax.lax.population_count(i ^ (i + 1)) - 1  # how many digits 1 the number of parts so far ends with
            total = jax.lax.fori_loop(
                0, level, lambda j, total: [sums[j] + more for sums, more in zip(levels, total)], total
            )
            levels = [sums.at[level].set(more) for sums, more in zip(levels, total)]
            outputs = jax.tree.map(
                lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, i * rows, 0), outputs, y_pred
            )
            return levels, None if found is None else first_found(found_before, found), changed, outputs

        total, found, changed, y_pred = jax.eval_shape(
            of_part, jax.numpy.int32(0), jax.tree.map(lambda leaf: leaf[:rows], data)
        )
        # Two levels and two parts at least: XLA would see that a single part is the same in every round, and move what
        # only depends on it out of the loop.
        num_levels = max(2, each.bit_length())
        if each == 1:
            data = jax.tree.map(lambda leaf: jax.numpy.concatenate([leaf, leaf]), data)
        empty = (
            [jax.numpy.zeros((num_levels, *sums.shape), sums.dtype) for sums in total],
            None if found is None else jax.numpy.zeros(found.shape, found.dtype),
            [jax.numpy.zeros(value.shape, value.dtype) for value in changed],
            jax.tree.map(lambda leaf: jax.numpy.zeros((each * leaf.shape[0], *leaf.shape[1:]), leaf.dtype), y_pred),
        )
        # A number that XLA does not know, or it would write few rounds one after another, and fuse them.
        num_rounds = jax.numpy.where(optimizer_state[iterations] >= 0, each, 0)
        levels, found, changed, y_pred = jax.lax.fori_loop(0, num_rounds, add, empty)
        totals = [sums[each.bit_length() - 1] for sums in levels]
        grads, (loss, *moved) = totals[: len(variables)], totals[len(variables) :]
        with keras.StatelessScope(state_mapping=list(zip(model.optimizer.variables, optimizer_state))):
            scale = model.optimizer.scale_loss(1.0)
            of_all = Step(grads, variables, loss_scale=scale, found_inf=found)
            with assigning_nothing(OWN_GRADIENTS):
                reduced = stage.reduced(of_all, replicas)
        loss, *moved = Tree(replicas, num_parts).all_reduce([loss, *moved], "sum")
        num_counting = -(-all_rows // rows)
        left = iter(moved)
        joined = [
            before + next(left) / num_counting if moves else after
            for before, after, moves in zip(others, changed, is_moving)
        ]
        return (reduced.grads, reduced.found_inf, dict(reduced.notes)), loss / num_parts, y_pred, joined

    whole, divided = PartitionSpec(), PartitionSpec(axis)
    run = jax.shard_map(
        local,
        mesh=distribution.device_mesh.backend_mesh,
        in_specs=(whole, whole, whole, whole, divided),
        out_specs=(whole, whole, divided, whole),
        check_vma=False,
    )
    grads, loss, y_pred, joined = run(weights, others, optimizer_state, metrics, padded(data, num_missing))
    return grads, loss, jax.tree.map(lambda leaf: leaf[:all_rows], y_pred), joined


def on_every_device(values: Any, distribution: Any) -> Any:
    """The values as each device has all of them, so that metrics add them up in one order."""
    layout = NamedSharding(distribution.device_mesh.backend_mesh, PartitionSpec())
    return jax.tree.map(lambda value: jax.lax.with_sharding_constraint(value, layout), values)


def without_own(reducer: Any, variables: Sequence[Any], state: Sequence[Any]) -> list[Any]:
    """The state of an optimizer for a `shard_map`: None where each replica, or device, has its own.

    What differs between replicas stays where it is, and what is divided by a layout would come together here, on every
    device: `scale_loss`, for which the state is there, looks at neither. What stages have is there, as they read it.
    """
    apart = {id(v) for v in reducer.pipeline.replica_state}
    of_stages = {id(v) for v in reducer._variables}
    is_divided = [reducer.shard_state and len(v.shape) > 0 and id(v) not in of_stages for v in variables]
    return [None if id(v) in apart or divided else value for v, divided, value in zip(variables, is_divided, state)]


def with_zeros(variables: Sequence[Any], state: Sequence[Any]) -> list[Any]:
    """What `without_own` returns, within the `shard_map`: every variable of the optimizer must have some value."""
    return [jax.numpy.zeros(v.shape, v.dtype) if value is None else value for v, value in zip(variables, state)]
