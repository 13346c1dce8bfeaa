"""One replica's share of the optimizer state: slices of variables that only it updates, and the way back.

Hides where slices lie in what replicas send each other. The inner optimizer is built on a stand-in for each trainable
variable: this replica's slice of it, the variable itself where the replica owns it whole, or one without elements
where others own it. So it keeps the same list of state on every replica, and that of the whole is theirs joined.

Private names of Keras touched here (test_private_names.py holds them):
    `Optimizer._use_weight_decay` - whether a variable decays.
    `Optimizer._trainable_variables` - what the optimizer was built on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from keras import ops

from keras_shardopt.backends import for_backend
from keras_shardopt.backends.active import placement, processes, runtime
from keras_shardopt.backends.communicator import Communicator, in_buckets, largest_bucket
from keras_shardopt.backends.side_channel import SideChannel
from keras_shardopt.numerics import Gradients, ReduceOp, Tensor, Variable, dtype_of, overwrites_variable
from keras_shardopt.sharding import partition
from keras_shardopt.sharding.partition import Piece
from keras_shardopt.sharding.report import MemoryReport, item_size, plus, size_of
from keras_shardopt.sharding.separability import (
    are_elementwise_inside,
    empty_shape,
    holds_weights,
    keep_exclusions,
)
from keras_shardopt.sharding.shards import Shards, flattened
from keras_shardopt.update.exchange import Moved, with_next_values
from keras_shardopt.update.reducing import ReducingOptimizer
from keras_shardopt.update.reduction import Reduction, scaled
from keras_shardopt.update.transport import Transfer
from keras_shardopt.wrapping.slots import named_like, slots_of

BARRIER_SECONDS = 60.0
"""For how long a replica that saves waits for the others to save too."""

_SENT_TOGETHER = 2**22
"""How many elements of a state travel at once when it is put together; one array is held whole besides."""

_MAX_IMBALANCE = 1.25
"""How much longer than a mean share the longest may be, before shares are no longer sent in chunks of one length."""


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Variables of one dtype, which travel together."""

    dtype: str
    pieces: list[list[Piece]]
    """What each replica owns."""

    variables: list[int]
    """The positions of the variables."""

    chunk: int
    """How many elements the largest share has."""

    is_lopsided: bool
    """Whether chunks of one length would be mostly padding."""


class FlatShards(Shards):
    """What this replica owns.

    Args:
        optimizer: the `CrossShard`, around optimizers that are not built.
        variables: the trainable variables.
        replicas: who owns the rest.

    Raises:
        ValueError: if an optimizer inside can be right neither with parts of variables nor with some of them.
    """

    def __init__(self, optimizer: ReducingOptimizer, variables: Sequence[Variable], replicas: Communicator) -> None:
        super().__init__(optimizer, variables, replicas.num_replicas)
        self.replica_id = int(replicas.replica_id)
        self._starts_with_weights = holds_weights(self._leaf, variables)
        self._may_cut = are_elementwise_inside(optimizer, variables)
        self._groups = _groups(
            self.variables, self._may_cut, self.num_replicas, optimizer._options.speed.bucket_mib * 2**20
        )
        self._owners: dict[int, list[tuple[int, Piece]]] = {}
        for group in self._groups:
            for replica, pieces in enumerate(group.pieces):
                for piece in pieces:
                    self._owners.setdefault(piece.variable, []).append((replica, piece))
        self._mine = {
            i: piece for i, owners in self._owners.items() for replica, piece in owners if replica == self.replica_id
        }
        self._divided = self._owners.keys()
        self._together = self._lay_together(replicas)
        self.stand_ins = [self._stand_in(i) for i in range(len(self.variables))]
        # The ids of state that belongs to no variable.
        self._apart: set[int] = set()
        keep_exclusions(optimizer, self.variables, self.inside)

    # -- stand-ins -----------------------------------------------------------------------------------------------

    def _stand_in(self, i: int) -> Variable:
        variable = self.variables[i]
        if i not in self._owners:  # a next value comes whole, or there are no elements
            return variable
        piece = self._mine.get(i)
        if piece is not None and not self._may_cut[i]:
            return variable
        shape = empty_shape((0,) if self._may_cut[i] else variable.shape) if piece is None else (piece.size,)
        values = ops.reshape(ops.convert_to_tensor(variable), (-1,))
        start, stop = (0, 0) if piece is None else (piece.start, piece.stop)

        def initializer(shape: Any, dtype: Any = None) -> Tensor:
            return ops.cast(ops.reshape(values[start:stop], shape), dtype or dtype_of(variable))

        arguments = {"initializer": initializer, "shape": shape, "dtype": dtype_of(variable)}
        return named_like(variable, trainable=False, autocast=False, **arguments)

    def bind_state(self, optimizer: ReducingOptimizer) -> None:
        """Looks at the state, now that the inner optimizers are built."""
        self._find_slots(optimizer)
        # What has no name but a shape, of optimizers whose variables stay whole: it is where it has elements.
        self._apart = {id(v) for v in optimizer.inner.variables if len(v.shape)} - self._slots.keys()
        of_leaf = slots_of(self._leaf, self._leaf._trainable_variables)
        self._apart -= {id(slot) for i, _, slot in of_leaf if i not in self._owners}  # of next values
        self._copy_in()  # which frees the memory that stand-ins were made with

    def is_divided(self, variable: Variable) -> bool:
        """Whether replicas hold different parts of this state."""
        return id(variable) in self._apart or id(variable) in self._slots

    def check_start(self, iterations: int) -> None:
        """Makes sure that parts of the state belong to the same moment. All replicas call it before the first update.

        Raises:
            ValueError: on all replicas, if they have made different numbers of updates, or hold other weights where
                the state must fit them. What only one of them has loaded, others cannot take from it.
        """
        everyones = processes.gather_objects(iterations)
        fits = len(set(everyones)) == 1
        if fits and (iterations or self._starts_with_weights):
            rows = placement.fingerprints(self.variables)
            fits = bool((rows == rows[0]).all())
        if not fits:
            raise ValueError(
                "With `shard_state=True` all replicas must start with the same weights and at the same update. "
                f"Received: updates so far, by replica: {everyones}"
                f"{'' if len(set(everyones)) > 1 else ', and weights that differ'}. "
                "Load the same file on every rank, and build the model inside `with keras_shardopt.data_parallel():`."
            )

    @property
    def gradient_slices(self) -> Any:
        """How gradients are cut into slices while they are computed; None where that cannot be."""
        if _sliced is None or not all(self._may_cut) or len(self._owners) < len(self.variables):
            return None
        shapes = {i: tuple(stand_in.shape) for i, stand_in in enumerate(self.stand_ins)}
        pieces = [[[(p.variable, p.start, p.stop) for p in mine] for mine in group.pieces] for group in self._groups]
        return _sliced.Slices([(group.variables, own) for group, own in zip(self._groups, pieces)], shapes)

    # -- gradients -----------------------------------------------------------------------------------------------

    def _own_slice(self, i: int, whole: Tensor) -> Tensor:
        piece = self._mine.get(i, Piece(i, 0, 0))
        return ops.reshape(whole[piece.start : piece.stop], tuple(self.stand_ins[i].shape))

    def move(self, reduction: Reduction, transfer: Transfer, replicas: Communicator) -> Moved:
        """As `exchange.move`, with this replica's slices; others get theirs."""
        positions, op = list(reduction.places), reduction.op
        grads, indices = dict(zip(positions, reduction.grads)), sorted(self._owners)
        trains = None if reduction.trained is None else dict(zip(positions, reduction.trained))
        chosen = None if trains is None else [trains.get(i, False) for i in indices]
        present = [grads.get(i) is not None for i in indices]
        channel = SideChannel(replicas, [self.variables[i] for i in indices], present, chosen, reduction.trains)
        slices: dict[int, Tensor | None] = {}
        sums = None
        for number, group in enumerate(self._groups):
            along = None
            if number == 0:
                along = channel.pack(group.dtype, reduction.numbers and reduction.numbers(group.dtype))
            mine, reduced = self._move_group(group, grads, along, transfer, op)
            sums = reduced if number == 0 else sums
            slices |= mine
        numbers = None
        if sums is not None:
            heard, numbers = channel.unpack(sums, op)
            if heard is not None:
                heard.check_all_train()
                heard.check_same_variables()
                slices = {i: slices[i] if has else None for i, has in zip(indices, heard.present)}
        found = [slices.get(i) for i in positions]
        found = [None if value is None else scaled(value, reduction.factor) for value in found]
        found = with_next_values(reduction, found, replicas)
        return Moved(found, None if reduction.numbers is None else numbers, in_slices=True)

    def _move_group(
        self, group: Bucket, grads: dict[int, Tensor | None], along: Tensor | None, transfer: Transfer, op: ReduceOp
    ) -> tuple[dict[int, Tensor], Tensor | None]:
        positions = sorted({piece.variable for pieces in group.pieces for piece in pieces})
        flat = {i: self._filled(grads.get(i), i, group.dtype) for i in positions}
        if group.is_lopsided or not transfer.scatters:
            shaped = [ops.reshape(value, self.variables[i].shape) for i, value in flat.items()]
            sums, along = transfer.all_reduce(positions, shaped, along, op)
            whole = {i: ops.reshape(value, (-1,)) for i, value in zip(positions, sums)}
            mine = {p.variable: whole[p.variable][p.start : p.stop] for p in group.pieces[self.replica_id]}
        else:
            rows = [[(p.variable, p.start, flat[p.variable][p.start : p.stop]) for p in each] for each in group.pieces]
            own, along = transfer.reduce_scatter(rows, group.chunk, along, op, group.dtype)
            mine = self._cut(own, group)
        return self._shaped(mine, positions, group.dtype), along

    def _cut(self, own: Tensor, group: Bucket) -> dict[int, Tensor]:
        mine, start = {}, 0
        for piece in group.pieces[self.replica_id]:
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
    def _padding(group: Bucket, pieces: Sequence[Piece]) -> list[Tensor]:
        missing = group.chunk - sum(piece.size for piece in pieces)
        return [ops.zeros((missing,), group.dtype)] if missing else []

    # -- the update ----------------------------------------------------------------------------------------------

    def update(self, inner: Any, grads: Gradients, variables: Sequence[Variable], replicas: Communicator) -> None:
        """Lets `inner` update this replica's slices with their gradients, and gives all replicas the new weights."""
        self._copy_in()
        positions = [self._position(variable) for variable in variables]
        pairs = [(i, grad) for i, grad in zip(positions, grads) if grad is not None]
        # Nothing at all is for the inner optimizer to refuse.
        chosen = self._chosen(pairs) or [(i, None) for i in positions]
        inner.apply([grad for _, grad in chosen], [self.stand_ins[i] for i, _ in chosen])
        self._all_gather_weights(replicas)

    def finalize(self, inner: Any, variables: Sequence[Variable]) -> None:
        """Lets `inner` set the final values of the weights."""
        self._copy_in()
        inner.finalize_variable_values(self.inside(variables))
        self._all_gather_weights(runtime.communicator(self._axis_name))

    def _chosen(self, pairs: list[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
        # Stand-ins without elements cost next to nothing where updates are element-wise, but a matrix without
        # elements takes as many calls as one with. (Keras cannot decay no variables at all.)
        mine = [(i, grad) for i, grad in pairs if i in self._mine or i not in self._owners]
        if all(self._may_cut) or not any(self._leaf._use_weight_decay(v) for v in self.inside_of(mine)):
            return pairs
        # Keras' optimizers for PyTorch compute rates and corrections in the dtype of the first variable, for all.
        first, own = self.inside_of([pairs[0], mine[0]])
        return mine if dtype_of(first) == dtype_of(own) else [pairs[0], *mine]

    def inside_of(self, pairs: Sequence[tuple[int, Tensor]]) -> list[Variable]:
        """What the innermost optimizer updates in place of the variables at these positions."""
        return [self._leaf._trainable_variables[i] for i, _ in pairs]

    def _copy_in(self) -> None:
        for together in self._together:
            if together is not None:
                together.flat()  # before slices are taken of weights that it moves
        cut = [(i, piece) for i, piece in self._mine.items() if self._may_cut[i]]
        _alias_slices([(self.stand_ins[i], self.variables[i], piece.start, piece.stop) for i, piece in cut])

    def _all_gather_weights(self, replicas: Communicator) -> None:
        """Gives every replica the slices of all others."""
        # In one order, and by the same collectives, also on a replica that has moved its weights elsewhere.
        under_way: Any = None
        elsewhere: list[tuple[Bucket, Tensor]] = []
        for group, together in zip(self._groups, self._together):
            if together is not None and _memory is not None:
                flat = together.flat()
                if flat is None:
                    flat = together.room(self.replica_id, self._own_chunk(group))
                    elsewhere.append((group, flat))
                under_way = under_way or _memory.Gathering(replicas)
                under_way.begin(flat)
            elif group.is_lopsided:
                self._assign(group, self._broadcast(group, replicas))
            else:
                (joined,) = replicas.all_gather([self._own_chunk(group)])
                self._assign(group, self._chunks(group, joined))
        if under_way is not None:
            under_way.finish()
        for group, flat in elsewhere:
            self._assign(group, self._chunks(group, flat))

    def _own_chunk(self, group: Bucket) -> Tensor:
        own = [flattened(self.stand_ins[piece.variable]) for piece in group.pieces[self.replica_id]]
        return ops.concatenate([*own, *self._padding(group, group.pieces[self.replica_id])])

    def _chunks(self, group: Bucket, joined: Tensor) -> list[Tensor]:
        return [joined[r * group.chunk : (r + 1) * group.chunk] for r in range(self.num_replicas)]

    def _lay_together(self, replicas: Communicator) -> list[Any]:
        """For each group its weights, if they can lie in one memory as they are sent."""
        made: list[Any] = [None] * len(self._groups)
        for number, group in enumerate(self._groups):
            if _memory is not None and all(self._may_cut[i] for i in group.variables):
                variables = [self.variables[i] for i in group.variables]
                made[number] = _memory.together(replicas, variables, self.num_replicas * group.chunk)
        return made

    def _assign(self, group: Bucket, everyones: Sequence[Tensor]) -> None:
        parts: dict[int, list[Tensor]] = {}
        for pieces, theirs in zip(group.pieces, everyones):
            start = 0
            for piece in pieces:
                parts.setdefault(piece.variable, []).append(theirs[start : start + piece.size])
                start += piece.size
        for i, values in parts.items():
            _assign_slices(self.variables[i], values)

    def _broadcast(self, group: Bucket, replicas: Communicator) -> list[Tensor]:
        mine = {p.variable: flattened(self.stand_ins[p.variable]) for p in group.pieces[self.replica_id]}
        everyones = []
        for replica, pieces in enumerate(group.pieces):
            size = sum(piece.size for piece in pieces)
            own = [mine[piece.variable] for piece in pieces] if replica == self.replica_id else []
            flat = ops.concatenate(own) if own else ops.zeros((size,), group.dtype)
            everyones.append(replicas.broadcast([flat], root=replica)[0] if size else flat)
        return everyones

    # -- files ---------------------------------------------------------------------------------------------------

    def stored_shape(self, variable: Variable) -> tuple[int, ...] | None:
        """The shape of the whole of this state; None where only the replica that owns it knows."""
        shape = tuple(variable.shape)
        if id(variable) in self._apart:
            return None if 0 in shape else shape
        i = self._slots.get(id(variable))
        if i is None or not shape:
            return shape
        if shape == tuple(self.stand_ins[i].shape):
            return tuple(self.variables[i].shape)
        return shape if i in self._mine else None

    def stored(self, variable: Variable) -> np.ndarray:
        """The whole of this state. All replicas call it together, and each gets it."""
        replicas = runtime.communicator(self._axis_name)
        i = self._slots.get(id(variable))
        if id(variable) in self._apart:
            shapes = processes.gather_objects(tuple(variable.shape))
            holders = [r for r, shape in enumerate(shapes) if 0 not in shape]
            if len(holders) > 1:
                return ops.convert_to_numpy(variable)  # all have it
            owners = [(r, Piece(-1, 0, int(np.prod(shapes[r])))) for r in holders]
            shape = shapes[holders[0]] if holders else shapes[0]
        elif i is None:
            return ops.convert_to_numpy(variable)
        else:
            owners, shape = self._owners[i], self.stored_shape(variable)
            # A number of the variable. Which of these it is must not depend on what this replica has.
            if not tuple(variable.shape) and (self._may_cut[i] or len(self.variables[i].shape)):
                owners, shape = [(owners[0][0], Piece(i, 0, 1))], ()
            elif not self._may_cut[i]:
                shape = processes.gather_objects(shape)[owners[0][0]]
                owners = [(owners[0][0], Piece(i, 0, int(np.prod(shape))))]
        whole = None
        for replica, piece in owners:
            mine = flattened(variable) if replica == self.replica_id else None
            for start in range(0, piece.size, _SENT_TOGETHER):
                stop = min(piece.size, start + _SENT_TOGETHER)
                part = ops.zeros((stop - start,), dtype_of(variable)) if mine is None else mine[start:stop]
                (part,) = replicas.broadcast([part], root=replica)
                array = ops.convert_to_numpy(part)
                whole = np.empty((sum(p.size for _, p in owners),), array.dtype) if whole is None else whole
                whole[piece.start + start : piece.start + stop] = array
        return np.zeros(shape or ()) if whole is None else whole.reshape(shape or ())

    def assign_stored(self, variable: Variable, array: Any) -> None:
        """Takes this replica's part of a whole state."""
        i = self._slots.get(id(variable))
        if i is None and id(variable) not in self._apart:
            variable.assign(array)
        elif 0 in variable.shape:
            return
        elif i is None or not self._may_cut[i] or not tuple(variable.shape):
            variable.assign(array)
        else:
            piece = self._mine[i]
            variable.assign(np.array(array).reshape(-1)[piece.start : piece.stop])

    # -- the report ----------------------------------------------------------------------------------------------

    def memory_report(self, state: Sequence[Variable]) -> MemoryReport:
        """What each replica holds of this state, as far as this one can know it."""
        held: list[int | None] = [0] * self.num_replicas
        whole = 0
        replicated = []
        unknown = False
        for variable in state:
            item = item_size(variable)
            i, shape = self._slots.get(id(variable)), tuple(variable.shape)
            if id(variable) in self._apart or (i is not None and self.stored_shape(variable) is None):
                unknown = True
                held = plus(held, self.replica_id, int(np.prod(shape)) * item)
                continue
            if i is None or not shape:
                size = int(np.prod(shape)) * item
                held = [None if h is None else h + size for h in held]
                whole += size
                replicated.append((variable.path, size, "a number" if not shape else "it belongs to no variable"))
                continue
            full = int(np.prod(self.stored_shape(variable) or ()))
            whole += full * item
            for replica, piece in self._owners[i]:
                held = plus(held, replica, (piece.size if self._may_cut[i] else full) * item)
        if unknown:
            held = [h if replica == self.replica_id else None for replica, h in enumerate(held)]
        return MemoryReport(held, whole, replicated)


def _groups(
    variables: Sequence[Variable], may_cut: Sequence[bool], num_replicas: int, bucket_bytes: float
) -> list[Bucket]:
    by_dtype: dict[str, list[int]] = {}
    for i, variable in enumerate(variables):
        if not overwrites_variable(variable) and size_of(variable):
            by_dtype.setdefault(dtype_of(variable), []).append(i)
    groups = []
    for dtype, alike in by_dtype.items():
        num_bytes = [size_of(variables[i]) * item_size(variables[i]) for i in alike]
        buckets: Iterable[Sequence[int]] = [range(len(alike))]
        # What must stay whole has more variables to be divided evenly among.
        if all(may_cut[i] for i in alike):
            # The order in which a backward pass makes the gradients: the last first.
            limit = largest_bucket(sum(num_bytes), bucket_bytes)
            buckets = in_buckets(num_bytes, reversed(range(len(alike))), limit)
        for places in buckets:
            indices = [alike[place] for place in places]
            sizes = [size_of(variables[i]) for i in indices]
            cuts = partition.cut(sizes, [may_cut[i] for i in indices], num_replicas)
            pieces = [[Piece(indices[p.variable], p.start, p.stop) for p in mine] for mine in cuts]
            shares = [sum(piece.size for piece in mine) for mine in pieces]
            is_lopsided = max(shares) * num_replicas > _MAX_IMBALANCE * sum(sizes) + num_replicas
            groups.append(Bucket(dtype, pieces, indices, max(shares), is_lopsided))
    return groups


# Where gradients can be reduced while the others are computed.
_sliced = for_backend({"torch": "keras_shardopt.backends.torch.sliced_bucket"})

# Where a slice can lie in the memory of the whole.
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
