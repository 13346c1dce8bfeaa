"""The weights of an optimizer: whole for other code, and divided among ranks in training steps."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from keras_shardopt.backends.torch.held import values_of
from keras_shardopt.extensions.sharded_weights.torch.buckets import Bucket, Gathers, place_of_memory
from keras_shardopt.extensions.sharded_weights.torch.held import HeldParameter, part_of
from keras_shardopt.numerics import Tensor


class WeightsOfOptimizer:
    """The divided weights of one optimizer with `FlatShards`. It gathers `prefetch` buckets before they are needed."""

    def __init__(self, shards: Any, ranks: Any, prefetch: int) -> None:
        division = shards.division
        if not all(division.may_split[i] for i in division.owners):
            whole = [v.path for v, splits in zip(shards.variables, division.may_split) if not splits]
            raise ValueError(
                "`ShardedWeights` divides each weight, so the optimizer must be element-wise, and weights must have no "
                f"constraints. Received: weights that only one rank can update: {whole}. Remove `ShardedWeights`."
            )
        self._shards = shards
        self._rank = int(ranks.replica_id)
        self.gathers = Gathers(ranks, prefetch)
        parameters = values_of(shards.variables)
        self.places: dict[int, tuple[Bucket, int]] = {}
        """The bucket of each parameter, and the parameter's position in it, by the `id` of the parameter."""
        for number, made in enumerate(division.buckets):
            inside, path = [parameters[i] for i in made.variables], shards.variables[made.variables[0]].path
            bucket = Bucket(number, self.gathers, path, inside, made.chunk)
            self.gathers.buckets.append(bucket)
            at = 0
            for parameter in inside:
                self.places[id(parameter)] = bucket, at
                at += parameter.numel()
        self.is_divided = False
        shards.holder = self

    @torch.no_grad()
    def divide(self) -> None:
        """Keep only this rank's slices of the weights."""
        if self.is_divided:
            return
        for parameter in (each for bucket in self.gathers.buckets for each in bucket.parameters):
            if isinstance(parameter, HeldParameter):  # another model with this layer has divided it
                parameter._keras_shardopt_holder.make_whole()
        self._copy_in()
        for piece, own in self._own_pieces():
            (stand_in,) = values_of([self._shards.stand_ins[piece.variable]])
            stand_in.data = own.view(stand_in.shape)
        for bucket in self.gathers.buckets:
            for parameter in bucket.parameters:
                parameter.data = parameter.new_full((), math.nan).expand(parameter.shape)
                parameter._keras_shardopt_holder = self
                at = self.places[id(parameter)][1]
                place_of_memory[parameter.untyped_storage()._cdata] = weakref.ref(bucket), at
                parameter.__class__ = HeldParameter
        self.is_divided = True

    @torch.no_grad()
    def make_whole(self) -> None:
        """Gather all weights. All ranks must call this together."""
        if not self.is_divided:
            return
        self.gathers.release_all()
        for bucket in self.gathers.buckets:
            bucket.begin()
        for bucket in self.gathers.buckets:
            flat = bucket.finish()
            for parameter in bucket.parameters:
                if isinstance(parameter, HeldParameter):
                    parameter.__class__ = torch.nn.Parameter
                    del place_of_memory[parameter.untyped_storage()._cdata]
                vars(parameter).pop("_keras_shardopt_holder", None)  # none after an update of whole weights
                parameter.data = part_of(parameter, flat, self.places[id(parameter)][1])
        self.gathers.release_all()
        self.is_divided = False

    @torch.no_grad()
    def _copy_in(self) -> None:
        """Copy this rank's slices of whole weights to the buckets."""
        for piece, own in self._own_pieces():
            (whole,) = values_of([self._shards.variables[piece.variable]])
            own.copy_(whole.reshape(-1)[piece.start : piece.stop])

    def _own_pieces(self) -> Iterator[tuple[Any, Tensor]]:
        """Yield each slice (`Piece`) of a weight on this rank, with the part of its bucket's `own` that stores it."""
        for bucket, made in zip(self.gathers.buckets, self._shards.division.buckets):
            for piece, start, stop in made.places(self._rank):
                yield piece, bucket.own[start:stop]

    def before_update(self) -> None:
        """Release gathered buckets. If weights are whole, copy this rank's slices, which the update changes."""
        if self.is_divided:
            self.gathers.release_all()
        else:
            self._copy_in()

    def after_update(self) -> None:
        """If each rank holds the whole weights now, gather the updated slices into them."""
        self.gathers.num_updates += 1
        if not self.is_divided:
            self.is_divided = True
            self.make_whole()
