"""Weights in buckets: each rank holds 1/N of each bucket, and gathers a bucket while layers use its weights.

A weight without values is a `HeldParameter`. PyTorch passes each function call on such a weight to its method
`__torch_function__`, which calls the function with the gathered values. Autograd saves a description (`_pack`) of these
values, so a bucket's memory is freed after its last use, and gathered again by the backward pass.

Ranks must gather in the same order. Each rank records the order of a step. In the next step, a gather in this order
needs no further communication, and begins before it is needed. Other gathers are announced to all ranks.

Private names of PyTorch: `torch._C.DisableTorchFunctionSubclass` - functions skip `__torch_function__` in its block;
`UntypedStorage._cdata` - the address of a storage; `Tensor._version` - counts changes in place.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from keras_shardopt.backends.torch.held import values_of
from keras_shardopt.backends.torch.memory import Gathering
from keras_shardopt.backends.torch.process_group import announce, another_group
from keras_shardopt.extensions.sharded_weights.settings import DividedWeights
from keras_shardopt.fit.torch.step import TrainStep
from keras_shardopt.numerics import Tensor

_NUM_RECENT = 2
"""The number of buckets that stay in memory after use, so a layer can alternate between two."""


class ShardedStep(TrainStep):
    """A step in which weights have values only while layers use them."""

    def begin_fit(self) -> None:
        """Raise ValueError if the model is compiled."""
        if self._session.model.jit_compile:
            raise ValueError(
                "With `ShardedWeights` a step cannot be compiled, because it gathers weights. Received: a model with "
                "`jit_compile=True`. Use `model.compile(..., jit_compile=False)`."
            )

    def before_step(self, begins_epoch: bool) -> None:
        """Divide the weights, if they are whole, as at the beginning of `fit`."""
        self.begin_fit()
        stages = DividedWeights.found_in(self._session.cross_shards)
        if len(stages) > 1:
            raise ValueError(
                "`ShardedWeights` is for one optimizer of a model. Received: a model with "
                f"{len(stages)} optimizers that have it. Remove it from the others."
            )
        for stage in stages:
            shards = stage.context.optimizer._shards
            if stage.weights is None and shards is not None:
                stage.weights = WeightsOfOptimizer(shards, self._session.ranks, stage.settings.prefetch)
            if stage.weights is not None:
                stage.weights.divide()

    def run(self, real: Callable[[Any], Any], data: Any, trains: bool) -> Any:
        """Run Keras's step (`real`). Record the order of gathers, and free weights that autograd would keep."""
        found = [stage.weights for stage in DividedWeights.found_in(self._session.cross_shards)]
        divided = [weights for weights in found if weights is not None and weights.is_divided]
        if divided:
            self._session.confirm()  # now, because ranks already exchange weights in the forward pass
        for weights in divided:
            weights.begin_pass(trains)
        with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
            result = super().run(real, data, trains)
        for weights in divided:
            weights.end_pass()
        return result


class _Bucket:
    """Weights that are gathered together. `own`: this rank's slice (`chunk` elements). `flat`: all, if gathered."""

    def __init__(self, number: int, owner: WeightsOfOptimizer, parameters: Sequence[Any], chunk: int) -> None:
        self.number, self.owner, self.parameters, self.chunk = number, owner, list(parameters), chunk
        self.own = parameters[0].detach().new_zeros(chunk)
        self.flat: Tensor | None = None
        self.gathering: Gathering | None = None
        """The gathering of `flat`, until it has finished."""
        self.version = 0
        """PyTorch's version of `flat` when it was gathered or stored. Changes in place increase it."""


_bucket_of_memory: dict[int, _Bucket] = {}
"""The gathered buckets, by the address of their memory in PyTorch."""

_place_of_memory: dict[int, tuple[weakref.ref[_Bucket], int]] = {}
"""The bucket, and the position in it, of a weight without values, by the address of the weight's memory."""


def _pack(tensor: Tensor) -> Any:
    address = tensor.untyped_storage()._cdata
    reference, at = _place_of_memory.get(address, (None, 0))
    held = reference() if reference is not None else None
    if held is not None:  # a function of the program saves the weight itself, such as a `torch.autograd.Function`
        return held, held.owner.num_updates, tensor.shape, torch.empty(tensor.shape, device="meta").stride(), at
    found = _bucket_of_memory.get(address)
    if found is None or found.flat is None or tensor.dtype != found.flat.dtype:
        return tensor
    return found, found.owner.num_updates, tensor.shape, tensor.stride(), tensor.storage_offset()


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    bucket, num_updates, *layout = packed
    if bucket.owner.num_updates != num_updates:
        raise RuntimeError(
            "A backward pass needs the weights of its forward pass. Received: a backward pass after the weights were "
            "updated. Compute all gradients before `optimizer.apply`."
        )
    return torch.as_strided(bucket.owner.gathered(bucket), *layout)


class WeightsOfOptimizer:
    """The divided weights of one optimizer.

    Args:
        shards: the `FlatShards` of the optimizer.
        ranks: the communicator of all ranks.
        prefetch: the number of buckets to gather before they are needed.
    """

    def __init__(self, shards: Any, ranks: Any, prefetch: int) -> None:
        division = shards.division
        if not all(division.may_split[i] for i in division.owners):
            whole = [v.path for v, splits in zip(shards.variables, division.may_split) if not splits]
            raise ValueError(
                "`ShardedWeights` divides each weight, so the optimizer must be element-wise, and weights must have no "
                f"constraints. Received: weights that only one rank can update: {whole}. Remove `ShardedWeights`."
            )
        self._shards, self._ranks, self._prefetch = shards, ranks, prefetch
        self._rank = int(ranks.replica_id)
        self._group_ref: Any = None
        parameters = values_of(shards.variables)
        self._buckets = [
            _Bucket(number, self, [parameters[i] for i in bucket.variables], bucket.chunk)
            for number, bucket in enumerate(division.buckets)
        ]
        self._places: dict[int, tuple[_Bucket, int]] = {}
        for bucket in self._buckets:
            at = 0
            for parameter in bucket.parameters:
                self._places[id(parameter)] = bucket, at
                at += parameter.numel()
        self.is_divided = False
        self.num_updates = 0
        self._orders: dict[bool, list[_Bucket]] = {}
        self._order: list[_Bucket] | None = None
        self._expected: list[_Bucket] = []
        self._recent: list[_Bucket] = []
        self.num_gathers = 0
        shards.holder = self

    # -- whole and divided -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def divide(self) -> None:
        """Keep only this rank's slices of the weights."""
        if self.is_divided:
            return
        for parameter in (each for bucket in self._buckets for each in bucket.parameters):
            if isinstance(parameter, HeldParameter):  # another model with this layer has divided it
                parameter._keras_shardopt_holder.make_whole()
        self._copy_in()
        for piece, own in self._own_pieces():
            (stand_in,) = values_of([self._shards.stand_ins[piece.variable]])
            stand_in.data = own.view(stand_in.shape)
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.data = parameter.new_full((), math.nan).expand(parameter.shape)
                parameter._keras_shardopt_holder = self
                at = self._places[id(parameter)][1]
                _place_of_memory[parameter.untyped_storage()._cdata] = weakref.ref(bucket), at
                parameter.__class__ = HeldParameter
        self.is_divided = True

    @torch.no_grad()
    def make_whole(self) -> None:
        """Gather all weights. All ranks must call this together."""
        if not self.is_divided:
            return
        self._forget()
        for bucket in self._buckets:
            self._begin(bucket)
        for bucket in self._buckets:
            flat = self._finish(bucket)
            for parameter in bucket.parameters:
                if isinstance(parameter, HeldParameter):
                    parameter.__class__ = torch.nn.Parameter
                    del _place_of_memory[parameter.untyped_storage()._cdata]
                vars(parameter).pop("_keras_shardopt_holder", None)  # none after an update of whole weights
                parameter.data = _part(parameter, flat, self._places[id(parameter)][1])
        self._forget()
        self.is_divided = False

    @torch.no_grad()
    def _copy_in(self) -> None:
        """Copy this rank's slices of whole weights to the buckets."""
        for piece, own in self._own_pieces():
            (whole,) = values_of([self._shards.variables[piece.variable]])
            own.copy_(whole.reshape(-1)[piece.start : piece.stop])

    def _own_pieces(self) -> Iterator[tuple[Any, Tensor]]:
        """Yield each slice (`Piece`) of a weight on this rank, with the part of its bucket's `own` that stores it."""
        for bucket, made in zip(self._buckets, self._shards.division.buckets):
            for piece, start, stop in made.places(self._rank):
                yield piece, bucket.own[start:stop]

    def before_update(self) -> None:
        """Release gathered buckets. If weights are whole, copy this rank's slices, which the update changes."""
        if self.is_divided:
            self._forget()
        else:
            self._copy_in()

    def after_update(self) -> None:
        """If each rank holds the whole weights now, gather the updated slices into them."""
        self.num_updates += 1
        if not self.is_divided:
            self.is_divided = True
            self.make_whole()

    @property
    def _group(self) -> Any:
        """A separate process group for gathers: their order relative to exchanges of gradients can differ by rank."""
        group = None if self._group_ref is None else self._group_ref()
        if group is None:
            group = another_group()
            self._group_ref = weakref.ref(group)
        return group

    # -- one bucket --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _begin(self, bucket: _Bucket) -> None:
        bucket.flat = bucket.own.new_empty(self._ranks.num_replicas * bucket.chunk)
        self._own_row(bucket, bucket.flat).copy_(bucket.own)
        self.num_gathers += 1
        bucket.gathering = Gathering(self._ranks)
        bucket.gathering.begin(bucket.flat, self._group)

    def _own_row(self, bucket: _Bucket, flat: Tensor) -> Tensor:
        row: Tensor = flat.view(-1, bucket.chunk)[self._rank]
        return row

    def _finish(self, bucket: _Bucket) -> Tensor:
        flat = bucket.flat
        assert flat is not None
        if bucket.gathering is not None:
            bucket.gathering.finish()
            bucket.gathering, bucket.version = None, flat._version
        _bucket_of_memory[flat.untyped_storage()._cdata] = bucket
        return flat

    def _release(self, bucket: _Bucket) -> None:
        if bucket.flat is not None:
            flat = self._finish(bucket)
            self.store_changes(bucket, flat)
            del _bucket_of_memory[flat.untyped_storage()._cdata]
            bucket.flat = None

    def _forget(self) -> None:
        self._recent = []
        for bucket in self._buckets:
            self._release(bucket)

    # -- the order of gathers ----------------------------------------------------------------------------------------

    def begin_pass(self, trains: bool) -> None:
        """Begin a training step (`trains`) or test step. The step should gather in the order of the last such step."""
        self._forget()
        self._trains, self._order, self._expected = trains, [], self._orders.get(trains, [])
        self._begin_expected()

    def end_pass(self) -> None:
        """Release all weights, and remember the order of gathers."""
        assert self._order is not None
        self._forget()
        self._orders[self._trains], self._order, self._expected = self._order, None, []

    def _ahead(self) -> list[_Bucket]:
        at = len(self._order or ())
        return self._expected[at : at + self._prefetch]

    def _begin_expected(self) -> None:
        for bucket in self._ahead():
            if bucket.flat is None:
                self._begin(bucket)

    def gathered(self, bucket: _Bucket) -> Tensor:
        """Return the memory of a bucket, gathered over all ranks. All ranks must make the same calls in a step."""
        if bucket in self._recent:
            assert bucket.flat is not None
            return bucket.flat
        at = len(self._order or ())
        if self._expected[at : at + 1] != [bucket]:
            self._expected = []
            numbers = [number for number, _ in announce("gathers a weight", bucket.number)]
            if len(set(numbers)) > 1:
                paths = [self._shards.variables[self._shards.division.buckets[n].variables[0]].path for n in numbers]
                raise ValueError(
                    "With `ShardedWeights`, all ranks must use the layers in the same order. Received, by rank: the "
                    f"weights {paths}. Remove conditions on the rank or on values from `call`."
                )
        if bucket.flat is None:
            self._begin(bucket)
        flat = self._finish(bucket)
        if self._order is not None:
            self._order.append(bucket)
        self._recent = [*self._recent[1 - _NUM_RECENT :], bucket]
        kept = [*self._recent, *self._ahead()]
        for other in self._buckets:
            if other not in kept:
                self._release(other)
        self._begin_expected()
        return flat

    def values(self, parameter: Any, shares_grad: bool) -> Tensor:
        """Return the values of a weight. With `shares_grad`, their gradients become those of the weight."""
        bucket, at = self._places[id(parameter)]
        flat = self.gathered(bucket)
        if shares_grad:
            part: Tensor = _Values.apply(parameter, flat, at)
            return part
        return _part(parameter, flat, at)

    def place(self, parameter: Any) -> tuple[_Bucket, Tensor, int]:
        """Return the bucket of a weight that has just been gathered, its values, and their version."""
        bucket, _ = self._places[id(parameter)]
        assert bucket.flat is not None
        return bucket, bucket.flat, bucket.flat._version

    @torch.no_grad()
    def store_changes(self, bucket: _Bucket, flat: Tensor, version: int | None = None) -> None:
        """Store this rank's slice of `flat` if it was changed in place since `version` (default: the gathering)."""
        now = flat._version
        if now == (bucket.version if version is None else version):
            return
        bucket.own.copy_(self._own_row(bucket, flat))
        if bucket.flat is flat:
            bucket.version = now
        elif bucket.flat is not None:  # it was gathered again before the change, so free the old values
            self._recent = [each for each in self._recent if each is not bucket]
            self._release(bucket)


def _part(parameter: Tensor, flat: Tensor, at: int) -> Tensor:
    """Return the values of a weight, which begin at this position of its bucket's memory."""
    return flat[at : at + parameter.numel()].view(parameter.shape)


class _Values(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, flat: Tensor, at: int) -> Tensor:
        return _part(parameter, flat, at)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None


class HeldParameter(torch.nn.Parameter):
    """A weight whose values are divided among ranks. Functions get the gathered values."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` with gathered values. Attributes such as `grad` and `shape` need no values."""
        name, kwargs = func.__name__, kwargs or {}
        attribute = getattr(func.__self__, "__name__", "") if name in ("__get__", "__set__", "__delete__") else None
        with torch._C.DisableTorchFunctionSubclass():
            if (attribute not in _DATA) if attribute is not None else name in _WITHOUT_VALUES:
                return func(*args, **kwargs)
            in_place = (name[-1] == "_" and name[-2:] != "__") or name == "__setitem__" or name.startswith("__i")
            found: list[Any] = []

            def values(value: Any) -> Any:
                if isinstance(value, HeldParameter):
                    shares = value.requires_grad and torch.is_grad_enabled() and not in_place and attribute is None
                    held = value._keras_shardopt_holder.values(value, shares)
                    found.append((value._keras_shardopt_holder, *value._keras_shardopt_holder.place(value)))
                    return held
                if isinstance(value, (list, tuple)):
                    return type(value)(map(values, value))
                return value

            if attribute == "data":  # `data` itself would not share the version of the values
                with torch.no_grad():
                    result = values(args[0]).copy_(args[1]) if name == "__set__" else values(args[0]).detach()
            else:
                result = func(*map(values, args), **{key: values(value) for key, value in kwargs.items()})
            for holder, *place in found:
                holder.store_changes(*place)
            # `values` refers to itself, so until garbage is collected, `found` would keep the memory of buckets.
            found.clear()
            return result

    def _whole(self) -> torch.nn.Parameter:
        return torch.nn.Parameter(self.data.clone(), self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """Return a whole weight. All ranks must call this together."""
        memo[id(self)] = copied = self._whole()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a whole weight. All ranks must call this together."""
        return self._whole().__reduce_ex__(protocol)


_DATA = {"T", "mT", "H", "mH", "real", "imag", "data"}
_WITHOUT_VALUES = {
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "is_contiguous", "get_device"),
    *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "is_floating_point", "is_complex"),
    *("untyped_storage", "storage_offset", "__len__", "is_tensor", "new_full", "new_empty", "new_zeros"),
    *("grad", "backward"),  # functions of `torch.autograd`: they need the weight itself
}
