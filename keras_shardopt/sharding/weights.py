"""The weights of replicas that are processes, and the collectives that send updated slices to all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from keras import ops

from keras_shardopt.backends import for_backend
from keras_shardopt.backends.active import runtime
from keras_shardopt.backends.communicator import Communicator
from keras_shardopt.numerics import Tensor
from keras_shardopt.sharding.division import Bucket, Division
from keras_shardopt.sharding.shards import Shards, flattened

# PyTorch only (otherwise None): lets slices share memory with the whole variable.
_memory = for_backend({"torch": "keras_shardopt.backends.torch.memory"})

SLICES_SHARE_MEMORY = _memory is not None
"""Whether a stand-in that is a slice uses the memory of its weight."""


class WeightHolder(Protocol):
    """Stores the weights of replicas that update slices of them."""

    def before_update(self) -> None:
        """Make the stand-ins, the variables to update, contain this replica's slices of the weights."""

    def after_update(self) -> None:
        """Send the updated slices to other replicas, if these need them now."""


class WholeWeights:
    """Stores all weights on every replica.

    Args:
        shards: the `FlatShards`.
        division: the slices of all replicas.
        replicas: the communicator of all replicas.
    """

    def __init__(self, shards: Shards, division: Division, replicas: Communicator) -> None:
        self._shards = shards
        self._division = division
        self.blocks = [self._block(bucket, replicas) for bucket in division.buckets]
        """For each bucket, an object that keeps the bucket's weights in one block of memory, or None."""

    def _block(self, bucket: Bucket, replicas: Communicator) -> Any:
        if _memory is None or not all(self._division.may_split[i] for i in bucket.variables):
            return None
        variables = [self._shards.variables[i] for i in bucket.variables]
        return _memory.together(replicas, variables, replicas.num_replicas * bucket.chunk)

    def before_update(self) -> None:
        """Make each stand-in contain this replica's slice of its weight, if possible in the same memory."""
        for block in self.blocks:
            if block is not None:
                block.flat()  # before slicing, because it may move the weights
        parts = [
            (self._shards.stand_ins[i], self._shards.variables[i], piece.start, piece.stop)
            for i, piece in self._division.own.items()
            if self._division.may_split[i]
        ]
        if _memory is not None:
            _memory.alias_slices(parts)
            return
        for stand_in, variable, start, stop in parts:
            stand_in.assign(ops.reshape(flattened(variable)[start:stop], stand_in.shape))

    def after_update(self) -> None:
        """Send this replica's updated slices to all replicas."""
        replicas = runtime.communicator(self._shards.axis_name)
        # Run the same collectives on all replicas, even if the weights of one replica have moved to other memory.
        gathering: Any = None
        elsewhere: list[tuple[Bucket, Tensor]] = []
        for bucket, block in zip(self._division.buckets, self.blocks):
            if block is not None and _memory is not None:
                flat = block.flat()
                if flat is None:
                    flat = block.room(self._shards.replica_id, self._own_chunk(bucket))
                    elsewhere.append((bucket, flat))
                gathering = gathering or _memory.Gathering(replicas)
                gathering.begin(flat)
            elif bucket.is_uneven:
                self._assign(bucket, self._broadcast(bucket, replicas))
            else:
                (joined,) = replicas.all_gather([self._own_chunk(bucket)])
                self._assign_joined(bucket, joined)
        if gathering is not None:
            gathering.finish()
        for bucket, flat in elsewhere:
            self._assign_joined(bucket, flat)

    def _own_slices(self, bucket: Bucket) -> list[Tensor]:
        return [flattened(self._shards.stand_ins[piece.variable]) for piece in bucket.pieces[self._shards.replica_id]]

    def _own_chunk(self, bucket: Bucket) -> Tensor:
        missing = bucket.chunk - sum(piece.size for piece in bucket.pieces[self._shards.replica_id])
        padding = [ops.zeros((missing,), bucket.dtype)] if missing else []
        return ops.concatenate([*self._own_slices(bucket), *padding])

    def _broadcast(self, bucket: Bucket, replicas: Communicator) -> list[Tensor]:
        chunks = []
        for replica, pieces in enumerate(bucket.pieces):
            size = sum(piece.size for piece in pieces)
            own = self._own_slices(bucket) if replica == self._shards.replica_id else []
            flat = ops.concatenate(own) if own else ops.zeros((size,), bucket.dtype)
            chunks.append(replicas.broadcast([flat], root=replica)[0] if size else flat)
        return chunks

    def _assign_joined(self, bucket: Bucket, joined: Tensor) -> None:
        self._assign(bucket, [joined[r * bucket.chunk : (r + 1) * bucket.chunk] for r in range(len(bucket.pieces))])

    def _assign(self, bucket: Bucket, chunks: Sequence[Tensor]) -> None:
        """Assign the weights of a bucket, given the slices of each replica."""
        parts: dict[int, list[Tensor]] = {}
        for replica, chunk in enumerate(chunks):
            for piece, start, stop in bucket.places(replica):
                parts.setdefault(piece.variable, []).append(chunk[start:stop])
        for i, slices in parts.items():
            variable = self._shards.variables[i]
            if _memory is not None:
                _memory.assign_slices(variable, slices)
            else:
                variable.assign(ops.reshape(ops.concatenate(slices), variable.shape))
