"""The slices of variables, and of their optimizer state, that one process updates for all replicas.

The inner optimizer is built on a stand-in for each trainable variable: this replica's slice, the variable itself if the
replica owns it whole, or an empty variable if other replicas own it. So each replica has the same list of state
variables, and joining them over replicas gives the whole state.

`division.py` decides which replica updates which slice, `weights.py` sends updated slices to all replicas, and
`flat_state.py` prepares the state for files.

Private names of Keras touched here (test_private_names.py checks that each exists):
    `Optimizer._use_weight_decay` - whether a variable decays.
    `Optimizer._trainable_variables` - the variables of the optimizer's build.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras import ops

from keras_shardopt.backends import for_backend
from keras_shardopt.backends.active import placement, processes
from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.backends.side_channel import SideChannel
from keras_shardopt.numerics import Gradients, ReduceOp, Tensor, Variable, dtype_of
from keras_shardopt.sharding.division import Bucket, Division, buckets_of
from keras_shardopt.sharding.flat_state import FlatState
from keras_shardopt.sharding.partition import Piece
from keras_shardopt.sharding.report import size_of
from keras_shardopt.sharding.separability import (
    are_elementwise_inside,
    empty_shape,
    holds_weights,
    keep_exclusions,
)
from keras_shardopt.sharding.shards import Shards, flattened, stand_in_for
from keras_shardopt.sharding.weights import SLICES_SHARE_MEMORY, WeightHolder, WholeWeights
from keras_shardopt.update.context import CrossShardProtocol
from keras_shardopt.update.exchange import Moved, with_next_values
from keras_shardopt.update.reduction import Reduction, scaled
from keras_shardopt.update.transport import Transfer
from keras_shardopt.wrapping.slots import slots_of

# PyTorch only (otherwise None): reduces gradients during the backward pass.
_sliced = for_backend({"torch": "keras_shardopt.backends.torch.sliced_bucket"})


class FlatShards(Shards):
    """Divides flattened variables into slices, for replicas that are processes.

    Raises:
        ValueError: if the state of a wrapped optimizer can be divided neither by element nor by variable.
    """

    def __init__(self, optimizer: CrossShardProtocol, variables: Sequence[Variable], replicas: Communicator) -> None:
        super().__init__(optimizer, variables, replicas.num_replicas)
        self.replica_id = int(replicas.replica_id)
        self._starts_with_weights = holds_weights(self._leaf, variables)
        may_split = are_elementwise_inside(optimizer, variables)
        bucket_bytes = optimizer._options.speed.bucket_mib * 2**20
        buckets = buckets_of(self._leaf, self.variables, may_split, self.num_replicas, bucket_bytes)
        self.division = Division(buckets, may_split, self.replica_id)
        self._divided = self.division.owners.keys()
        self.state = FlatState(self, {}, self.division, ())
        self.stand_ins = [self._stand_in(i) for i in range(len(self.variables))]
        self.holder: WeightHolder = WholeWeights(self, self.division, replicas)
        """Stores the weights, and sends updated slices. An extension can replace it."""
        keep_exclusions(optimizer, self.variables, self.inside)

    # -- setup ---------------------------------------------------------------------------------------------------

    def _stand_in(self, i: int) -> Variable:
        variable, may_split = self.variables[i], self.division.may_split[i]
        if i not in self._divided:  # it is empty, or has `overwrite_with_gradient`
            return variable
        piece = self.division.own.get(i)
        if piece is None:
            return stand_in_for(variable, empty_shape((0,) if may_split else variable.shape), "zeros")
        if not may_split:
            return variable
        own = flattened(variable)[piece.start : piece.stop]
        return stand_in_for(variable, (piece.size,), lambda shape, dtype: ops.cast(own, dtype))

    def bind_state(self, optimizer: CrossShardProtocol) -> None:
        slots, _ = self._find_slots(optimizer)
        # Optimizers that need whole variables may have state that belongs to no variable. A replica owns such state if
        # the state has elements on this replica.
        of_leaf = slots_of(self._leaf, self._leaf._trainable_variables)
        of_undivided = {id(slot) for i, _, slot in of_leaf if i not in self._divided}
        arrays = {id(v) for v in optimizer.inner.variables if len(v.shape)}
        self.state = FlatState(self, slots, self.division, arrays - slots.keys() - of_undivided)
        self.holder.before_update()  # lets stand-ins (slices) share the memory of weights, and frees their own

    @property
    def copies(self) -> list[Variable]:
        return [] if SLICES_SHARE_MEMORY else super().copies

    def check_start(self, iterations: int) -> None:
        updates_so_far = processes.gather_objects(iterations)
        fits = len(set(updates_so_far)) == 1
        if fits and (iterations or self._starts_with_weights):
            rows = placement.fingerprints(self.variables)
            fits = bool((rows == rows[0]).all())
        if not fits:
            raise ValueError(
                "With `shard_state=True` all replicas must start with the same weights and at the same update. "
                f"Received: updates so far, by replica: {updates_so_far}"
                f"{'' if len(set(updates_so_far)) > 1 else ', and weights that differ'}. "
                "Load the same file on every rank, and build the model inside `with keras_shardopt.data_parallel():`."
            )

    # -- gradients -----------------------------------------------------------------------------------------------

    @property
    def gradient_slices(self) -> Any:
        """Describes the slices of gradients sent during the backward pass; None if slices cannot be sent that early."""
        if _sliced is None or not all(self.division.may_split) or len(self._divided) < len(self.variables):
            return None
        shapes = {i: tuple(stand_in.shape) for i, stand_in in enumerate(self.stand_ins)}
        pieces = [
            (bucket.variables, [[(p.variable, p.start, p.stop) for p in mine] for mine in bucket.pieces])
            for bucket in self.division.buckets
        ]
        return _sliced.Slices(pieces, shapes)

    def _own_slice(self, i: int, grad: Tensor) -> Tensor:
        whole, piece = flattened(grad, self.variables[i]), self.division.own.get(i, Piece(i, 0, 0))
        return ops.reshape(whole[piece.start : piece.stop], tuple(self.stand_ins[i].shape))

    def move(self, reduction: Reduction, transfer: Transfer, replicas: Communicator) -> Moved:
        positions, op = list(reduction.places), reduction.op
        grads, indices = dict(zip(positions, reduction.grads)), sorted(self._divided)
        trains = None if reduction.trained is None else dict(zip(positions, reduction.trained))
        chosen = None if trains is None else [trains.get(i, False) for i in indices]
        present = [grads.get(i) is not None for i in indices]
        channel = SideChannel(replicas, [self.variables[i] for i in indices], present, chosen, reduction.trains)
        slices: dict[int, Tensor | None] = {}
        make_flags, reduced_flags, nonfinite_flags = reduction.nonfinite_flags, None, None
        for number, bucket in enumerate(self.division.buckets):
            # The first bucket also sends flags: which gradients exist, and which are not finite.
            flags = None if number else channel.pack(bucket.dtype, make_flags and make_flags(bucket.dtype))
            mine, reduced = self._move_bucket(bucket, grads, flags, transfer, op)
            reduced_flags = reduced_flags if number else reduced
            slices |= mine
        if reduced_flags is not None:
            received_flags, nonfinite_flags = channel.unpack(reduced_flags, op)
            if received_flags is not None:
                received_flags.check_all_train()
                received_flags.check_same_variables()
                slices = {i: slices[i] if has else None for i, has in zip(indices, received_flags.present)}
        found = [slices.get(i) for i in positions]
        found = [None if value is None else scaled(value, reduction.factor) for value in found]
        found = with_next_values(reduction, found, replicas)
        return Moved(found, None if make_flags is None else nonfinite_flags, in_slices=True)

    def _move_bucket(
        self, bucket: Bucket, grads: dict[int, Tensor | None], flags: Tensor | None, transfer: Transfer, op: ReduceOp
    ) -> tuple[dict[int, Tensor], Tensor | None]:
        """Return this replica's slices of a bucket's gradients (empty ones included), and the reduced flags."""
        positions = sorted(bucket.variables)
        flat = {i: self._filled(grads.get(i), i, bucket.dtype) for i in positions}
        if bucket.is_uneven or not transfer.scatters:
            shaped = [ops.reshape(value, self.variables[i].shape) for i, value in flat.items()]
            sums, flags = transfer.all_reduce(positions, shaped, flags, op)
            whole = {i: ops.reshape(value, (-1,)) for i, value in zip(positions, sums)}
            mine = {p.variable: whole[p.variable][p.start : p.stop] for p in bucket.pieces[self.replica_id]}
        else:
            rows = [[(p.variable, p.start, flat[p.variable][p.start : p.stop]) for p in each] for each in bucket.pieces]
            chunk, flags = transfer.reduce_scatter(rows, bucket.chunk, flags, op, bucket.dtype)
            mine = {p.variable: chunk[start:stop] for p, start, stop in bucket.places(self.replica_id)}
        shapes = {i: tuple(self.stand_ins[i].shape) for i in positions}
        return {
            i: ops.reshape(mine[i], shape) if i in mine else ops.zeros(shape, bucket.dtype)
            for i, shape in shapes.items()
        }, flags

    def _filled(self, grad: Tensor | None, i: int, dtype: str) -> Tensor:
        """Return a gradient as a vector of this dtype; zeros for None."""
        variable = self.variables[i]
        if grad is None:
            return ops.zeros((size_of(variable),), dtype)
        flat = flattened(grad, variable)
        return flat if dtype_of(flat) == dtype else ops.cast(flat, dtype)

    # -- the update ----------------------------------------------------------------------------------------------

    def update(self, inner: Any, grads: Gradients, variables: Sequence[Variable]) -> None:
        self.holder.before_update()
        positions = [self._position(variable) for variable in variables]
        pairs = [(i, grad) for i, grad in zip(positions, grads) if grad is not None]
        # If no gradient exists, call the inner optimizer anyway, because it raises Keras' error.
        chosen = self._with_own_elements(pairs) or [(i, None) for i in positions]
        inner.apply([grad for _, grad in chosen], [self.stand_ins[i] for i, _ in chosen])
        self.holder.after_update()

    def finalize(self, inner: Any, variables: Sequence[Variable]) -> None:
        self.holder.before_update()
        inner.finalize_variable_values(self.inside(variables))
        self.holder.after_update()

    def _with_own_elements(self, pairs: list[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
        # Drop variables without elements on this replica, because an update of an empty matrix runs as many kernels as
        # of a full one. Keep them if all updates are element-wise, and so cheap. Also keep them if no other variable
        # decays, because Keras' weight decay fails without a variable to decay.
        mine = [(i, grad) for i, grad in pairs if i in self.division.own or i not in self._divided]
        of_leaf = self._leaf._trainable_variables
        if all(self.division.may_split) or not any(self._leaf._use_weight_decay(of_leaf[i]) for i, _ in mine):
            return pairs
        # Keras' optimizers for PyTorch compute rates in the dtype of the first variable, so keep this dtype.
        first, own = pairs[0], mine[0]
        return mine if dtype_of(of_leaf[first[0]]) == dtype_of(of_leaf[own[0]]) else [first, *mine]
