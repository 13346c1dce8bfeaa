"""The slices of variables, and of their optimizer state, that one process updates for all replicas.

Only this module handles the layout of slices in the arrays that replicas send. The inner optimizer is built on a
stand-in for each trainable variable: this replica's slice, the variable itself if the replica owns it whole, or an
empty variable if other replicas own it. So each replica has the same list of state variables, and joining them over
replicas gives the whole state.

Private names of Keras touched here (test_private_names.py checks that each exists):
    `Optimizer._use_weight_decay` - whether a variable decays.
    `Optimizer._trainable_variables` - the variables of the optimizer's build.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from keras import ops

from keras_shardopt.backends import for_backend, stored_parts
from keras_shardopt.backends.active import placement, processes, runtime
from keras_shardopt.backends.communicator import Communicator, in_buckets, largest_bucket
from keras_shardopt.backends.side_channel import SideChannel
from keras_shardopt.backends.stored_parts import OwnParts, Part
from keras_shardopt.numerics import Gradients, Optimizer, ReduceOp, Tensor, Variable, dtype_of, overwrites_variable
from keras_shardopt.sharding import partition
from keras_shardopt.sharding.costs import update_costs
from keras_shardopt.sharding.partition import Piece
from keras_shardopt.sharding.report import MemoryReport, item_size, plus, size_of
from keras_shardopt.sharding.separability import (
    are_elementwise_inside,
    empty_shape,
    holds_weights,
    keep_exclusions,
)
from keras_shardopt.sharding.shards import Shards, flat_range, flattened
from keras_shardopt.update.context import CrossShardProtocol
from keras_shardopt.update.exchange import Moved, with_next_values
from keras_shardopt.update.reduction import Reduction, scaled
from keras_shardopt.update.transport import Transfer
from keras_shardopt.wrapping.slots import named_like, slots_of

BARRIER_SECONDS = 60.0
"""The seconds that a saving replica waits until the other replicas save too."""

_MAX_ELEMENTS_SENT = 2**22
"""The maximum number of state elements sent at a time when replicas join the slices of an array."""

_MAX_IMBALANCE = 1.25
"""If the largest share exceeds this multiple of the mean share, replicas do not send chunks of equal length."""


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Variables of one dtype that are sent together."""

    dtype: str
    pieces: list[list[Piece]]
    """For each replica, its slices of the variables."""

    variables: list[int]
    """The positions of the variables."""

    chunk: int
    """The number of elements in the largest share of a replica. Other shares are padded with zeros to be sent."""

    is_uneven: bool
    """Whether chunks of equal length would be mostly padding."""


class WeightHolder(Protocol):
    """Stores this replica's slices of weights in place of `FlatShards`."""

    def before_update(self) -> None:
        """Make the stand-ins, the variables to update, contain this replica's slices of the weights."""

    def after_update(self) -> None:
        """Send the updated slices to other replicas, if these need them now."""


class FlatShards(Shards):
    """Divides flattened variables into slices, for replicas that are processes.

    Raises:
        ValueError: if the state of a wrapped optimizer can be divided neither by element nor by variable.
    """

    def __init__(self, optimizer: CrossShardProtocol, variables: Sequence[Variable], replicas: Communicator) -> None:
        super().__init__(optimizer, variables, replicas.num_replicas)
        self.replica_id = int(replicas.replica_id)
        self._starts_with_weights = holds_weights(self._leaf, variables)
        self._may_split = are_elementwise_inside(optimizer, variables)
        self._buckets = _buckets(
            self._leaf, self.variables, self._may_split, self.num_replicas, optimizer._options.speed.bucket_mib * 2**20
        )
        self._owners: dict[int, list[tuple[int, Piece]]] = {}
        for bucket in self._buckets:
            for replica, pieces in enumerate(bucket.pieces):
                for piece in pieces:
                    self._owners.setdefault(piece.variable, []).append((replica, piece))
        self._own_pieces = {
            i: piece for i, owners in self._owners.items() for replica, piece in owners if replica == self.replica_id
        }
        self._divided = self._owners.keys()
        self._flat_weights = self._with_flat_weights(replicas)
        self._holder: WeightHolder | None = None
        self.stand_ins = [self._stand_in(i) for i in range(len(self.variables))]
        self._without_variable: set[int] = set()  # ids of state that belongs to no variable
        keep_exclusions(optimizer, self.variables, self.inside)

    # -- setup ---------------------------------------------------------------------------------------------------

    def _stand_in(self, i: int) -> Variable:
        variable = self.variables[i]
        if i not in self._owners:  # it is empty, or not divided because it has `overwrite_with_gradient`
            return variable
        piece = self._own_pieces.get(i)
        if piece is not None and not self._may_split[i]:
            return variable
        shape = empty_shape((0,) if self._may_split[i] else variable.shape) if piece is None else (piece.size,)
        values = ops.reshape(ops.convert_to_tensor(variable), (-1,))

        def initializer(shape: Any, dtype: Any = None) -> Tensor:
            if piece is None:  # an empty slice of `values` would keep their memory
                return ops.zeros(shape, dtype or dtype_of(variable))
            return ops.cast(ops.reshape(values[piece.start : piece.stop], shape), dtype or dtype_of(variable))

        arguments = {"initializer": initializer, "shape": shape, "dtype": dtype_of(variable)}
        return named_like(variable, trainable=False, autocast=False, **arguments)

    def hold(self, holder: WeightHolder) -> None:
        """Let `holder` store this replica's slices of weights, and send updated slices to replicas that need them."""
        self._holder = holder
        self._flat_weights = [None] * len(self._buckets)

    def bind_state(self, optimizer: CrossShardProtocol) -> None:
        self._find_slots(optimizer)
        # Optimizers that need whole variables may have state that belongs to no variable. A replica owns such state if
        # the state has elements on this replica.
        self._without_variable = {id(v) for v in optimizer.inner.variables if len(v.shape)} - self._slots.keys()
        of_leaf = slots_of(self._leaf, self._leaf._trainable_variables)
        self._without_variable -= {id(slot) for i, _, slot in of_leaf if i not in self._owners}  # of undivided weights
        self._copy_in()  # lets stand-ins (slices) share the memory of weights, and frees their own

    def is_divided(self, variable: Variable) -> bool:
        return id(variable) in self._without_variable or id(variable) in self._slots

    @property
    def copies(self) -> list[Variable]:
        return super().copies if _memory is None else []

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

    @property
    def gradient_slices(self) -> Any:
        """Describes the slices of gradients sent during the backward pass; None if slices cannot be sent that early."""
        if _sliced is None or not all(self._may_split) or len(self._owners) < len(self.variables):
            return None
        shapes = {i: tuple(stand_in.shape) for i, stand_in in enumerate(self.stand_ins)}
        pieces = [[[(p.variable, p.start, p.stop) for p in mine] for mine in bucket.pieces] for bucket in self._buckets]
        return _sliced.Slices([(bucket.variables, own) for bucket, own in zip(self._buckets, pieces)], shapes)

    # -- gradients -----------------------------------------------------------------------------------------------

    def _own_slice(self, i: int, whole: Tensor) -> Tensor:
        piece = self._own_pieces.get(i, Piece(i, 0, 0))
        return ops.reshape(whole[piece.start : piece.stop], tuple(self.stand_ins[i].shape))

    def move(self, reduction: Reduction, transfer: Transfer, replicas: Communicator) -> Moved:
        positions, op = list(reduction.places), reduction.op
        grads, indices = dict(zip(positions, reduction.grads)), sorted(self._owners)
        trains = None if reduction.trained is None else dict(zip(positions, reduction.trained))
        chosen = None if trains is None else [trains.get(i, False) for i in indices]
        present = [grads.get(i) is not None for i in indices]
        channel = SideChannel(replicas, [self.variables[i] for i in indices], present, chosen, reduction.trains)
        slices: dict[int, Tensor | None] = {}
        make_flags, reduced_flags, nonfinite_flags = reduction.nonfinite_flags, None, None
        for number, bucket in enumerate(self._buckets):
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
        positions = sorted({piece.variable for pieces in bucket.pieces for piece in pieces})
        flat = {i: self._filled(grads.get(i), i, bucket.dtype) for i in positions}
        if bucket.is_uneven or not transfer.scatters:
            shaped = [ops.reshape(value, self.variables[i].shape) for i, value in flat.items()]
            sums, flags = transfer.all_reduce(positions, shaped, flags, op)
            whole = {i: ops.reshape(value, (-1,)) for i, value in zip(positions, sums)}
            mine = {p.variable: whole[p.variable][p.start : p.stop] for p in bucket.pieces[self.replica_id]}
        else:
            rows = [[(p.variable, p.start, flat[p.variable][p.start : p.stop]) for p in each] for each in bucket.pieces]
            own, flags = transfer.reduce_scatter(rows, bucket.chunk, flags, op, bucket.dtype)
            mine = self._split(own, bucket)
        return self._shaped(mine, positions, bucket.dtype), flags

    def _split(self, own: Tensor, bucket: Bucket) -> dict[int, Tensor]:
        mine, start = {}, 0
        for piece in bucket.pieces[self.replica_id]:
            mine[piece.variable] = own[start : start + piece.size]
            start += piece.size
        return mine

    def _filled(self, grad: Tensor | None, i: int, dtype: str) -> Tensor:
        variable = self.variables[i]
        if grad is None:
            return ops.zeros((size_of(variable),), dtype)
        flat = flattened(grad, variable)
        return flat if dtype_of(flat) == dtype else ops.cast(flat, dtype)

    def _shaped(self, mine: dict[int, Tensor], positions: Sequence[int], dtype: str) -> dict[int, Tensor]:
        return {
            i: ops.reshape(mine[i], tuple(self.stand_ins[i].shape))
            if i in mine
            else ops.zeros(tuple(self.stand_ins[i].shape), dtype)
            for i in positions
        }

    @staticmethod
    def _padding(bucket: Bucket, pieces: Sequence[Piece]) -> list[Tensor]:
        missing = bucket.chunk - sum(piece.size for piece in pieces)
        return [ops.zeros((missing,), bucket.dtype)] if missing else []

    # -- the update ----------------------------------------------------------------------------------------------

    def update(self, inner: Any, grads: Gradients, variables: Sequence[Variable], replicas: Communicator) -> None:
        self._copy_in()
        positions = [self._position(variable) for variable in variables]
        pairs = [(i, grad) for i, grad in zip(positions, grads) if grad is not None]
        # If no gradient exists, call the inner optimizer anyway, because it raises Keras' error.
        chosen = self._with_own_elements(pairs) or [(i, None) for i in positions]
        inner.apply([grad for _, grad in chosen], [self.stand_ins[i] for i, _ in chosen])
        self._all_gather_weights(replicas)

    def finalize(self, inner: Any, variables: Sequence[Variable]) -> None:
        self._copy_in()
        inner.finalize_variable_values(self.inside(variables))
        self._all_gather_weights(runtime.communicator(self._axis_name))

    def _with_own_elements(self, pairs: list[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
        # Drop variables without elements on this replica, because an update of an empty matrix runs as many kernels as
        # of a full one. Keep them if all updates are element-wise, and so cheap. Also keep them if no other variable
        # decays, because Keras' weight decay fails without a variable to decay.
        mine = [(i, grad) for i, grad in pairs if i in self._own_pieces or i not in self._owners]
        if all(self._may_split) or not any(self._leaf._use_weight_decay(v) for v in self._leaf_variables(mine)):
            return pairs
        # Keras' optimizers for PyTorch compute rates in the dtype of the first variable, so keep this dtype.
        first, own = self._leaf_variables([pairs[0], mine[0]])
        return mine if dtype_of(first) == dtype_of(own) else [pairs[0], *mine]

    def _leaf_variables(self, pairs: Sequence[tuple[int, Tensor]]) -> list[Variable]:
        return [self._leaf._trainable_variables[i] for i, _ in pairs]

    def _copy_in(self) -> None:
        if self._holder is not None:
            self._holder.before_update()
            return
        for weights in self._flat_weights:
            if weights is not None:
                weights.flat()  # before slicing, because it may move the weights
        split = [(i, piece) for i, piece in self._own_pieces.items() if self._may_split[i]]
        _alias_slices([(self.stand_ins[i], self.variables[i], piece.start, piece.stop) for i, piece in split])

    def _all_gather_weights(self, replicas: Communicator) -> None:
        if self._holder is not None:
            self._holder.after_update()
            return
        # Run the same collectives on all replicas, even if the weights of one replica have moved to other memory.
        gathering: Any = None
        elsewhere: list[tuple[Bucket, Tensor]] = []
        for bucket, weights in zip(self._buckets, self._flat_weights):
            if weights is not None and _memory is not None:
                flat = weights.flat()
                if flat is None:
                    flat = weights.room(self.replica_id, self._own_chunk(bucket))
                    elsewhere.append((bucket, flat))
                gathering = gathering or _memory.Gathering(replicas)
                gathering.begin(flat)
            elif bucket.is_uneven:
                self._assign(bucket, self._broadcast(bucket, replicas))
            else:
                (joined,) = replicas.all_gather([self._own_chunk(bucket)])
                self._assign(bucket, self._chunks(bucket, joined))
        if gathering is not None:
            gathering.finish()
        for bucket, flat in elsewhere:
            self._assign(bucket, self._chunks(bucket, flat))

    def _own_chunk(self, bucket: Bucket) -> Tensor:
        own = [flattened(self.stand_ins[piece.variable]) for piece in bucket.pieces[self.replica_id]]
        return ops.concatenate([*own, *self._padding(bucket, bucket.pieces[self.replica_id])])

    def _chunks(self, bucket: Bucket, joined: Tensor) -> list[Tensor]:
        return [joined[r * bucket.chunk : (r + 1) * bucket.chunk] for r in range(self.num_replicas)]

    def _with_flat_weights(self, replicas: Communicator) -> list[Any]:
        """Return, for each bucket, an object that keeps the bucket's weights in one block of memory, or None."""
        made: list[Any] = [None] * len(self._buckets)
        for number, bucket in enumerate(self._buckets):
            if _memory is not None and all(self._may_split[i] for i in bucket.variables):
                variables = [self.variables[i] for i in bucket.variables]
                made[number] = _memory.together(replicas, variables, self.num_replicas * bucket.chunk)
        return made

    def _assign(self, bucket: Bucket, chunks: Sequence[Tensor]) -> None:
        parts: dict[int, list[Tensor]] = {}
        for pieces, theirs in zip(bucket.pieces, chunks):
            start = 0
            for piece in pieces:
                parts.setdefault(piece.variable, []).append(theirs[start : start + piece.size])
                start += piece.size
        for i, values in parts.items():
            _assign_slices(self.variables[i], values)

    def _broadcast(self, bucket: Bucket, replicas: Communicator) -> list[Tensor]:
        mine = {p.variable: flattened(self.stand_ins[p.variable]) for p in bucket.pieces[self.replica_id]}
        chunks = []
        for replica, pieces in enumerate(bucket.pieces):
            size = sum(piece.size for piece in pieces)
            own = [mine[piece.variable] for piece in pieces] if replica == self.replica_id else []
            flat = ops.concatenate(own) if own else ops.zeros((size,), bucket.dtype)
            chunks.append(replicas.broadcast([flat], root=replica)[0] if size else flat)
        return chunks

    # -- files ---------------------------------------------------------------------------------------------------

    def stored_shape(self, variable: Variable) -> tuple[int, ...] | None:
        shape = tuple(variable.shape)
        if id(variable) in self._without_variable:
            return None if 0 in shape else shape
        i = self._slots.get(id(variable))
        if i is None or not shape:
            return shape
        if shape == tuple(self.stand_ins[i].shape):
            return tuple(self.variables[i].shape)
        return shape if i in self._own_pieces else None

    def stored(self, variable: Variable) -> np.ndarray:
        replicas = runtime.communicator(self._axis_name)
        i = self._slots.get(id(variable))
        if id(variable) in self._without_variable:
            shapes = processes.gather_objects(tuple(variable.shape))
            holders = [r for r, shape in enumerate(shapes) if 0 not in shape]
            if len(holders) > 1:
                return ops.convert_to_numpy(variable)  # all replicas hold this state
            owners = [(r, Piece(-1, 0, int(np.prod(shapes[r])))) for r in holders]
            shape = shapes[holders[0]] if holders else shapes[0]
        elif i is None:
            return ops.convert_to_numpy(variable)
        else:
            owners, shape = self._owners[i], self.stored_shape(variable)
            # If the state is one scalar per variable, only the first owner of a slice sends the scalar. This condition
            # must be equal on all replicas.
            if not tuple(variable.shape) and (self._may_split[i] or len(self.variables[i].shape)):
                owners, shape = [(owners[0][0], Piece(i, 0, 1))], ()
            elif not self._may_split[i]:
                shape = processes.gather_objects(shape)[owners[0][0]]
                owners = [(owners[0][0], Piece(i, 0, int(np.prod(shape))))]
        whole = None
        for replica, piece in owners:
            mine = flattened(variable) if replica == self.replica_id else None
            for start in range(0, piece.size, _MAX_ELEMENTS_SENT):
                stop = min(piece.size, start + _MAX_ELEMENTS_SENT)
                part = ops.zeros((stop - start,), dtype_of(variable)) if mine is None else mine[start:stop]
                (part,) = replicas.broadcast([part], root=replica)
                array = ops.convert_to_numpy(part)
                whole = np.empty((sum(p.size for _, p in owners),), array.dtype) if whole is None else whole
                whole[piece.start + start : piece.start + stop] = array
        return np.zeros(shape or ()) if whole is None else whole.reshape(shape or ())

    def own_parts(self, variable: Variable, process: tuple[int, int]) -> OwnParts:
        i = self._slots.get(id(variable))
        shape: tuple[int, ...] | None = tuple(variable.shape)
        if id(variable) in self._without_variable:
            has = [0 not in other for other in processes.gather_objects(shape)]
            if sum(has) != 1:  # not the state of a single replica, so all replicas hold it
                return stored_parts.own_parts(variable, process)
            start, is_owner = 0, has[process[1]]
            shape = shape if is_owner else None
        elif i is None:
            return stored_parts.own_parts(variable, process)
        elif shape and self._may_split[i]:
            shape, is_owner = tuple(self.variables[i].shape), i in self._own_pieces
            start = self._own_pieces[i].start if is_owner else 0
        else:  # state of a variable that one replica updates, or a scalar
            start, is_owner = 0, self._owners[i][0][0] == self.replica_id
            shape = shape if is_owner or not shape else self.stored_shape(variable)
        values = stored_parts.host_copy(variable).reshape(-1) if is_owner else None
        return OwnParts(shape, dtype_of(variable), [] if values is None else [Part((start,), values)])

    def assign_stored(self, variable: Variable, array: Any) -> None:
        i = self._slots.get(id(variable))
        if i is None and id(variable) not in self._without_variable:
            stored_parts.assign_stored(variable, array)
        elif 0 in variable.shape:
            return
        elif i is None or not self._may_split[i] or not tuple(variable.shape):
            stored_parts.assign_stored(variable, array)
        else:
            piece = self._own_pieces[i]
            variable.assign(flat_range(array, piece.start, piece.stop))

    # -- the report ----------------------------------------------------------------------------------------------

    def memory_report(self, state: Sequence[Variable]) -> MemoryReport:
        held: list[int | None] = [0] * self.num_replicas
        whole = 0
        replicated = []
        unknown = False
        for variable in state:
            item = item_size(variable)
            i, shape = self._slots.get(id(variable)), tuple(variable.shape)
            if id(variable) in self._without_variable or (i is not None and self.stored_shape(variable) is None):
                unknown = True
                held = plus(held, self.replica_id, int(np.prod(shape)) * item)
                continue
            if i is None or not shape:
                size = int(np.prod(shape)) * item
                held = [None if h is None else h + size for h in held]
                whole += size
                replicated.append((variable.path, size, "a scalar" if not shape else "it belongs to no variable"))
                continue
            full = int(np.prod(self.stored_shape(variable) or ()))
            whole += full * item
            for replica, piece in self._owners[i]:
                held = plus(held, replica, (piece.size if self._may_split[i] else full) * item)
        if unknown:
            held = [h if replica == self.replica_id else None for replica, h in enumerate(held)]
        return MemoryReport(held, whole, replicated)


def _buckets(
    leaf: Optimizer, variables: Sequence[Variable], may_split: Sequence[bool], num_replicas: int, bucket_bytes: float
) -> list[Bucket]:
    by_dtype: dict[str, list[int]] = {}
    divided = [i for i, variable in enumerate(variables) if not overwrites_variable(variable) and size_of(variable)]
    for i in divided:
        by_dtype.setdefault(dtype_of(variables[i]), []).append(i)
    all_split = all(may_split[i] for i in divided)
    costs = {} if all_split else dict(zip(divided, update_costs(leaf, [variables[i] for i in divided])))
    made = []
    for dtype, same_dtype in by_dtype.items():
        num_bytes = [size_of(variables[i]) * item_size(variables[i]) for i in same_dtype]
        members: Iterable[Sequence[int]] = [range(len(same_dtype))]
        # If some variables stay whole, only one bucket with all variables can be divided evenly.
        if all(may_split[i] for i in same_dtype):
            # Backward passes compute the last gradients first, so fill buckets in this order.
            limit = largest_bucket(sum(num_bytes), bucket_bytes)
            members = in_buckets(num_bytes, reversed(range(len(same_dtype))), limit)
        for each in members:
            indices = [same_dtype[k] for k in each]
            sizes = [size_of(variables[i]) for i in indices]
            own_costs = [costs[i] for i in indices if costs]
            owned = partition.divide(sizes, [may_split[i] for i in indices], own_costs, num_replicas)
            pieces = [[Piece(indices[p.variable], p.start, p.stop) for p in mine] for mine in owned]
            shares = [sum(piece.size for piece in mine) for mine in pieces]
            is_uneven = max(shares) * num_replicas > _MAX_IMBALANCE * sum(sizes) + num_replicas
            made.append(Bucket(dtype, pieces, indices, max(shares), is_uneven))
    return made


# PyTorch only (otherwise None): reduces gradients during the backward pass.
_sliced = for_backend({"torch": "keras_shardopt.backends.torch.sliced_bucket"})

# PyTorch only (otherwise None): lets slices share memory with the whole variable.
_memory = for_backend({"torch": "keras_shardopt.backends.torch.memory"})


def _alias_slices(parts: Sequence[tuple[Variable, Variable, int, int]]) -> None:
    if _memory is not None:
        _memory.alias_slices(parts)
        return
    for stand_in, variable, start, stop in parts:
        stand_in.assign(ops.reshape(flattened(variable)[start:stop], stand_in.shape))


def _assign_slices(variable: Variable, slices: Sequence[Tensor]) -> None:
    if _memory is not None:
        _memory.assign_slices(variable, slices)
    else:
        variable.assign(ops.reshape(ops.concatenate(list(slices)), variable.shape))
