"""A step on several parts of a batch, one after another, as `CrossShard(virtual_replicas=...)` asks for.

XLA gives the same operations other last digits in other surroundings, because it fuses across whatever it can. So each
replica computes its parts in a loop, the body of which has equal shapes for any number of replicas and is compiled by
itself. What parts do to moving statistics is added up in the tree in which gradients are.

For several devices XLA has a pass more: when it has cut the program it drops what is computed twice. What is simplified
next depends on how often a value is used: a softmax and its gradient divide by one sum, which stays a division where
they share the sum's broadcast, and is a product with 1/sum where each has its own. So these steps are compiled without
that pass (`compiled_alike`), and one device has the bits of several.

Private names of Keras touched here (a test holds each of them):
    `Model.compute_loss_and_updates` - forward pass and loss of the trainer's step.
    `Model._update_metrics_variables` - the second half of the trainer's step.
    `keras.src.backend.common.masking.get_keras_mask` - the mask that goes with a tensor.
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

from keras_shardopt.backends.jax.communicator import MappedAxis, batch_size_of, seed_offset
from keras_shardopt.backends.jax.runtime import OWN_GRADIENTS
from keras_shardopt.backends.scopes import assigning_nothing
from keras_shardopt.extensions.equal_bits.num_parts import are_cut, num_parts_of
from keras_shardopt.extensions.equal_bits.stage import (
    CountingReplica,
    Tree,
    VirtualReplica,
    VirtualReplicas,
    first_found,
    parts_of_each,
)
from keras_shardopt.fit.jax.batches import padded
from keras_shardopt.fit.jax.convolutions import in_layout_of_kernels
from keras_shardopt.fit.jax.halves import on_every_device, with_masks, with_zeros, without_own
from keras_shardopt.fit.jax.jitted import making_steps
from keras_shardopt.fit.jax.step import Computed, TrainStep, register
from keras_shardopt.fit.jax.uneven import share_of_part, without_padding
from keras_shardopt.fit.overrides import num_rows
from keras_shardopt.numerics import Tensor
from keras_shardopt.update.losses import mean_losses, share_losses
from keras_shardopt.update.parts import PartOfBatch
from keras_shardopt.update.step import Step
from keras_shardopt.update.trainer_context import batch_shared, row_share


@contextlib.contextmanager
def compiled_alike(model: Any, num_parts: int) -> Iterator[None]:
    """Within it Keras makes steps that XLA compiles alike for one device and for several.

    Raises:
        ValueError: where steps are not compiled at all.
    """
    if model.run_eagerly or not model.jit_compile:
        received = "run_eagerly=True" if model.run_eagerly else "jit_compile=False"
        raise ValueError(
            "`virtual_replicas` needs steps that JAX compiles as a whole. "
            f"Received: {received}, virtual_replicas={num_parts}. Leave one of them out."
        )
    options = {"xla_disable_hlo_passes": _passes_left_out()}
    with making_steps(lambda jit: functools.partial(jit, compiler_options=options)):
        yield


def _passes_left_out() -> str:
    """Also those that the environment leaves out, as the option takes the place of what is said there."""
    theirs = re.findall(r"--xla_disable_hlo_passes=(\S+)", os.environ.get("XLA_FLAGS", ""))
    return ",".join([*theirs[-1:], "cse"])


def in_parts(model: Any, reducer: Any, distribution: Any, state: Any, data: Any, num_parts: int) -> tuple[Any, ...]:
    """Forward and backward passes of each replica on its parts of a batch.

    Returns:
        The gradients of all parts together, what is found in them and notes; the loss of the whole batch; the
        predictions of all rows; the variables that are not trained; and those of metrics.
    """
    cut = _Cut(model, distribution, data, num_parts)
    stage = next(stage for stage in reducer.pipeline.stages if isinstance(stage, VirtualReplicas))
    variables = model.trainable_variables
    iterations = [v is model.optimizer.iterations for v in model.optimizer.variables].index(True)
    weights, others, optimizer_state, metrics = state
    optimizer_state = without_own(reducer, model.optimizer.variables, optimizer_state)

    def local(weights: Any, kept: Any, optimizer_state: Any, data: Any) -> Any:
        optimizer_state = with_zeros(model.optimizer.variables, optimizer_state)
        replicas = MappedAxis(cut.axis)
        # A number that XLA does not know, or it would write few rounds one after another, and fuse them.
        num_rounds = jax.numpy.where(optimizer_state[iterations] >= 0, cut.each, 0)
        arguments = {"training": True, "optimizer_variables": optimizer_state}
        counted = cut.counted(replicas, weights, kept, data, num_rounds, arguments)
        step = jax.value_and_grad(model.compute_loss_and_updates, has_aux=True)

        def of_part(index: Tensor, num_rows: int, own: Any) -> Any:
            part = VirtualReplica(index, num_parts, is_first=True, is_last=True, counted=counted)
            with cut.shared(part, num_rows):
                (_, (loss, y_pred, *changed)), grads = step(weights, *cut.starts(index, kept), *own, **arguments)
                with keras.StatelessScope(state_mapping=list(zip(model.optimizer.variables, optimizer_state))):
                    scale = model.optimizer.scale_loss(1.0)
                    with assigning_nothing(OWN_GRADIENTS):
                        grads, found = stage.of_part(
                            Step(grads, variables, row_share=row_share(), loss_scale=scale), part
                        )
            sums, last = cut.ends(index, num_rows, kept, changed)
            return [*grads, loss, *sums], found, last, y_pred

        totals, found, last, y_pred = cut.over_parts(of_part, replicas, data, num_rounds)
        grads, (loss, *sums) = totals[: len(variables)], totals[len(variables) :]
        with keras.StatelessScope(state_mapping=list(zip(model.optimizer.variables, optimizer_state))):
            scale = model.optimizer.scale_loss(1.0)
            of_all = Step(grads, variables, loss_scale=scale, found_inf=found)
            with assigning_nothing(OWN_GRADIENTS):
                reduced = stage.reduced(of_all, replicas)
        return (
            (_by_itself(reduced.grads, num_rounds), reduced.found_inf, dict(reduced.notes)),
            y_pred,
            cut.joined(replicas, kept, loss, sums, last),
        )

    grads, y_pred, (loss, *kept) = cut.run(
        local, (weights, [*others, *metrics], optimizer_state), data, (True, False, True)
    )
    return grads, loss, y_pred, kept[: len(others)], kept[len(others) :]


def evaluated_in_parts(model: Any, distribution: Any, state: Any, data: Any, num_parts: int) -> tuple[Any, ...]:
    """Forward passes of each replica on its parts of a batch.

    Returns:
        What `in_parts` does, but gradients; of the predictions their masks, too.
    """
    cut = _Cut(model, distribution, data, num_parts)
    weights, others, metrics = state
    is_count = [v is mean_losses(model)[0].count for v in model.metrics_variables].index(True)
    arguments = {"training": False}

    def local(weights: Any, kept: Any, data: Any) -> Any:
        replicas = MappedAxis(cut.axis)
        num_rounds = jax.numpy.where(kept[len(others) + is_count] >= 0, cut.each, 0)
        counted = cut.counted(replicas, weights, kept, data, num_rounds, arguments)

        def of_part(index: Tensor, num_rows: int, own: Any) -> Any:
            with cut.shared(VirtualReplica(index, num_parts, is_first=True, is_last=True, counted=counted), num_rows):
                _, (loss, y_pred, *changed) = model.compute_loss_and_updates(
                    weights, *cut.starts(index, kept), *own, **arguments
                )
            sums, last = cut.ends(index, num_rows, kept, changed)
            masks = [get_keras_mask(leaf) for leaf in jax.tree.leaves(y_pred)]  # which metrics look at
            return [loss, *sums], None, last, (y_pred, masks)

        (loss, *sums), _, last, outputs = cut.over_parts(of_part, replicas, data, num_rounds)
        return outputs, cut.joined(replicas, kept, loss, sums, last)

    outputs, (loss, *kept) = cut.run(local, (weights, [*others, *metrics]), data, (False, True))
    return loss, outputs, kept[: len(others)], kept[len(others) :]


class _Cut:
    """How a batch is cut into parts, and what is made of the variables that they change: of metrics, and others.

    Of metrics that count, each part counts from zero, and the sum is added; moving statistics change by the mean over
    parts that have rows; seeds and the like are those of any part.

    Args:
        model: the model.
        distribution: the devices; None for one.
        data: the batch.
        num_parts: how many parts it has.
    """

    def __init__(self, model: Any, distribution: Any, data: Any, num_parts: int) -> None:
        if distribution is None:  # any device will do; JAX 0.12 makes axes explicit unless told otherwise
            self.axis, self._mesh = "batch", AbstractMesh((1,), ("batch",), (AxisType.Auto,))
        else:
            self.axis, self._mesh = distribution.batch_dim_name, distribution.device_mesh.backend_mesh
        self._model, self._num_parts = model, num_parts
        self._all_rows = num_rows(data)
        self._rows = -(-self._all_rows // num_parts)  # of each part, those at the end with the first row as padding
        self._num_missing = self._rows * num_parts - self._all_rows
        self.each = parts_of_each(num_parts, batch_size_of(distribution))
        others, metrics = model.non_trainable_variables, model.metrics_variables
        self._num_others = len(others)
        self._is_seed = [v.name == "seed_generator_state" for v in [*others, *metrics]]
        self._is_sum = [False] * len(others) + [v.aggregation == "sum" for v in metrics]
        # Mean losses count an equal part of the rows for each part, also for one that has none.
        always = {id(v) for tracker in mean_losses(model) for v in tracker.variables}
        self._always = [id(v) in always for v in [*others, *metrics]]
        self._is_moving = [
            not seed and not adds and keras.backend.is_float_dtype(v.dtype)
            for v, seed, adds in zip([*others, *metrics], self._is_seed, self._is_sum)
        ]

    def shared(self, part: PartOfBatch, num_rows: int) -> contextlib.AbstractContextManager[None]:
        """Within it losses are those of this part, which has so many rows."""
        return batch_shared(share_of_part(num_rows, self._all_rows, part))

    def starts(self, index: Tensor, kept: Any) -> tuple[Any, Any]:
        """The variables with which a part begins: those that are not trained, and those of metrics."""
        begun = [
            value + seed_offset(index) if seed else jax.numpy.zeros_like(value) if adds else value
            for value, seed, adds in zip(kept, self._is_seed, self._is_sum)
        ]
        return begun[: self._num_others], begun[self._num_others :]

    def ends(self, index: Tensor, num_rows: int, kept: Any, changed: Any) -> tuple[Any, Any]:
        """What is added up of the variables that a part has changed, and what is taken as it is; None: unchanged."""
        after = [value for values in changed for value in values]
        sums = []
        for i, (old, new) in enumerate(zip(kept, after)):
            if self._is_sum[i]:
                sums.append(new if self._always[i] or num_rows else jax.numpy.zeros_like(new))
            elif self._is_moving[i] and new is not old:
                sums.append(new - old if num_rows else jax.numpy.zeros_like(new))
        last = [new - seed_offset(index) if seed else new for new, seed in zip(after, self._is_seed)]
        # Frozen weights and the like stay as they are.
        return sums, [None if new is old else value for old, new, value in zip(kept, after, last)]

    def joined(self, replicas: MappedAxis, kept: Any, loss: Tensor, sums: Any, last: Any) -> list[Tensor]:
        """The loss of the batch, and the variables after it."""
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
        """What all parts have of what losses divide by. XLA leaves out what of the model that does not need."""

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
        """What a replica's parts make, one after another.

        Args:
            of_part: returns for a part, its number of rows, and these rows what is added up, where it found a gradient
                that is not finite, what is taken as it is, and the rows of outputs.
            replicas: the devices.
            data: the replica's rows.
            num_rounds: how many parts it has.
        """
        each, rows = self.each, self._rows
        first = replicas.replica_id * each

        def add(i: Tensor, carry: Any) -> Any:
            levels, found_before, _, outputs = carry
            own = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, i * rows, rows), data)
            total, found, last, y_pred = of_rows(first + i, own)
            level = jax.lax.population_count(i ^ (i + 1)) - 1  # how many digits 1 the number of parts so far ends with
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
        # Two levels and two parts at least: XLA would see that a single part is the same in every round, and move what
        # only depends on it out of the loop.
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
        """Runs `local` on each device.

        Args:
            local: takes the state, and a device's rows of the batch.
            state: which all devices have.
            data: the batch.
            returned: for each thing that is returned, whether all devices have it; else it has a device's rows.
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


def _by_itself(values: Any, num_rounds: Tensor) -> Any:
    """These values, which XLA fuses with nothing that is made of them: it does not know that the loop has one round.

    How they are added up depends on the number of devices, and a norm of what it has just sliced has other last digits.
    """
    empty = jax.tree.map(jax.numpy.zeros_like, values)
    return jax.lax.fori_loop(0, jax.numpy.minimum(num_rounds, 1), lambda *_: values, empty)


class PartsStep(TrainStep):
    """A step on each replica's parts of a batch.

    Args:
        model: the model.
        reducers: each `CrossShard` of it.
    """

    stacks_windows = False
    is_reduced = True

    @property
    def _num_parts(self) -> int:
        return num_parts_of(self.model, self.model._keras_shardopt_reducers_of)

    def compiler_options(self) -> contextlib.AbstractContextManager[None]:
        """See `TrainStep.compiler_options`."""
        return compiled_alike(self.model, self._num_parts)

    def is_needed(self, distribution: Any, stacks: bool) -> bool:
        """Also on one device."""
        return True

    def computed(self, distribution: Any, state: Any, data: Any, stacks: bool) -> Computed:
        """See `TrainStep.computed`: metrics add up in one order on any number of devices."""
        arguments = (self.model, self.reducers[0], distribution, state, data, self._num_parts)
        grads, loss, y_pred, others, metrics = in_parts(*arguments)
        x, y, sample_weight = data
        y, sample_weight, y_pred = on_every_device((y, sample_weight, y_pred), distribution)
        return Computed(grads, loss, y_pred, others, metrics, (x, y, sample_weight))

    def test(self, real: Any, state: Any, data: Any) -> Any:
        """By parts where training is, so that its logs have the same bits."""
        model, distribution = self.model, keras.distribution.distribution()
        if type(model).test_step is not keras.Model.test_step:
            return real(state, data)
        data = x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        share_losses(model)
        loss, outputs, others, metrics = evaluated_in_parts(model, distribution, state, data, self._num_parts)
        y, sample_weight, outputs = on_every_device((y, sample_weight, outputs), distribution)
        logs, metrics = model._update_metrics_variables(metrics, loss, x, y, with_masks(*outputs), sample_weight)
        return logs, (state[0], others, metrics)


def _made(model: Any, reducers: list[Any]) -> TrainStep | None:
    return PartsStep(model, reducers) if are_cut(reducers) else None


register(_made)
