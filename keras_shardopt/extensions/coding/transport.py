"""How encoded gradients are reduced: `Coded` runs one reduction, and `CodedTransport` stores variables in between."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import keras
from keras import ops

from keras_shardopt.backends import for_backend
from keras_shardopt.backends.active import placement
from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.backends.traffic import Kind
from keras_shardopt.backends.user_warnings import warn
from keras_shardopt.extensions.coding.codecs import CodedInTwoLegs, Compression, PowerSGD, Reduced, joined, split
from keras_shardopt.numerics import Optimizer, ReduceOp, Tensor, Variable, cast, dense, dtype_of, overwrites_variable
from keras_shardopt.update.context import StageContext
from keras_shardopt.update.nonfinite import largest_of_all
from keras_shardopt.update.reduction import Reduction
from keras_shardopt.update.step import Step
from keras_shardopt.update.transport import InHalf, Rows, Transfer, Transport
from keras_shardopt.update.units import is_one
from keras_shardopt.wrapping.chain import base_optimizers

_FACTOR = "compression_factor_"
"""Prefix of the keys of `PowerSGD` matrices in the dict `Step.notes`. The index of the variable follows."""

# Set on TensorFlow only, to refuse a warm-up of `PowerSGD`: collectives cannot run inside a branch of `cond` there.
_strategies = for_backend({"tensorflow": "keras_shardopt.backends.tensorflow.communicator"})

# PyTorch only: sends encoded gradients during the backward pass.
_early = for_backend({"torch": "keras_shardopt.extensions.coding.torch"})


def transport_of(codec: Compression, context: StageContext) -> Transport:
    """Return the object that sends gradients with this codec."""
    if codec.sum_dtype is not None:
        return InHalf(codec.sum_dtype)
    return CodedTransport(codec, context)


class CodedTransport(Transport):
    """Stores residuals (compression errors to add to the next gradients) and factors (matrices of `PowerSGD`)."""

    divides_along_axes = False
    early_in_slices = False
    buckets = None if _early is None else staticmethod(_early.coded)

    def __init__(self, codec: Compression, context: StageContext) -> None:
        self.codec = codec
        self.residuals: list[Variable] = []
        """This replica's compression errors, one variable per trainable variable, divided by the loss scale."""
        self.factors: dict[int, Variable] = {}
        """The `PowerSGD` matrices for the next reduction. The key is the index of the trainable variable."""
        self._context = context
        self._is_stacked = False

    def check(self) -> None:
        """Warn if the codec is `PowerSGD` and an inner optimizer is Adam, because the loss can then be higher."""
        if isinstance(self.codec, PowerSGD):
            _warn_of_adam(self._context.optimizer)

    @property
    def carried(self) -> Mapping[str, Sequence[Variable]]:
        """The optimizer variables that store this replica's compression errors, under the name "residual"."""
        return {"residual": self.residuals}

    def build(self, variables: Sequence[Variable], add_variable: Callable[..., Variable]) -> None:
        """Create variables for compression errors (residuals) and matrices of `PowerSGD`. Later calls do nothing."""
        if self.residuals or self.factors:
            return
        for i, variable in enumerate(variables):
            if self.codec.error_feedback:
                name, shape = f"residual_{i}", () if overwrites_variable(variable) else variable.shape
                self.residuals.append(add_variable(shape=shape, initializer="zeros", dtype="float32", name=name))
            start = None if overwrites_variable(variable) else self.codec.start(variable, i)
            if start is not None:
                arguments = {"shape": start.shape, "dtype": "float32", "name": f"{_FACTOR}{i}"}
                self.factors[i] = add_variable(initializer="zeros", **arguments)
                self.factors[i].assign(start)
        if self._is_stacked:
            placement.place(self.residuals, "per_replica")

    def stack(self) -> None:
        """If one program runs all replicas, stack their compression errors along a first dimension of one array."""
        if not self._is_stacked and self.residuals:
            placement.place(self.residuals, "per_replica")
        self._is_stacked = True

    def reset(self) -> None:
        """Set the stored compression errors (residuals) to zero."""
        for residual in self.residuals:
            residual.assign(ops.zeros_like(ops.convert_to_tensor(residual)))

    def keep(self, step: Step) -> Step:
        """Assign new compression errors (`step.own`) and `PowerSGD` matrices. Return `step` without these."""
        for residual, value in zip(self.residuals, step.own or ()):
            residual.assign(value)
        for i, factor in self.factors.items():
            if f"{_FACTOR}{i}" in step.notes:
                factor.assign(step.notes[f"{_FACTOR}{i}"])
        others = {name: note for name, note in step.notes.items() if not name.startswith(_FACTOR)}
        return step.replace(own=None, notes=others)

    def begin(self, comm: Communicator, reduction: Reduction) -> Coded:
        """Return an object that runs one reduction of encoded gradients over the replicas of `comm`."""
        self._check()
        return Coded(comm, self, reduction, self._context)

    def means(self, comm: Communicator, places: Sequence[int], tensors: Sequence[Tensor], update: Any) -> list[Tensor]:
        """Return means over replicas of `tensors`, sent encoded: the weight changes of the variables at `places`.

        Raises:
            ValueError: if the backend does not support the codec.
        """
        self._check()
        kept = [self.residuals[i] for i in places] if self.codec.error_feedback else []
        mine = [cast(tensor, "float32") for tensor in tensors]
        mine = [value + residual for value, residual in zip(mine, kept)] if kept else mine
        reduced = self.codec.reduce(mine, [], comm, ops.convert_to_tensor(update), self.factors_at(places))
        is_good = ops.all(ops.stack([ops.all(ops.isfinite(total)) for total in reduced.sums]))
        started = [self.factors[i] for i in places if i in self.factors]
        for variable, value in [*zip(kept, reduced.unsent), *zip(started, reduced.factors)]:
            variable.assign(ops.where(is_good, value, ops.convert_to_tensor(variable)))
        # Divide before casting, because the sum can overflow half precision even if the mean does not.
        return [cast(total / comm.num_replicas, dtype_of(like)) for total, like in zip(reduced.sums, tensors)]

    def factors_at(self, places: Sequence[int]) -> list[Tensor | None]:
        """Return the `PowerSGD` matrices of the variables at these positions; None for a variable without one."""
        return [ops.convert_to_tensor(self.factors[i]) if i in self.factors else None for i in places]

    def _check(self) -> None:
        if isinstance(self.codec, PowerSGD) and self.codec.warmup_steps and _strategies is not None:
            raise ValueError(
                "`PowerSGD` on TensorFlow must have `warmup_steps=0`, because collectives cannot change inside a "
                f"compiled step. Received: compression={self.codec!r}. Use `PowerSGD(warmup_steps=0)`, "
                "perhaps after some epochs of training without compression."
            )


class Coded(Transfer):
    """One reduction of encoded gradients. `kept` is the `CodedTransport` that stores compression errors."""

    comm: Communicator

    def __init__(self, comm: Communicator, kept: CodedTransport, reduction: Reduction, context: StageContext) -> None:
        super().__init__(comm)
        self.codec = kept.codec
        self._kept = kept
        self._context = context
        self.scatters = isinstance(kept.codec, CodedInTwoLegs)
        self._variables = dict(zip(reduction.places, reduction.variables))
        # Compression errors of variables without a gradient here wait for a later update: perhaps no replica has one.
        self._waits = {place for place, grad in zip(reduction.places, reduction.grads) if grad is None}
        # Gradients contain this factor, the loss scale. Compression errors (residuals) are stored without the factor.
        self._unit = context.loss_scale if reduction.loss_scale is None else reduction.loss_scale
        before = kept.residuals if reduction.own is None else reduction.own
        self._before = [ops.convert_to_tensor(residual) for residual in before]
        self._unsent: dict[int, Tensor] = {}
        self._pieces: dict[int, list[tuple[int, Tensor]]] = {}
        self._factors: dict[int, Tensor] = {}
        self._is_finite: list[Tensor] = []

    def all_reduce(
        self, places: Sequence[int], tensors: Sequence[Tensor], along: Tensor | None, op: ReduceOp
    ) -> tuple[list[Tensor], Tensor | None]:
        """Reduce encoded gradients (`tensors`) of the variables at `places`, and unencoded `along`, over replicas."""
        if not places:
            return super().all_reduce(places, tensors, along, op)
        mine, factors = self._inputs(places, tensors)
        more = [] if along is None else [along]
        reduced = self.codec.reduce(mine, more, self.comm, self._update(), factors)
        sums = self._results(self._collect(places, factors, reduced), [*tensors, *more], op)
        return sums[: len(places)], None if along is None else sums[-1]

    def legs_of(
        self, places: Sequence[int], tensors: Sequence[Tensor], along: Sequence[Tensor], op: ReduceOp
    ) -> Generator[tuple[Kind, Sequence[Tensor]], list[Tensor], list[Tensor]]:
        """Reduce like `all_reduce`, but yield each collective to the caller. Return sums of `along`, even for "mean".

        Args:
            places: the positions of the variables.
            tensors: the gradient of each of these variables; None if this replica has no gradient.
            along: tensors to sum without encoding.
            op: "sum" or "mean".
        """
        missing = {place for place, tensor in zip(places, tensors) if tensor is None}
        self._waits = (self._waits - set(places)) | missing
        shapes = [self._variables[place].shape for place in places]
        filled = [ops.zeros(shape, "float32") if t is None else t for t, shape in zip(tensors, shapes)]
        mine, factors = self._inputs(places, filled)
        size, me = self.comm.num_replicas, self.comm.replica_id
        reduced = yield from self.codec.legs(mine, list(along), size, me, self._update(), factors)
        sums = self._collect(places, factors, reduced)
        count = len(places)
        like = [self._variables[place] for place in places]
        return [*self._results(sums[:count], like, op), *sums[count:]]

    def _inputs(self, places: Sequence[int], tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the tensors to encode (gradients plus earlier errors), and their `PowerSGD` matrices or None."""
        mine = [self._with_residual(place, tensor) for place, tensor in zip(places, tensors)]
        return mine, self._kept.factors_at(places)

    def _update(self) -> Tensor:
        return ops.convert_to_tensor(self._context.optimizer.iterations)

    def _collect(self, places: Sequence[int], factors: Sequence[Tensor | None], reduced: Reduced) -> list[Tensor]:
        """Return the sums of a reduction. Store the compression errors, and whether the sums are finite."""
        self._is_finite += [ops.isfinite(ops.sum(total)) for total in reduced.sums]
        kept = [place for place, factor in zip(places, factors) if factor is not None]
        self._factors |= dict(zip(kept, reduced.factors))
        self._unsent |= dict(zip(places, reduced.unsent))
        return [*reduced.sums, *reduced.along]

    def reduce_scatter(
        self, rows: Rows, length: int, along: Tensor | None, op: ReduceOp, dtype: str
    ) -> tuple[Tensor, Tensor | None]:
        """Reduce encoded gradients: `rows` has a row of slices per replica. Return this replica's row, and `along`."""
        del length, dtype
        more = [] if along is None else [along]
        codec, size, me = self.codec, self.comm.num_replicas, self.comm.replica_id
        assert isinstance(codec, CodedInTwoLegs)
        filled = [[self._with_residual(i, value, start) for i, start, value in each] for each in rows]
        longest = max(sum(int(value.shape[0]) for value in row) for row in filled)
        length = -(-longest // codec.block) * codec.block
        flat = ops.concatenate([joined(row, length) if row else ops.zeros((length,), "float32") for row in filled])
        sent = codec.encode(flat, (self._update(), me, 0))
        total = ops.sum(ops.reshape(codec.decode(self.comm.all_to_all(sent)), (size, -1)), axis=0)
        unsent = ops.reshape(flat - codec.decode(sent), (size, -1))
        for r, (each, row) in enumerate(zip(rows, filled)):
            for (i, start, _), left in zip(each, split(unsent[r], row)):
                self._pieces.setdefault(i, []).append((start, left))
        # A replica gets only its slices of the sum, so each replica checks its own whole gradient for NaN and infinity.
        is_bad = ops.cast(ops.logical_not(ops.isfinite(ops.sum(flat))), "float32")
        *sums, num_bad = self.comm.all_reduce([*more, ops.reshape(is_bad, (1,))], "sum")
        self._is_finite.append(num_bad[0] < 0.5)
        mine = [value for _, _, value in rows[int(me)]]
        own = total[: sum(int(value.shape[0]) for value in mine)]
        own, *sums = self._results([own, *sums], [rows[0][0][2] if not mine else mine[0], *more], op)
        return own, None if along is None else sums[0]

    def _results(self, sums: Sequence[Tensor], like: Sequence[Tensor], op: ReduceOp) -> list[Tensor]:
        # Divide before casting, because the sum can overflow half precision even if the mean does not.
        results = [total / self.comm.num_replicas for total in sums] if op == "mean" else sums
        return [cast(result, dtype_of(tensor)) for result, tensor in zip(results, like)]

    def _with_residual(self, place: int, tensor: Tensor, start: int | None = None) -> Tensor:
        """Return the gradient plus the earlier compression error in float32. With `start`, `tensor` is only a slice."""
        value = dense(tensor, self._variables[place])
        value = cast(value.to_dense() if getattr(value, "is_sparse", False) is True else value, "float32")
        if not self.codec.error_feedback or place in self._waits:
            return value
        left = self._before[place]
        if start is not None:
            left = ops.reshape(left, (-1,))[start : start + int(value.shape[0])]
        return value + (left if is_one(self._unit) else left * ops.cast(self._unit, "float32"))

    def left(self, step: Step, all_decide: bool) -> Step:
        """Return the reduced step with new compression errors, or with the old errors if the update is skipped.

        Args:
            step: the step that this transfer has reduced.
            all_decide: bool. Whether a non-finite gradient in one group of replicas makes all groups skip the update.
        """
        if not self._is_finite:
            return step
        is_good = ops.all(ops.stack(self._is_finite))
        if step.found_inf is not None:
            is_good = ops.logical_and(is_good, ops.equal(step.found_inf[0], 0))
        elif all_decide and self.comm.world is not self.comm:
            is_bad, _ = largest_of_all(ops.logical_not(is_good), ops.zeros((), "float32"), self.comm.world)
            is_good = ops.logical_not(is_bad)
        notes = dict(step.notes)
        for i, factor in self._factors.items():
            notes[f"{_FACTOR}{i}"] = ops.where(is_good, factor, ops.convert_to_tensor(self._kept.factors[i]))
        if not self.codec.error_feedback:
            return step.replace(notes=notes)
        after = list(self._before)
        for i, parts in self._pieces.items():
            flat = ops.concatenate([part for _, part in sorted(parts, key=lambda piece: piece[0])])
            self._unsent[i] = ops.reshape(flat, after[i].shape)
        for i, left in self._unsent.items():
            left = left if is_one(self._unit) else left / ops.cast(self._unit, "float32")
            after[i] = ops.where(is_good, left + after[i] if i in self._waits else left, after[i])
        return step.replace(notes=notes, own=after)


def _warn_of_adam(optimizer: Optimizer) -> None:
    kinds = (keras.optimizers.Adam, keras.optimizers.Adamax, keras.optimizers.Nadam, keras.optimizers.RMSprop)
    found = [leaf for leaf in base_optimizers(optimizer) if isinstance(leaf, kinds)]
    if found:
        warn(
            "`PowerSGD` is made for SGD with momentum. Optimizers that divide by the root of squared gradients reach a "
            f"higher loss with low-rank gradients. Received: {type(found[0]).__name__}. "
            'Use `compression="int8"`, or `keras.optimizers.SGD(momentum=0.9)`.',
        )
