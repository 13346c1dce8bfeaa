"""The JAX step of `VirtualReplicas`: a batch has a fixed number of parts, and each replica loops over its parts.

XLA fuses an operation with the operations around it, so the same operation rounds differently in different programs. A
loop body is compiled separately. Its shapes here do not depend on the number of replicas, so neither does its rounding.
Changes of moving statistics are summed in the same binary tree as gradients.

XLA's removal of duplicate computations (the CSE pass) runs later for several devices than for one device. This can
change the rounding of operations in between. Therefore these steps are compiled without CSE (`compiled_identically`).

Private names of Keras touched here (a test checks that each exists):
    `Model.compute_loss_and_updates` - forward pass and loss of the trainer's step.
    `Model._update_metrics_variables` - the second half of the trainer's step.
    `keras.src.backend.common.masking.get_keras_mask` - the mask of a tensor.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterator
from typing import Any

import jax
import keras
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from keras.src.backend.common.masking import get_keras_mask

from keras_shardopt.backends.jax.communicator import MappedAxis, num_batch_shards, seed_offset
from keras_shardopt.backends.jax.runtime import OWN_GRADIENTS
from keras_shardopt.backends.scopes import assigning_nothing
from keras_shardopt.extensions.equal_bits.num_parts import num_parts_of
from keras_shardopt.extensions.equal_bits.stage import (
    CountingReplica,
    SumOfParts,
    Tree,
    VirtualReplica,
    first_found,
    parts_of_each,
)
from keras_shardopt.fit.calls import num_rows
from keras_shardopt.fit.jax.batches import padded
from keras_shardopt.fit.jax.convolutions import in_layout_of_kernels
from keras_shardopt.fit.jax.halves import on_every_device, with_masks, with_zeros, without_replica_state
from keras_shardopt.fit.jax.jitted import making_steps
from keras_shardopt.fit.jax.step import Computed, TrainStep
from keras_shardopt.fit.jax.uneven import share_of_part, without_padding
from keras_shardopt.numerics import Tensor
from keras_shardopt.update.losses import mean_losses, share_losses
from keras_shardopt.update.parts import PartOfBatch
from keras_shardopt.update.step import Step
from keras_shardopt.update.trainer_context import batch_shared, row_share


@contextlib.contextmanager
def compiled_identically(model: Any, num_parts: int) -> Iterator[None]:
    """In this block, make XLA compile Keras' steps in the same way for one device and several.

    Raises:
        ValueError: if the model's steps are not compiled by XLA. The message contains `num_parts`.
    """
    if model.run_eagerly or not model.jit_compile:
        received = "run_eagerly=True" if model.run_eagerly else "jit_compile=False"
        raise ValueError(
            f"`VirtualReplicas` needs steps that JAX compiles as a whole. Received: {received}, "
            f"VirtualReplicas({num_parts}). Remove one of the two."
        )
    options = {"xla_disable_hlo_passes": _passes_left_out()}
    with making_steps(lambda jit: functools.partial(jit, compiler_options=options)):
        yield


def _passes_left_out() -> str:
    """Return the XLA passes to disable: CSE, and those that the environment variable `XLA_FLAGS` disables."""
    flags = re.findall(r"--xla_disable_hlo_passes=(\S+)", os.environ.get("XLA_FLAGS", ""))
    return ",".join([*flags[-1:], "cse"])


def in_parts(model: Any, cross_shard: Any, distribution: Any, state: Any, data: Any, num_parts: int) -> tuple[Any, ...]:
    """Run the forward and backward passes of each replica on its parts of a batch.

    Returns:
        Five values for the whole batch: a tuple (gradients, `Step.found_inf` and `Step.notes`); the loss; the
        predictions; and the new values of non-trainable variables and of metric variables.
    """
    parts = _Parts(model, distribution, data, num_parts)
    stage = next(stage for stage in cross_shard.pipeline.stages if isinstance(stage, SumOfParts))
    variables = model.trainable_variables
    iterations = [v is model.optimizer.iterations for v in model.optimizer.variables].index(True)
    weights, others, optimizer_state, metrics = state
    optimizer_state = without_replica_state(cross_shard, model.optimizer.variables, optimizer_state)

    def local(weights: Any, kept: Any, optimizer_state: Any, data: Any) -> Any:
        optimizer_state = with_zeros(model.optimizer.variables, optimizer_state)
        replicas = MappedAxis(parts.axis)
        # Make the number of parts a traced value. XLA would unroll a loop of constant length, and fuse its iterations.
        num_rounds = jax.numpy.where(optimizer_state[iterations] >= 0, parts.each, 0)
        arguments = {"training": True, "optimizer_variables": optimizer_state}
        counted = parts.counted(replicas, weights, kept, data, num_rounds, arguments)
        step = jax.value_and_grad(model.compute_loss_and_updates, has_aux=True)

        def of_part(index: Tensor, num_rows: int, own: Any) -> Any:
            part = VirtualReplica(index, num_parts, is_first=True, is_last=True, counted=counted)
            with parts.shared(part, num_rows):
                (_, (loss, y_pred, *changed)), grads = step(weights, *parts.starts(index, kept), *own, **arguments)
                with _own_gradients(model.optimizer, optimizer_state) as scale:
                    local_step = Step(grads, variables, row_share=row_share(), loss_scale=scale)
                    grads, found = stage.of_part(local_step, part)
            sums, last = parts.ends(index, num_rows, kept, changed)
            return [*grads, loss, *sums], found, last, y_pred

        totals, found, last, y_pred = parts.over_parts(of_part, replicas, data, num_rounds)
        grads, (loss, *sums) = totals[: len(variables)], totals[len(variables) :]
        with _own_gradients(model.optimizer, optimizer_state) as scale:
            reduced = stage.reduced(Step(grads, variables, loss_scale=scale, found_inf=found), replicas)
        grads = _not_fused(reduced.grads, num_rounds), reduced.found_inf, dict(reduced.notes)
        return grads, y_pred, parts.joined(replicas, kept, loss, sums, last)

    grads, y_pred, (loss, *kept) = parts.run(
        local, (weights, [*others, *metrics], optimizer_state), data, (True, False, True)
    )
    return grads, loss, y_pred, kept[: len(others)], kept[len(others) :]


@contextlib.contextmanager
def _own_gradients(optimizer: Any, state: Any) -> Iterator[Any]:
    """In the block, the optimizer's variables have the values `state`; assignments raise. Yield the loss scale."""
    with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, state))):
        scale = optimizer.scale_loss(1.0)
        with assigning_nothing(OWN_GRADIENTS):
            yield scale


def evaluated_in_parts(model: Any, distribution: Any, state: Any, data: Any, num_parts: int) -> tuple[Any, ...]:
    """Run the forward passes of each replica on its parts of a batch.

    Returns:
        The loss; the pair (predictions, masks); and the new values of non-trainable and of metric variables.
    """
    parts = _Parts(model, distribution, data, num_parts)
    weights, others, metrics = state
    is_count = [v is mean_losses(model)[0].count for v in model.metrics_variables].index(True)
    arguments = {"training": False}

    def local(weights: Any, kept: Any, data: Any) -> Any:
        replicas = MappedAxis(parts.axis)
        num_rounds = jax.numpy.where(kept[len(others) + is_count] >= 0, parts.each, 0)
        counted = parts.counted(replicas, weights, kept, data, num_rounds, arguments)

        def of_part(index: Tensor, num_rows: int, own: Any) -> Any:
            with parts.shared(VirtualReplica(index, num_parts, is_first=True, is_last=True, counted=counted), num_rows):
                _, (loss, y_pred, *changed) = model.compute_loss_and_updates(
                    weights, *parts.starts(index, kept), *own, **arguments
                )
            sums, last = parts.ends(index, num_rows, kept, changed)
            masks = [get_keras_mask(leaf) for leaf in jax.tree.leaves(y_pred)]  # JAX drops masks, but metrics use them
            return [loss, *sums], None, last, (y_pred, masks)

        (loss, *sums), _, last, outputs = parts.over_parts(of_part, replicas, data, num_rounds)
        return outputs, parts.joined(replicas, kept, loss, sums, last)

    outputs, (loss, *kept) = parts.run(local, (weights, [*others, *metrics]), data, (False, True))
    return loss, outputs, kept[: len(others)], kept[len(others) :]


class _Parts:
    """Divides a batch into parts, and combines the values that the parts compute for variables of metrics and layers.

    A metric variable with `aggregation="sum"` starts from zero in each part; the sum over parts is added to its value.
    A moving statistic adds its mean change in the parts with rows. Other variables keep their value of the last part.
    """

    def __init__(self, model: Any, distribution: Any, data: Any, num_parts: int) -> None:
        if distribution is None:  # use one device; pass `Auto`, because JAX 0.12 has another default
            self.axis, self._mesh = "batch", AbstractMesh((1,), ("batch",), (AxisType.Auto,))
        else:
            self.axis, self._mesh = distribution.batch_dim_name, distribution.device_mesh.backend_mesh
        self._model, self._num_parts = model, num_parts
        self._all_rows = num_rows(data)
        self._rows = -(-self._all_rows // num_parts)  # rows per part; padding rows repeat the first row
        self._num_missing = self._rows * num_parts - self._all_rows
        self.each = parts_of_each(num_parts, num_batch_shards(distribution))
        others, metrics = model.non_trainable_variables, model.metrics_variables
        self._num_others = len(others)
        self._is_seed = [v.name == "seed_generator_state" for v in [*others, *metrics]]
        self._is_sum = [False] * len(others) + [v.aggregation == "sum" for v in metrics]
        # In metrics of mean losses, all parts of the batch count equally. So sum these also over parts without rows.
        always = {id(v) for tracker in mean_losses(model) for v in tracker.variables}
        self._always = [id(v) in always for v in [*others, *metrics]]
        self._is_moving = [
            not seed and not adds and keras.backend.is_float_dtype(v.dtype)
            for v, seed, adds in zip([*others, *metrics], self._is_seed, self._is_sum)
        ]

    def shared(self, part: PartOfBatch, num_rows: int) -> contextlib.AbstractContextManager[None]:
        """In the block, losses are for one part (`num_rows` rows) of a batch, but divide by the batch's rows."""
        return batch_shared(share_of_part(num_rows, self._all_rows, part))

    def starts(self, index: Tensor, kept: Any) -> tuple[Any, Any]:
        """Return the values of non-trainable and metric variables at the start of a part; `kept`: before the batch."""
        started = [
            value + seed_offset(index) if seed else jax.numpy.zeros_like(value) if adds else value
            for value, seed, adds in zip(kept, self._is_seed, self._is_sum)
        ]
        return started[: self._num_others], started[self._num_others :]

    def ends(self, index: Tensor, num_rows: int, kept: Any, changed: Any) -> tuple[Any, Any]:
        """From values before (`kept`) and after (`changed`) a part of a batch, return those to sum, and to keep."""
        after = [value for values in changed for value in values]
        sums = []
        for i, (old, new) in enumerate(zip(kept, after)):
            if self._is_sum[i]:
                sums.append(new if self._always[i] or num_rows else jax.numpy.zeros_like(new))
            elif self._is_moving[i] and new is not old:
                sums.append(new - old if num_rows else jax.numpy.zeros_like(new))
        last = [new - seed_offset(index) if seed else new for new, seed in zip(after, self._is_seed)]
        return sums, [None if new is old else value for old, new, value in zip(kept, after, last)]

    def joined(self, replicas: MappedAxis, kept: Any, loss: Tensor, sums: Any, last: Any) -> list[Tensor]:
        """Combine the results of all parts. Return the loss of the batch, then each variable's new value."""
        loss, *totals = Tree(replicas, self._num_parts).all_reduce([loss, *sums], "sum")
        num_counting = -(-self._all_rows // self._rows)
        left, after = iter(totals), [loss / self._num_parts]
        for old, new, adds, moves in zip(kept, last, self._is_sum, self._is_moving):
            if new is None:
                after.append(old)
            else:
                after.append(old + next(left) if adds else old + next(left) / num_counting if moves else new)
        return after

    def counted(
        self, replicas: MappedAxis, weights: Any, kept: Any, data: Any, num_rounds: Tensor, arguments: dict[str, Any]
    ) -> list[Tensor]:
        """Return the divisors of losses (such as the sum of a mask), summed over all parts of the batch."""

        def of_part(index: Tensor, num_rows: int, own: Any) -> Any:
            part = CountingReplica(index, self._num_parts, is_first=True, is_last=True)
            with self.shared(part, num_rows):
                self._model.compute_loss_and_updates(weights, *self.starts(index, kept), *own, **arguments)
            return part.counts, None, [], []

        if not self._shapes(of_part, data)[0]:
            return []
        totals, *_ = self.over_parts(of_part, replicas, data, num_rounds)
        return Tree(replicas, self._num_parts).all_reduce(totals, "sum")

    def _shapes(self, of_part: Any, data: Any) -> Any:
        return jax.eval_shape(
            lambda index, own: of_part(index, self._rows, own),
            jax.numpy.int32(0),
            jax.tree.map(lambda leaf: leaf[: self._rows], data),
        )

    def over_parts(self, of_part: Any, replicas: MappedAxis, data: Any, num_rounds: Tensor) -> tuple[Any, ...]:
        """Run `of_part` on each of this replica's parts of the batch, one after another, and combine the results.

        Args:
            of_part: takes the index of a part, its number of rows, and the rows. Returns tensors to sum over parts, the
                position of a non-finite gradient (0: none), values to keep from the last part, and predictions.
            replicas: the devices.
            data: this replica's rows of the batch.
            num_rounds: the number of parts of this replica.
        """
        each, rows = self.each, self._rows
        first = replicas.replica_id * each

        def add(i: Tensor, carry: Any) -> Any:
            levels, found_before, _, outputs = carry
            own = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, i * rows, rows), data)
            total, found, last, y_pred = of_rows(first + i, own)
            level = jax.lax.population_count(i ^ (i + 1)) - 1  # the number of trailing 1 bits of i
            total = jax.lax.fori_loop(
                0, level, lambda j, total: [sums[j] + more for sums, more in zip(levels, total)], total
            )
            levels = [sums.at[level].set(more) for sums, more in zip(levels, total)]
            outputs = jax.tree.map(
                lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, i * rows, 0), outputs, y_pred
            )
            return levels, None if found is None else first_found(found_before, found), last, outputs

        shapes = total, found, last, y_pred = self._shapes(of_part, data)
        number = (self._all_rows, self._num_parts)
        of_rows = in_layout_of_kernels(
            lambda index, own: without_padding(functools.partial(of_part, index), index, *number, own, shapes)
        )
        # Give the loop arrays for at least two parts. With arrays for one part, XLA moves computations out of the loop.
        num_levels = max(2, each.bit_length())
        if each == 1:
            data = jax.tree.map(lambda leaf: jax.numpy.concatenate([leaf, leaf]), data)
        empty = (
            [jax.numpy.zeros((num_levels, *sums.shape), sums.dtype) for sums in total],
            None if found is None else jax.numpy.zeros(found.shape, found.dtype),
            [None if value is None else jax.numpy.zeros(value.shape, value.dtype) for value in last],
            jax.tree.map(lambda leaf: jax.numpy.zeros((each * leaf.shape[0], *leaf.shape[1:]), leaf.dtype), y_pred),
        )
        levels, found, last, y_pred = jax.lax.fori_loop(0, num_rounds, add, empty)
        return [sums[each.bit_length() - 1] for sums in levels], found, last, y_pred

    def run(self, local: Any, state: tuple[Any, ...], data: Any, returned: tuple[bool, ...]) -> Any:
        """Run `local` on each device.

        Args:
            local: takes the state and a device's rows of the batch.
            state: the arguments that are equal on all devices.
            data: the batch.
            returned: for each result, True if it is equal on all devices, False if each device returns its rows.
        """
        whole, divided = PartitionSpec(), PartitionSpec(self.axis)
        run = jax.shard_map(
            local,
            mesh=self._mesh,
            in_specs=(*[whole for _ in state], divided),
            out_specs=tuple(whole if equal else divided for equal in returned),
            check_vma=False,
        )
        found = run(*state, padded(data, self._num_missing))
        return [
            part if equal else jax.tree.map(lambda leaf: leaf[: self._all_rows], part)
            for part, equal in zip(found, returned)
        ]


def _not_fused(values: Any, num_rounds: Tensor) -> Any:
    """Pass values through a loop (one iteration, but XLA cannot prove it), so XLA cannot fuse them with later code.

    The code that reduces the values depends on the number of devices. If XLA fused a norm into this code, the norm's
    rounding would depend on that number too.
    """
    empty = jax.tree.map(jax.numpy.zeros_like, values)
    return jax.lax.fori_loop(0, jax.numpy.minimum(num_rounds, 1), lambda *_: values, empty)


class PartsStep(TrainStep):
    """A step of training or evaluation in which each replica computes its parts of the batch one after another."""

    stacks_windows = False
    is_reduced = True

    @property
    def _num_parts(self) -> int:
        return num_parts_of(self.model)

    def compiler_options(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which XLA compiles the steps in the same way for any number of devices."""
        return compiled_identically(self.model, self._num_parts)

    def is_needed(self, distribution: Any, stacks: bool) -> bool:
        """Return True: one device must also use this step, or its results would differ from those of several."""
        return True

    def computed(self, distribution: Any, state: Any, data: Any, stacks: bool) -> Computed:
        """Run each part of a batch forward and backward. Copy rows to all devices, so metrics sum them in one order."""
        arguments = (self.model, self.cross_shards[0], distribution, state, data, self._num_parts)
        grads, loss, y_pred, others, metrics = in_parts(*arguments)
        x, y, sample_weight = data
        y, sample_weight, y_pred = on_every_device((y, sample_weight, y_pred), distribution)
        return Computed(grads, loss, y_pred, others, metrics, (x, y, sample_weight))

    def test(self, real: Any, state: Any, data: Any) -> Any:
        """Evaluate each part of a batch, so logs do not depend on the number of devices. A custom step runs `real`."""
        model, distribution = self.model, keras.distribution.distribution()
        if model.__class__.test_step is not keras.Model.test_step:
            return real(state, data)
        data = x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        share_losses(model)
        loss, outputs, others, metrics = evaluated_in_parts(model, distribution, state, data, self._num_parts)
        y, sample_weight, outputs = on_every_device((y, sample_weight, outputs), distribution)
        logs, metrics = model._update_metrics_variables(metrics, loss, x, y, with_masks(*outputs), sample_weight)
        return logs, (state[0], others, metrics)
