"""`VirtualReplicas` makes results independent of the number of replicas: it sums parts of batches in a fixed order.

The number of replicas changes the rounding of a gradient in two ways: kernels sum a different number of rows, and the
all-reduce sums a different number of replicas. Therefore every batch is divided into a fixed number of parts. A replica
computes its parts one after another, with the same shapes, and sums their gradients in its subtree of a fixed binary
tree. Then an all-to-all gives each replica one slice of the sums of all subtrees. The replica adds them, and an
all-gather returns the totals (`Tree`). This sends as many bytes as a ring all-reduce.

Integers with a shared exponent could also be summed in any order with the same result. But a tree propagates NaN and
infinity, keeps the range of the dtype, and does not have to find a common exponent first. Its disadvantage: the numbers
of parts and of replicas must be powers of two.

A trainer declares its current part (`PartOfBatch`) with `batch_shared`, and calls `apply` for each part. The other
code of an optimizer handles parts like micro-batches: only the last part updates, with the gradients of all parts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

from keras import ops

from keras_shardopt.backends import for_backend
from keras_shardopt.backends.active import runtime
from keras_shardopt.backends.communicator import Communicator, GradientState
from keras_shardopt.numerics import Gradients, ReduceOp, Tensor, Variable, dense, dtype_of, overwrites_variable
from keras_shardopt.update.context import StageContext
from keras_shardopt.update.extension import ExtensionStage
from keras_shardopt.update.parts import CountingPart, NotCountedError, PartOfBatch
from keras_shardopt.update.reducers import AllReduce
from keras_shardopt.update.row_weights import zero_without_rows
from keras_shardopt.update.step import Proceed, Step
from keras_shardopt.update.trainer_context import current_share
from keras_shardopt.update.transport import Transport

_SMALL = 2**14
"""Up to this number of elements, each replica gathers and adds the sums of all replicas: one collective, not two."""


# TensorFlow only (otherwise None), where replicas are devices of one process: sums each tensor separately.
_devices = for_backend({"tensorflow": "keras_shardopt.backends.tensorflow.communicator"})


class _NoExchange:
    def _raise_not_counted(self) -> NoReturn:
        raise NotCountedError(
            "`VirtualReplicas` computes the parts of a batch one after another, so a layer or loss cannot use values "
            "of other parts. Received: a synchronized `BatchNormalization`; or, in a custom `train_step`, a custom "
            'loss, or a loss with a mask or `reduction="mean_with_sample_weight"`. Use the built-in `train_step`, '
            'sample weights instead of the mask, a Keras loss or `reduction="sum"`, or remove `VirtualReplicas`.'
        )


class VirtualReplica(_NoExchange, PartOfBatch):
    """One part of a batch. Losses and gradient code treat the part as a replica, with this object as communicator."""


class CountingReplica(_NoExchange, CountingPart):
    """One part of a batch in a forward pass that only computes the divisors of losses, such as the sum of a mask."""


def current_part() -> PartOfBatch | None:
    """Return the part of a batch that the trainer is computing, or None."""
    share = current_share()
    part = None if share is None else share.replicas
    return part if isinstance(part, PartOfBatch) else None


def parts_of_replica(num_parts: int, replicas: Communicator) -> range:
    """Return the indices of this replica's parts of every batch."""
    number = parts_of_each(num_parts, replicas.num_replicas)
    return range(replicas.replica_id * number, (replicas.replica_id + 1) * number)


def parts_of_each(num_parts: int, num_replicas: int) -> int:
    """Return the number of parts of each batch that one replica computes.

    Raises:
        ValueError: if `num_parts` is not a multiple of `num_replicas`.
    """
    if num_parts % num_replicas:
        raise ValueError(
            "The number of `VirtualReplicas` must be a multiple of the number of replicas. "
            f"Received: VirtualReplicas({num_parts}), with {num_replicas} replicas. Use 1, 2, 4, ... or {num_parts} "
            "replicas, or remove `VirtualReplicas`."
        )
    return num_parts // num_replicas


class Subtrees:
    """Sums the tensors of a replica's parts of a batch in a binary tree."""

    def __init__(self) -> None:
        self._sums: list[tuple[int, list[Tensor | None]]] = []

    def add(self, tensors: Sequence[Tensor | None]) -> None:
        """Add the tensors of the next part of the batch. None counts as zero."""
        size, total = 1, list(tensors)
        while self._sums and self._sums[-1][0] == size:
            total = [_sum(a, b) for a, b in zip(self._sums.pop()[1], total)]
            size *= 2
        self._sums.append((size, total))

    def take(self) -> list[Tensor | None]:
        """Return the sum over all calls of `add`, and start a new sum. The number of calls must be a power of two."""
        ((_, total),) = self._sums
        self._sums = []
        return total


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return ops.add(a, b)


class Tree(Communicator):
    """A communicator that sums tensors over replicas in a binary tree, after each replica has summed its parts.

    Args:
        replicas: the replicas.
        num_parts: the number of parts of a batch, on all replicas together. Means divide by this number.
    """

    def __init__(self, replicas: Communicator, num_parts: int) -> None:
        self._replicas = replicas
        self.num_parts = num_parts
        self.num_replicas = replicas.num_replicas
        self.replica_id = replicas.replica_id
        self.is_spmd = replicas.is_spmd
        self.is_multi_process = replicas.is_multi_process

    def gradient_state(self, grads: Gradients, variables: Sequence[Variable]) -> GradientState:
        """Return `LOCAL`: each replica passes its own gradients, which are not reduced yet."""
        return GradientState.LOCAL

    def all_gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Concatenate the flat tensors of all replicas."""
        return self._replicas.all_gather(tensors)

    def all_reduce(self, tensors: Sequence[Tensor], op: ReduceOp) -> list[Tensor]:
        """Sum or average tensors over replicas, in the same order of additions for any number of replicas."""
        if op == "max":
            return self._replicas.all_reduce(tensors, op)
        factor = 1 / self.num_parts if op == "mean" else 1  # does not round: `num_parts` is a power of two
        if _devices is not None and isinstance(self._replicas, _devices.ReplicaContext):
            totals: list[Tensor] = self._replicas.all_reduce_in_tree(tensors, factor)
            return totals
        result: list[Tensor] = [None] * len(tensors)
        by_dtype: dict[str, list[int]] = {}
        for i, tensor in enumerate(tensors):
            by_dtype.setdefault(dtype_of(tensor), []).append(i)
        for indices in by_dtype.values():
            total = self._total([tensors[i] for i in indices])
            if factor != 1:
                total = ops.multiply(total, factor)
            start = 0
            for i in indices:
                size = functools.reduce(int.__mul__, tensors[i].shape, 1)
                result[i] = _reshaped(total[start : start + size], tensors[i].shape)
                start += size
        return result

    def _total(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the totals of `tensors` over replicas, flattened and concatenated to one tensor."""
        flat = ops.concatenate([_reshaped(tensor, (-1,)) for tensor in tensors])
        size, length = self.num_replicas, flat.shape[0]
        if size == 1:
            return flat
        if length <= _SMALL:
            (everyones,) = self._replicas.all_gather([flat])
            return _tree_sum(_reshaped(everyones, (size, -1)))
        if length % size:
            flat = ops.concatenate([flat, ops.zeros((-length % size,), dtype_of(flat))])
        (everyones,) = self._replicas.all_to_all([flat])
        (total,) = self._replicas.all_gather([_tree_sum(_reshaped(everyones, (size, -1)))])
        return total[:length]


def _reshaped(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Reshape a tensor with its method `reshape`, if any. On PyTorch, `ops.reshape` takes longer than a small sum."""
    return tensor.reshape(shape) if hasattr(tensor, "reshape") else ops.reshape(tensor, shape)


def _tree_sum(rows: Tensor) -> Tensor:
    """Sum the rows of a tensor in a binary tree. The number of rows must be a power of two."""
    while rows.shape[0] > 1:
        rows = ops.add(rows[::2], rows[1::2])
    return rows[0]


class SumOfParts(ExtensionStage):
    """Sums the gradients of this replica's parts of a batch, then continues the update with the sum over replicas."""

    keeps_bits = True

    def __init__(self, num_parts: int, context: StageContext) -> None:
        self.num_parts = num_parts
        self._context = context
        self._optimizer = context.optimizer
        self._reducer: AllReduce | None = None
        self._subtrees = Subtrees()
        self._found: Any = None
        self._next: int | None = None

    def _check_outside(self, outer: Any) -> None:
        """Raise ValueError, because `outer`, a loss-scaling optimizer, must be inside `CrossShard`, not around it."""
        name = type(outer).__name__
        raise ValueError(
            f"`{name}` must be inside a `CrossShard` with `VirtualReplicas`, not around the `CrossShard`. Outside, "
            f"`{name}` would skip single parts of a batch, and change the loss scale after each part. Received: "
            f"inner_optimizer={outer.inner!r}. Use `CrossShard({name}(inner_optimizer), "
            "extensions=[VirtualReplicas(...)])`."
        )

    def collect(self, step: Step, proceed: Proceed) -> None:
        """Add the gradients of one part of the batch to a sum. After the last part, call `proceed`, the update."""
        if self._optimizer.pipeline.resumed.is_reduced:  # a trainer has already called `reduced`
            proceed(step)
        else:
            runtime.no_compile(self._collect, step, proceed)

    def _collect(self, step: Step, proceed: Proceed) -> None:
        comm, part = runtime.communicator(self._optimizer.axis_name), current_part()
        parts_of_each(self.num_parts, comm.num_replicas)
        if part is None or part.num_replicas != self.num_parts or step.is_reduced:
            raise ValueError(
                "`VirtualReplicas` needs `fit` or `train_on_batch` of a model passed to `keras_shardopt.prepare`, "
                f"because these methods divide batches into parts. Received: {self._optimizer!r} in another step. Call "
                "`keras_shardopt.prepare(model)` after `compile`. In a custom training loop, remove `VirtualReplicas`."
            )
        if part.is_first:
            self._next = int(part.replica_id)
        if self._next != int(part.replica_id):
            raise ValueError(
                "`VirtualReplicas` needs a `train_step` that updates once, as the built-in one does. Received: several "
                f"updates, or none, in part {self._next} of a batch. Remove `VirtualReplicas`."
            )
        self._next += 1
        # With one replica, `comm` would treat the gradients of a part as already reduced. `part` treats them as local.
        state = self._optimizer.state_finder.find(step, part if comm.num_replicas == 1 else comm)
        if state is not GradientState.LOCAL:
            raise ValueError(
                "`VirtualReplicas` needs each replica's own gradients. Received: gradients that are already averaged "
                "over the replicas. Remove `DistributedDataParallel`."
            )
        self.add(step, part)
        if part.is_last:
            found, self._found = self._found, None
            proceed(self.reduced(step.replace(grads=self._subtrees.take(), found_inf=found), comm))

    def add(self, step: Step, part: PartOfBatch) -> None:
        """Add the gradients of the next part of the batch to the sum over this replica's parts."""
        if part.is_first:
            self._subtrees, self._found = Subtrees(), None
        grads, found = self.of_part(step, part)
        if found is not None:
            self._found = found if self._found is None else first_found(self._found, found)
        self._subtrees.add(grads)

    def of_part(self, step: Step, part: PartOfBatch) -> tuple[list[Tensor | None], Tensor | None]:
        """Return the gradients of one part of a batch, and the position of the first non-finite gradient or None."""
        return self.weighted(self.after_local(step, part))

    def after_local(self, step: Step, part: PartOfBatch) -> Step:
        """Run the method `local` of all stages, such as clipping by `replica_clipnorm`, on one part of the batch."""
        step = step.replace(gradient_state=GradientState.LOCAL)
        for stage in self._optimizer.pipeline.stages:
            step = stage.local(step, part)
        return step

    def weighted(self, step: Step) -> tuple[list[Tensor | None], Tensor | None]:
        """Return gradients (0 if the part of the batch has no rows) and `found_inf` (which one is not finite)."""
        step = zero_without_rows(step)
        return [_dense(grad, variable) for grad, variable in zip(step.grads, step.variables)], step.found_inf

    def reduced(self, step: Step, comm: Communicator) -> Step:
        """Sum the gradients of `step` over replicas. On each replica, these are sums over its parts of the batch."""
        if self._reducer is None:
            self._reducer = AllReduce(self._context, self._optimizer._options, Transport())
        whole = step.replace(gradient_state=GradientState.LOCAL, weight=1.0, row_share=1.0)
        return self._reducer.reduce(whole, Tree(comm, self.num_parts)).replace(is_reduced=True)

    def reset(self) -> None:
        """Forget which part of an unfinished batch is next."""
        self._next = None


def _dense(grad: Tensor | None, variable: Variable) -> Tensor | None:
    if grad is not None and overwrites_variable(variable):
        raise ValueError(
            "`VirtualReplicas` does not support float8, because values of float8 variables cannot be summed as "
            f"gradients. Received: the float8 variable `{variable.path}`. Remove `VirtualReplicas`."
        )
    return None if grad is None else dense(grad, variable)


def first_found(found: Tensor, next_one: Tensor) -> Tensor:
    """Combine the positions of the first non-finite gradient in two parts of a batch (0: all gradients are finite)."""
    return ops.where(found > 0, found, next_one)
