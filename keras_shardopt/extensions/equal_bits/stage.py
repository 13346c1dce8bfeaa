"""Equal bits on any number of replicas: each batch is cut into parts, which are added up in an order of their own.

The number of replicas changes the last bits of a gradient in two ways: kernels add up the rows of a batch in an order
that depends on how many there are, and an all-reduce adds up replicas in an order that depends on how many these are.
So every batch is cut into `virtual_replicas` parts, whatever there is to work on them; a replica computes its parts one
after another, each with the kernels of its shape; and parts are added up in one fixed binary tree: what a replica has
of it by itself, the rest after an exchange in which each replica gets a slice of all sums, as in a reduce-scatter, and
from each slice's replica its total (`Tree`). That takes as many bytes as a ring.

A tree, and not an exact sum of integers with a shared exponent, of which the order would not matter at all: a tree
rounds as floating-point sums do, lets NaN and infinity through, keeps the range of the dtype, and needs no reduction
to agree on exponents first. Its price is that there are powers of two of both.

A trainer says by `batch_shared` which part it works on (`PartOfBatch`), and calls `apply` for each. To everything else
parts are micro-batches of which the last one brings the reduced gradients of all.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from keras import ops

from keras_shardopt.backends import for_backend
from keras_shardopt.backends.active import placement, runtime
from keras_shardopt.backends.communicator import Communicator, GradientState
from keras_shardopt.numerics import Gradients, ReduceOp, Tensor, Variable, dense, dtype_of, overwrites_variable
from keras_shardopt.update.context import StageContext
from keras_shardopt.update.extension import Extension
from keras_shardopt.update.options import CrossShardOptions
from keras_shardopt.update.parts import CountingPart, PartOfBatch
from keras_shardopt.update.reducers import AllReduce
from keras_shardopt.update.row_weights import weighted_by_rows
from keras_shardopt.update.step import Proceed, Stage, Step
from keras_shardopt.update.trainer_context import current_share
from keras_shardopt.update.transport import Transport
from keras_shardopt.wrapping.chain import descendants

_SMALL = 2**14
"""How many elements are sent whole to every replica, which adds them up by itself: one exchange in place of two."""


# Where replicas are devices of one process, whose gradients are added up without an exchange of flat ones.
_devices = for_backend({"tensorflow": "keras_shardopt.backends.tensorflow.communicator"})


_REFUSAL = (
    "`virtual_replicas` works on the parts of a batch one after another, so that none can wait for numbers of "
    "the others. Received: a layer or loss that does: a synchronized `BatchNormalization`; or, in a custom "
    '`train_step`, a loss with a mask or `reduction="mean_with_sample_weight"`, or a loss that is not '
    "one of Keras' own. Use the built-in `train_step`, sample weights in place of the mask, a loss of Keras or "
    '`reduction="sum"`, or leave `virtual_replicas` out.'
)


class VirtualReplica(PartOfBatch):
    """A part of a batch on its replica."""

    _refusal = _REFUSAL


class CountingReplica(CountingPart):
    """A part of a batch whose losses are only counted."""

    _refusal = _REFUSAL


def current_part() -> PartOfBatch | None:
    """The virtual replica whose part of a batch the trainer works on, or None."""
    share = current_share()
    part = None if share is None else share.replicas
    return part if isinstance(part, PartOfBatch) else None


def own_parts(num_parts: int, replicas: Communicator) -> range:
    """Which parts of every batch this replica works on."""
    number = parts_of_each(num_parts, replicas.num_replicas)
    return range(replicas.replica_id * number, (replicas.replica_id + 1) * number)


def parts_of_each(num_parts: int, num_replicas: int) -> int:
    """How many parts of every batch each replica works on.

    Raises:
        ValueError: if they cannot have equally many.
    """
    if num_parts % num_replicas:
        raise ValueError(
            "`virtual_replicas` must be a multiple of the number of replicas, so that each works on as many parts. "
            f"Received: virtual_replicas={num_parts}, with {num_replicas} replicas. Start 1, 2, 4, ... or {num_parts} "
            "of them, or leave `virtual_replicas` out."
        )
    return num_parts // num_replicas


class Subtrees:
    """Adds up the parts of one replica in their order, as the nodes of a binary tree over all parts.

    It holds as many sums as the number of parts so far has binary digits that are 1.
    """

    def __init__(self) -> None:
        self._sums: list[tuple[int, list[Tensor | None]]] = []

    def add(self, tensors: Sequence[Tensor | None]) -> None:
        """Adds those of the next part, None for what it does not have."""
        size, total = 1, list(tensors)
        while self._sums and self._sums[-1][0] == size:
            total = [_sum(a, b) for a, b in zip(self._sums.pop()[1], total)]
            size *= 2
        self._sums.append((size, total))

    def take(self) -> list[Tensor | None]:
        """The sum over all parts, which are a power of two. It is forgotten here."""
        ((_, total),) = self._sums
        self._sums = []
        return total


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return ops.add(a, b)


class Tree(Communicator):
    """Replicas whose sums, each of equally many parts, are added up in a binary tree.

    Args:
        replicas: the replicas.
        num_parts: how many parts they have together, which a mean divides by.
    """

    def __init__(self, replicas: Communicator, num_parts: int) -> None:
        self._replicas = replicas
        self._num_parts = num_parts
        self.num_replicas = replicas.num_replicas
        self.replica_id = replicas.replica_id
        self.is_spmd = replicas.is_spmd
        self.is_multi_process = replicas.is_multi_process

    def gradient_state(self, grads: Gradients, variables: Sequence[Variable]) -> GradientState:
        """Of each replica its own."""
        return GradientState.LOCAL

    def all_gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See `Communicator.all_gather`."""
        return self._replicas.all_gather(tensors)

    def all_reduce(self, tensors: Sequence[Tensor], op: ReduceOp) -> list[Tensor]:
        """See `Communicator.all_reduce`."""
        if op == "max":
            return self._replicas.all_reduce(tensors, op)
        factor = 1 / self._num_parts if op == "mean" else 1  # exact, as it is a power of two
        if _devices is not None and isinstance(self._replicas, _devices.ReplicaContext):
            totals: list[Tensor] = self._replicas.all_reduce_in_tree(tensors, factor)
            return totals
        result: list[Tensor] = [None] * len(tensors)
        alike: dict[str, list[int]] = {}
        for i, tensor in enumerate(tensors):
            alike.setdefault(dtype_of(tensor), []).append(i)
        for indices in alike.values():
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
        """The total of these tensors, flat and one after another."""
        flat = ops.concatenate([_reshaped(tensor, (-1,)) for tensor in tensors])
        size, length = self.num_replicas, flat.shape[0]
        if size == 1:
            return flat
        if length <= _SMALL:
            (everyones,) = self._replicas.all_gather([flat])
            return _added_up(_reshaped(everyones, (size, -1)))
        if length % size:
            flat = ops.concatenate([flat, ops.zeros((-length % size,), dtype_of(flat))])
        (everyones,) = self._replicas.all_to_all([flat])
        (total,) = self._replicas.all_gather([_added_up(_reshaped(everyones, (size, -1)))])
        return total[:length]


def _reshaped(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """As `ops.reshape`, which takes longer on PyTorch than a small sum."""
    return tensor.reshape(shape) if hasattr(tensor, "reshape") else ops.reshape(tensor, shape)


def _added_up(rows: Tensor) -> Tensor:
    """The sum of rows, of which there are a power of two, in a binary tree."""
    while rows.shape[0] > 1:
        rows = ops.add(rows[::2], rows[1::2])
    return rows[0]


class VirtualReplicas(Extension):
    """Adds up the gradients of this replica's parts of a batch, and lets the total of all replicas proceed.

    Args:
        num_parts: how many parts a batch has.
        optimizer: the `CrossShard`.
    """

    keeps_bits = True

    def __init__(self, num_parts: int, optimizer: Any) -> None:
        self._num_parts = num_parts
        self._optimizer = optimizer
        self._reducer: AllReduce | None = None
        self._subtrees = Subtrees()
        self._found: Any = None
        self._next: int | None = None

    @classmethod
    def from_options(cls, options: CrossShardOptions, context: StageContext) -> list[Stage]:
        """The stage, where the options ask for it."""
        optimizer = context.optimizer
        if options.virtual_replicas is None:
            return []
        if options.shard_state and placement.state_sharding != "layout":
            for inside in descendants(optimizer):
                if getattr(inside, "_adds_up_slices", False):
                    raise ValueError(
                        "`virtual_replicas` adds up in one order on any number of replicas, and where `shard_state` "
                        "divides state into slices, a norm over all gradients is added up slice by slice. "
                        f"Received: {inside!r}, with virtual_replicas={options.virtual_replicas}, shard_state=True. "
                        "Leave one of the three out."
                    )
        return [cls(options.virtual_replicas, optimizer)]

    def check_outside(self, outer: Any) -> None:
        """See `Extension.check_outside`: a loss scaling must be inside."""
        name = type(outer).__name__
        raise ValueError(
            f"`{name}` must be inside a `CrossShard` with `virtual_replicas`, not around it: outside it sees the "
            "parts of a batch one after another, would skip single ones, and change its scale after each. "
            f"Received: inner_optimizer={outer.inner!r}. "
            f"Use `CrossShard({name}(inner_optimizer), virtual_replicas=...)`."
        )

    def collect(self, step: Step, proceed: Proceed) -> None:
        """Adds up, and proceeds with the last part of this replica."""
        if self._optimizer.pipeline.resumed.is_reduced:  # a trainer has called `reduced` by itself
            proceed(step)
        else:
            runtime.no_compile(self._collect, step, proceed)

    def _collect(self, step: Step, proceed: Proceed) -> None:
        comm, part = runtime.communicator(self._optimizer.axis_name), current_part()
        parts_of_each(self._num_parts, comm.num_replicas)
        if part is None or part.num_replicas != self._num_parts or step.is_reduced:
            raise ValueError(
                "`virtual_replicas` needs `fit` or `train_on_batch` of a prepared model, which cut each batch into "
                f"parts. Received: {self._optimizer!r} in a step that does not. Compile the model inside "
                "`with keras_shardopt.data_parallel():`, or call `keras_shardopt.prepare(model)` after `compile`; in a "
                "custom training loop leave `virtual_replicas` out."
            )
        if part.is_first:
            self._next = int(part.replica_id)
        if self._next != int(part.replica_id):
            raise ValueError(
                "`virtual_replicas` needs a `train_step` that updates once with each optimizer, as Keras' own does. "
                f"Received: several updates, or none, in part {self._next} of a batch. Leave `virtual_replicas` out."
            )
        self._next += 1
        # Of the parts of a single replica everything is its own.
        state = self._optimizer.state_finder.find(step, part if comm.num_replicas == 1 else comm)
        if state is not GradientState.LOCAL:
            raise ValueError(
                "`virtual_replicas` needs the gradients of each replica, before they are reduced. Received: gradients "
                "that are global already. Leave out `DistributedDataParallel`."
            )
        self.add(step, part)
        if part.is_last:
            found, self._found = self._found, None
            proceed(self.reduced(step.replace(grads=self._subtrees.take(), found_inf=found), comm))

    def add(self, step: Step, part: PartOfBatch) -> None:
        """Adds the gradients of the next part to those of the others on this replica."""
        if part.is_first:
            self._subtrees, self._found = Subtrees(), None
        grads, found = self.of_part(step, part)
        if found is not None:
            self._found = found if self._found is None else first_found(self._found, found)
        self._subtrees.add(grads)

    def of_part(self, step: Step, part: PartOfBatch) -> tuple[list[Tensor | None], Tensor | None]:
        """The gradients of a part as they are added up, and what was found in them."""
        return self.weighted(self.seen(step, part))

    def seen(self, step: Step, part: PartOfBatch) -> Step:
        """The step of a part when all stages that look at a replica's own gradients have."""
        step = step.replace(gradient_state=GradientState.LOCAL)
        for stage in self._optimizer.pipeline.stages:
            step = stage.local(step, part)
        return step

    def weighted(self, step: Step) -> tuple[list[Tensor | None], Tensor | None]:
        """See `of_part`, of a step that stages have seen."""
        step = weighted_by_rows(step)
        return [_dense(grad, variable) for grad, variable in zip(step.grads, step.variables)], step.found_inf

    def reduced(self, step: Step, comm: Communicator) -> Step:
        """The step of the last part with the gradients of all parts of all replicas.

        Args:
            step: with the sums over the parts of this replica.
            comm: all replicas.
        """
        if self._reducer is None:
            self._reducer = AllReduce(StageContext(self._optimizer), self._optimizer._options, Transport())
        whole = step.replace(gradient_state=GradientState.LOCAL, weight=1.0, row_share=1.0)
        return self._reducer.reduce(whole, Tree(comm, self._num_parts)).replace(is_reduced=True)

    def reset(self) -> None:
        """Forgets the parts of a batch that was not finished."""
        self._next = None


def _dense(grad: Tensor | None, variable: Variable) -> Tensor | None:
    if grad is not None and overwrites_variable(variable):
        raise ValueError(
            "`virtual_replicas` adds up gradients. Received: the next value of "
            f"`{variable.path}` in place of a gradient, as float8 has it. Leave `virtual_replicas` out."
        )
    return None if grad is None else dense(grad, variable)


def first_found(found: Tensor, next_one: Tensor) -> Tensor:
    """The position of the first gradient that is not finite, in the first part that has one."""
    return ops.where(found > 0, found, next_one)
