"""The JAX step of `VirtualReplicas`: a batch has a fixed number of parts, and each replica loops over its parts.

XLA fuses an operation with the operations around it, so the same operation rounds differently in different programs. A
loop body is compiled separately. Its shapes here do not depend on the number of replicas, so neither does its rounding.

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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import keras
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from keras.src.backend.common.masking import get_keras_mask

from keras_shardopt.backends.jax.communicator import MappedAxis, num_batch_shards, seed_offset
from keras_shardopt.backends.jax.runtime import OWN_GRADIENTS
from keras_shardopt.backends.scopes import assigning_nothing
from keras_shardopt.extensions.equal_bits.num_parts import num_parts_of
from keras_shardopt.extensions.equal_bits.parts import (
    CountingReplica,
    PartVariables,
    VirtualReplica,
    parts_of_each,
    with_divisors,
)
from keras_shardopt.extensions.equal_bits.stage import SumOfParts, first_found
from keras_shardopt.extensions.equal_bits.tree import Tree
from keras_shardopt.fit.calls import num_rows
from keras_shardopt.fit.jax.batches import padded
from keras_shardopt.fit.jax.convolutions import in_layout_of_kernels
from keras_shardopt.fit.jax.halves import on_every_device, with_masks, with_zeros, without_replica_state
from keras_shardopt.fit.jax.jitted import making_steps
from keras_shardopt.fit.jax.step import Computed, TrainStep
from keras_shardopt.fit.jax.uneven import share_of_part, without_padding
from keras_shardopt.numerics import Tensor
from keras_shardopt.update.losses import mean_losses, share_losses
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


class _Parts:
    """The parts of a batch: their rows, and the variables that they change."""

    def __init__(self, model: Any, distribution: Any, data: Any, num_parts: int) -> None:
        if distribution is None:  # use one device; pass `Auto`, because JAX 0.12 has another default
            self.axis, self._mesh = "batch", AbstractMesh((1,), ("batch",), (AxisType.Auto,))
        else:
            self.axis, self._mesh = distribution.batch_dim_name, distribution.device_mesh.backend_mesh
        self.num_parts = num_parts
        self.all_rows = num_rows(data)
        self.rows = -(-self.all_rows // num_parts)  # rows per part; padding rows repeat the first row
        self.each = parts_of_each(num_parts, num_batch_shards(distribution))
        others, metrics = model.non_trainable_variables, model.metrics_variables
        self._num_others = len(others)
        self.is_seed = [v.name == "seed_generator_state" for v in [*others, *metrics]]
        of_losses = [v for tracker in mean_losses(model) for v in tracker.variables]
        self.variables = PartVariables(others, metrics, of_losses)

    def divided(self, values: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Divide a list into the values of non-trainable and of metric variables."""
        return values[: self._num_others], values[self._num_others :]

    def run(self, local: Callable[..., tuple[Any, Any]], state: tuple[Any, ...], data: Any) -> tuple[Any, Any]:
        """Run `local` on each device. It takes `state`, equal on all devices, and a device's rows of the batch.

        It returns values that are equal on all devices, and tensors with one entry per row.
        """
        whole, divided = PartitionSpec(), PartitionSpec(self.axis)
        run = jax.shard_map(
            local,
            mesh=self._mesh,
            in_specs=(*[whole for _ in state], divided),
            out_specs=(whole, divided),
            check_vma=False,
        )
        equal, outputs = run(*state, padded(data, self.rows * self.num_parts - self.all_rows))
        return equal, jax.tree.map(lambda leaf: leaf[: self.all_rows], outputs)


class _Results(NamedTuple):
    """The results of one part of a batch, or of all parts of a device.

    These are tensors to sum over parts, the position of the first non-finite gradient (0: none; None: unchecked),
    values of which the last part's are kept, and tensors with one entry per row.
    """

    sums: Any
    found: Tensor | None = None
    last: Any = None
    outputs: Any = None


class _Loop:
    """Computes this device's parts of a batch one after another. Created in the function that runs on each device.

    `kept` has the values of non-trainable and metric variables before the batch, and `data` this device's rows.
    `counter` is a traced scalar that is never negative.
    """

    def __init__(self, parts: _Parts, kept: Sequence[Tensor], data: Any, counter: Tensor) -> None:
        self._parts, self._kept, self._data = parts, kept, data
        self.replicas = MappedAxis(parts.axis)
        # Make the number of parts a traced value. XLA would unroll a loop of constant length, and fuse its iterations.
        self.num_rounds = jax.numpy.where(counter >= 0, parts.each, 0)

    def run(self, of_part: Callable[..., Any], forward: Callable[..., Any]) -> tuple[Any, ...]:
        """Compute all parts.

        `of_part` takes a part, the values of non-trainable and of metric variables at its start, and its rows. It
        returns gradients, the position of the first that is not finite, the loss, tensors with one entry per row, and
        the new values of the variables. `forward` takes these values and the rows, and computes only the loss.

        Returns:
            The gradients, the position, and the tensors of this device's parts. Then a list: the loss of the whole
            batch, and the new values of the variables.
        """
        parts, variables, tree = self._parts, self._parts.variables, Tree(self.replicas, self._parts.num_parts)

        def counted(index: Tensor, num_rows: int, own: Any) -> _Results:
            part = CountingReplica(index, parts.num_parts)
            with batch_shared(share_of_part(num_rows, parts.all_rows, part)):
                forward(*parts.divided(self._starts(index)), *own)
            return _Results(part.counts)

        def computed(divisors: Sequence[Tensor], index: Tensor, num_rows: int, own: Any) -> _Results:
            part, starts = VirtualReplica(index, parts.num_parts, divisors), self._starts(index)
            with batch_shared(share_of_part(num_rows, parts.all_rows, part)):
                grads, found, loss, outputs, (others, metrics) = of_part(part, parts.divided(starts), own)
            after = [None if new is old else new for old, new in zip(starts, [*others, *metrics])]
            changes, last = variables.ends(starts, after, num_rows)
            last = [v if v is None or not seed else v - seed_offset(index) for v, seed in zip(last, parts.is_seed)]
            return _Results((grads, loss, changes), found, last, outputs)

        whole, _ = with_divisors(
            lambda divisors: self._over_parts(functools.partial(computed, divisors)),
            lambda: tree.total(self._over_parts(counted).sums),
        )
        grads, loss, changes = whole.sums
        loss, *totals = tree.total([loss, *changes])
        settled = variables.settled(self._kept, totals, whole.last, num_parts=-(-parts.all_rows // parts.rows))
        after = [old if new is None else new for old, new in zip(self._kept, settled)]
        return grads, whole.found, whole.outputs, [loss / parts.num_parts, *after]

    def _starts(self, index: Tensor) -> list[Tensor]:
        """Return the values of variables at the start of a part. Seeds depend on its index."""
        starts = zip(self._parts.variables.starts(self._kept), self._parts.is_seed)
        return [value + seed_offset(index) if seed else value for value, seed in starts]

    def _over_parts(self, of_part: Callable[[Tensor, int, Any], _Results]) -> _Results:
        """Call `of_part` with the index, the number of rows and the rows of each part, and combine the results."""
        parts, data = self._parts, self._data
        each, rows = parts.each, parts.rows
        first = self.replicas.replica_id * each

        def add(i: Tensor, before: Any) -> Any:
            levels, found_before, _, outputs = before
            own = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, i * rows, rows), data)
            part = of_rows(first + i, own)
            level = jax.lax.population_count(i ^ (i + 1)) - 1  # the number of trailing 1 bits of i
            total = jax.lax.fori_loop(
                0, level, lambda j, total: jax.tree.map(lambda sums, more: sums[j] + more, levels, total), part.sums
            )
            levels = jax.tree.map(lambda sums, more: sums.at[level].set(more), levels, total)
            outputs = jax.tree.map(
                lambda whole, own: jax.lax.dynamic_update_slice_in_dim(whole, own, i * rows, 0), outputs, part.outputs
            )
            found = None if part.found is None else first_found(found_before, part.found)
            return _Results(levels, found, part.last, outputs)

        first_rows = jax.tree.map(lambda leaf: leaf[:rows], data)
        shapes = jax.eval_shape(lambda index, own: of_part(index, rows, own), jax.numpy.int32(0), first_rows)
        number = (parts.all_rows, parts.num_parts)
        of_rows = in_layout_of_kernels(
            lambda index, own: without_padding(functools.partial(of_part, index), index, *number, own, shapes)
        )
        # Give the loop arrays for at least two parts. With arrays for one part, XLA moves computations out of the loop.
        num_levels = max(2, each.bit_length())
        if each == 1:
            data = jax.tree.map(lambda leaf: jax.numpy.concatenate([leaf, leaf]), data)
        zeros = jax.numpy.zeros
        empty = _Results(
            jax.tree.map(lambda sums: zeros((num_levels, *sums.shape), sums.dtype), shapes.sums),
            jax.tree.map(lambda value: zeros(value.shape, value.dtype), shapes.found),
            jax.tree.map(lambda value: zeros(value.shape, value.dtype), shapes.last),
            jax.tree.map(lambda leaf: zeros((each * leaf.shape[0], *leaf.shape[1:]), leaf.dtype), shapes.outputs),
        )
        whole = jax.lax.fori_loop(0, self.num_rounds, add, empty)
        return whole._replace(sums=jax.tree.map(lambda sums: sums[each.bit_length() - 1], whole.sums))


def _not_fused(values: Any, num_rounds: Tensor) -> Any:
    """Pass values through a loop (one iteration, but XLA cannot prove it), so XLA cannot fuse them with later code.

    The code that reduces the values depends on the number of devices. If XLA fused a norm into this code, the norm's
    rounding would depend on that number too.
    """
    empty = jax.tree.map(jax.numpy.zeros_like, values)
    return jax.lax.fori_loop(0, jax.numpy.minimum(num_rounds, 1), lambda *_: values, empty)


@contextlib.contextmanager
def _own_gradients(optimizer: Any, state: Any) -> Iterator[Any]:
    """In the block, the optimizer's variables have the values `state`; assignments raise. Yield the loss scale."""
    with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, state))):
        scale = optimizer.scale_loss(1.0)
        with assigning_nothing(OWN_GRADIENTS):
            yield scale


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
        model, (cross_shard,) = self.model, self.cross_shards
        optimizer, variables = model.optimizer, model.trainable_variables
        parts = _Parts(model, distribution, data, self._num_parts)
        (stage,) = SumOfParts.found_in([cross_shard])
        iterations = [v is optimizer.iterations for v in optimizer.variables].index(True)
        weights, others, optimizer_state, metrics = state
        optimizer_state = without_replica_state(cross_shard, optimizer.variables, optimizer_state)

        def local(weights: Any, kept: Any, optimizer_state: Any, data: Any) -> Any:
            optimizer_state = with_zeros(optimizer.variables, optimizer_state)
            arguments = {"training": True, "optimizer_variables": optimizer_state}
            forward = functools.partial(model.compute_loss_and_updates, weights, **arguments)
            with_gradients = jax.value_and_grad(model.compute_loss_and_updates, has_aux=True)

            def of_part(part: VirtualReplica, starts: Any, own: Any) -> tuple[Any, ...]:
                (_, (loss, y_pred, *changed)), grads = with_gradients(weights, *starts, *own, **arguments)
                with _own_gradients(optimizer, optimizer_state) as scale:
                    local_step = Step(grads, variables, row_share=row_share(), loss_scale=scale)
                    grads, found = stage.of_part(local_step, part)
                return grads, found, loss, y_pred, changed

            loop = _Loop(parts, kept, data, counter=optimizer_state[iterations])
            grads, found, y_pred, after = loop.run(of_part, forward)
            with _own_gradients(optimizer, optimizer_state) as scale:
                reduced = stage.reduced(Step(grads, variables, loss_scale=scale, found_inf=found), loop.replicas)
            grads = _not_fused(reduced.grads, loop.num_rounds), reduced.found_inf, dict(reduced.notes)
            return (grads, after), y_pred

        (grads, (loss, *after)), y_pred = parts.run(local, (weights, [*others, *metrics], optimizer_state), data)
        x, y, sample_weight = data
        y, sample_weight, y_pred = on_every_device((y, sample_weight, y_pred), distribution)
        return Computed(grads, loss, y_pred, *parts.divided(after), (x, y, sample_weight))

    def test(self, real: Any, state: Any, data: Any) -> Any:
        """Evaluate each part of a batch, so logs do not depend on the number of devices. A custom step runs `real`."""
        model, distribution = self.model, keras.distribution.distribution()
        if model.__class__.test_step is not keras.Model.test_step:
            return real(state, data)
        data = x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        share_losses(model)
        parts = _Parts(model, distribution, data, self._num_parts)
        weights, others, metrics = state
        count = [v is mean_losses(model)[0].count for v in model.metrics_variables].index(True)

        def local(weights: Any, kept: Any, data: Any) -> Any:
            forward = functools.partial(model.compute_loss_and_updates, weights, training=False)

            def of_part(part: VirtualReplica, starts: Any, own: Any) -> tuple[Any, ...]:
                _, (loss, y_pred, *changed) = forward(*starts, *own)
                # Return masks separately, because JAX drops them from arrays, but metrics use them.
                return [], None, loss, (y_pred, [get_keras_mask(leaf) for leaf in jax.tree.leaves(y_pred)]), changed

            _, _, outputs, after = _Loop(parts, kept, data, counter=kept[len(others) + count]).run(of_part, forward)
            return after, outputs

        (loss, *after), outputs = parts.run(local, (weights, [*others, *metrics]), data)
        others, metrics = parts.divided(after)
        y, sample_weight, outputs = on_every_device((y, sample_weight, outputs), distribution)
        logs, metrics = model._update_metrics_variables(metrics, loss, x, y, with_masks(*outputs), sample_weight)
        return logs, (weights, others, metrics)
