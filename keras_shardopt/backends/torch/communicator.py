"""Replicas of PyTorch programs: the processes of `torch.distributed`, one replica each.

Private names of Keras touched here (a test holds each of them):
    `keras.src.backend.common.global_state` - holds "global_seed_generator", the seed of layers without their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import torch
import torch.distributed as dist
from keras.src.backend.common import global_state
from torch.nn.parallel import DistributedDataParallel

from keras_shardopt._typing import Gradients, Groups, ReduceOp, Tensor, Variable
from keras_shardopt.backends.communicator import Communicator, GradientState
from keras_shardopt.backends.models import living_models
from keras_shardopt.backends.torch.ddp import (
    _INITIALIZE_DDP,
    _REDUCED_BY_DDP,
    _ddps,
    _initialize_ddp,
    _owns,
)
from keras_shardopt.backends.torch.process_group import (
    explaining_failures,
    failure,
    gather_objects,
    say_failure,
)
from keras_shardopt.backends.torch.random_numbers import draw_apart

BUCKET_BYTES = 25 * 2**20
"""Tensors travel in flat buckets of about this size, as in PyTorch's own DDP."""


# The names since PyTorch 2.13, which warns about the older ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TorchProcessGroup(Communicator):
    """The ranks of the default process group."""

    is_spmd = False
    is_multi_process = True

    def __init__(self) -> None:
        self.num_replicas = dist.get_world_size()
        self.replica_id = dist.get_rank()
        self.is_chief = self.replica_id == 0
        # Weakly: a group that outlives `destroy_process_group` takes the interpreter down when it exits.
        self._world = weakref.ref(dist.group.WORLD)
        self._subgroups: dict[tuple[tuple[int, ...], ...], list[Any]] = {}
        # Variables whose DDP owner has been looked for. By identity: tensors compare element by element.
        self._ddp_of: dict[int, tuple[weakref.ref[Any], weakref.ref[Any] | None]] = {}
        self._num_failures = 0
        self._failures_taken: set[str] = set()
        if _INITIALIZE_DDP is not None:
            mine = weakref.ref(self)
            keras.Model._initialize_ddp = lambda model: _initialize_ddp(model, mine())

    @torch.compiler.disable
    def say_failure(self, words: str, groups: Groups) -> None:
        # Without a collective: the other groups are somewhere else. Members of one count alike.
        self._num_failures += 1
        mine = next(group for group in groups if self.replica_id in group)
        self._failures_taken.add(f"{mine[0]}/{self._num_failures}")
        say_failure(f"{mine[0]}/{self._num_failures}", words)

    @torch.compiler.disable
    def others_have_failed(self) -> bool:
        found = failure()
        return found is not None and found[0] not in self._failures_taken

    @torch.compiler.disable
    def take_failure(self) -> str:
        number, words = failure() or ("", "")
        self._failures_taken.add(number)
        return words

    def are_current(self) -> bool:
        """Whether this object still speaks of the process group that runs."""
        return self._world() is not None and self._world() is dist.group.WORLD

    def forget_groups(self) -> None:
        """Lets go of the subgroups, which are destroyed together with the group of all ranks."""
        self._subgroups.clear()

    def is_cheap_to_read(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and not torch.compiler.is_compiling()

    @torch.compiler.disable
    def gradient_state(self, grads: Gradients, variables: Sequence[Variable]) -> GradientState:
        ddp = self._ddp_owner(_tensor(variables[0]))
        if ddp is None:
            return GradientState.LOCAL
        # DDP reduces what went forward through it, and nothing else.
        reduced = ddp.__dict__.pop(_REDUCED_BY_DDP, False)
        return GradientState.GLOBAL if reduced else GradientState.LOCAL

    @torch.compiler.disable
    @torch.no_grad()
    def all_reduce(self, tensors: Sequence[Tensor], op: ReduceOp, groups: Groups | None = None) -> list[Tensor]:
        group, size = self._group(groups)
        reduce = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
        result: list[Tensor] = [None] * len(tensors)
        flats = []
        under_way: list[Any] = []
        for indices in _buckets(tensors):
            flat = torch.cat([_dense(tensors[i]).reshape(-1) for i in indices])
            with explaining_failures(under_way):
                under_way.append(dist.all_reduce(flat, reduce, group=group, async_op=True))
            flats.append((indices, flat))
        for number, (indices, flat) in enumerate(flats):
            with explaining_failures(under_way):
                under_way[number].wait()
            if op == "mean":
                flat.div_(size)
            for i, part in zip(indices, flat.split([tensors[i].numel() for i in indices])):
                result[i] = part.view(tensors[i].shape)
        return result

    @torch.compiler.disable
    @torch.no_grad()
    def reduce_scatter(self, tensors: Sequence[Tensor], op: ReduceOp, groups: Groups | None = None) -> list[Tensor]:
        group, size = self._group(groups)
        result = []
        for tensor in tensors:
            part = self._scattered(tensor.contiguous(), group, size)
            result.append(part.div_(size) if op == "mean" else part)
        return result

    def _scattered(self, tensor: Tensor, group: Any, size: int) -> Tensor:
        """This rank's slice of the sum."""
        if dist.get_backend(group) == "gloo":
            # Whose own reduce-scatter is an all-reduce of which a part is kept: twice the bytes (PyTorch 2.13).
            everyones = torch.empty_like(tensor)
            with explaining_failures():
                dist.all_to_all_single(everyones, tensor, group=group)
            return everyones.view(size, -1).sum(0)
        part = tensor.new_empty(tensor.numel() // size)
        with explaining_failures():
            _reduce_scatter(part, tensor, dist.ReduceOp.SUM, group=group)
        return part

    @torch.compiler.disable
    @torch.no_grad()
    def all_gather(self, tensors: Sequence[Tensor], groups: Groups | None = None) -> list[Tensor]:
        group, size = self._group(groups)
        result = []
        for tensor in tensors:
            whole = tensor.new_empty(tensor.numel() * size)
            with explaining_failures():
                _all_gather(whole, tensor.contiguous(), group=group)
            result.append(whole)
        return result

    @torch.compiler.disable
    @torch.no_grad()
    def broadcast(self, tensors: Sequence[Tensor], root: int = 0, groups: Groups | None = None) -> list[Tensor]:
        group, _ = self._group(groups)
        source = root if group is None else dist.get_global_rank(group, root)
        result: list[Tensor] = [None] * len(tensors)
        for indices in _buckets(tensors):
            # As bytes: every dtype travels, and bits stay what they are.
            flat = torch.cat([tensors[i].detach().contiguous().reshape(-1).view(torch.uint8) for i in indices])
            with explaining_failures():
                dist.broadcast(flat, source, group=group)
            sizes = [tensors[i].numel() * tensors[i].element_size() for i in indices]
            for i, part in zip(indices, flat.split(sizes)):
                result[i] = part.clone().view(tensors[i].dtype).view(tensors[i].shape)
        return result

    def broadcast_object(self, thing: Any, root: int) -> Any:
        """Every rank gets rank `root`'s `thing`, whatever it is."""
        things = [thing]
        with explaining_failures():
            dist.broadcast_object_list(things, root)
        return things[0]

    @torch.compiler.disable
    def broadcast_from_rank_0(
        self,
        variables: Sequence[Variable],
        optimizer_variables: Sequence[Variable],
        groups: Groups | None = None,
    ) -> float:
        weights = [_tensor(v) for v in variables]
        state = [_tensor(v) for v in optimizer_variables]
        others = self._model_and_seed_state(weights)
        mine = (_signature(weights), _signature(state), _signature(others))
        theirs = gather_objects(mine, "takes the weights of rank 0")
        for what, position in (("trainable variables", 0), ("optimizer variables", 1)):
            for rank, signature in enumerate(theirs):
                if signature[position] != theirs[0][position]:
                    raise ValueError(
                        f"All replicas must have the same {what}. Received on rank 0: {theirs[0][position]}, "
                        f"on rank {rank}: {signature[position]}. Build the same model and optimizer on every rank."
                    )
        equal = self._take_from_root(weights, groups)
        self._take_from_root(state, groups)
        # Which other models are alive is each rank's own affair, so these follow only where all ranks agree.
        if all(signature[2] == theirs[0][2] for signature in theirs):
            self._take_from_root(others, groups)
        draw_apart(self, [])  # also where a program has seeded PyTorch's generator since it was last said
        group, size = self._group(groups)
        num_equal = torch.tensor(float(equal), device=weights[0].device)
        with explaining_failures():
            dist.all_reduce(num_equal, group=group)
        return size / float(num_equal) if equal else 0.0

    def _take_from_root(self, tensors: Sequence[Tensor], groups: Groups | None) -> bool:
        """Overwrites `tensors` with the first rank's values. Returns whether they had been equal, bit for bit."""
        equal = True
        with torch.no_grad():
            for mine, roots in zip(tensors, self.broadcast(tensors, groups=groups)):
                if not torch.equal(_bytes(mine), _bytes(roots)):
                    equal = False
                    mine.copy_(roots)
        return equal

    def _model_and_seed_state(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """What belongs to the same model as `weights` but is not trained, and Keras' global seed."""
        seed = global_state.get_global_attribute("global_seed_generator")
        state = [] if seed is None else [_tensor(seed.state)]
        trained = {id(w) for w in weights}
        models = [
            model
            for model in living_models
            if getattr(model, "built", False) and any(id(_tensor(v)) in trained for v in model.trainable_variables)
        ]
        if models:
            outermost = max(models, key=lambda model: len(model.variables))
            state += [_tensor(v) for v in outermost.variables if id(_tensor(v)) not in trained]
        return state

    def is_reduced_by_ddp(self, variable: Variable) -> bool:
        """Whether a DDP owns it."""
        return self._ddp_owner(_tensor(variable)) is not None

    def has_found_no_ddp(self, variable: Variable) -> bool:
        """Whether a DDP that owns it has been looked for in vain, so that nobody looks again."""
        tensor = _tensor(variable)
        known = self._ddp_of.get(id(tensor))
        return known is not None and known[0]() is tensor and known[1] is None

    def _ddp_owner(self, parameter: Tensor) -> DistributedDataParallel | None:
        known = self._ddp_of.get(id(parameter))
        if known is None or known[0]() is not parameter:
            # A parameter does not tell that DDP owns it, and Keras may wrap the model out of our sight.
            owner = next((ddp for ddp in _ddps if _owns(ddp, parameter)), None)
            known = (weakref.ref(parameter), None if owner is None else weakref.ref(owner))
            self._ddp_of[id(parameter)] = known
        return None if known[1] is None else known[1]()

    def _group(self, groups: Groups | None) -> tuple[Any, int]:
        """This rank's process group for `groups`, and its size. Subgroups are made once, by all ranks together."""
        if groups is None:
            return None, self.num_replicas
        key = tuple(tuple(group) for group in groups)
        if key not in self._subgroups:
            with explaining_failures():
                self._subgroups[key] = [dist.new_group(list(group)) for group in key]
        position = next(i for i, group in enumerate(key) if self.replica_id in group)
        return self._subgroups[key][position], len(key[position])


def _tensor(variable: Variable) -> Tensor:
    return variable.value if isinstance(variable, keras.Variable) else variable


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _signature(tensors: Sequence[Tensor]) -> list[tuple[tuple[int, ...], str]]:
    return [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Positions of tensors that travel together: of one dtype and device, at most `BUCKET_BYTES` unless alone."""
    alike: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        alike.setdefault((tensor.dtype, tensor.device), []).append(i)
    for indices in alike.values():
        bucket: list[int] = []
        size = 0
        for i in indices:
            num_bytes = tensors[i].numel() * tensors[i].element_size()
            if bucket and size + num_bytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(i)
            size += num_bytes
        yield bucket
