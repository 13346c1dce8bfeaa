"""Replicas on PyTorch: the ranks of `torch.distributed`.

Private names of Keras touched here (a test checks that each exists):
    `keras.src.backend.common.global_state` - holds "global_seed_generator", for layers without a seed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import torch
import torch.distributed as dist
from keras.src.backend.common import global_state
from torch.nn.parallel import DistributedDataParallel

from keras_shardopt.backends.communicator import Communicator, GradientState, in_buckets
from keras_shardopt.backends.models import buffers_of, has_built_in_step, ids_of_states, living_models
from keras_shardopt.backends.torch.ddp import _INITIALIZE_DDP, _REDUCED_BY_DDP, _ddps, _initialize_ddp, _owns
from keras_shardopt.backends.torch.process_group import (
    EXCHANGE,
    failure,
    gather_objects,
    naming_missing_ranks,
    report_failure,
    wait_for,
)
from keras_shardopt.backends.torch.random_numbers import seed_per_rank
from keras_shardopt.backends.traffic import Kind, note
from keras_shardopt.numerics import Gradients, Groups, ReduceOp, Tensor, Variable

BUCKET_BYTES = 25 * 2**20
"""The default size limit of a bucket of gradients that are sent together, as in PyTorch's DDP."""


# PyTorch 2.13 renamed these functions, and the old names warn.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TorchProcessGroup(Communicator):
    """The ranks of the default process group, or of a group that `split` made."""

    is_spmd = False
    is_multi_process = True

    def __init__(self) -> None:
        self.num_replicas = dist.get_world_size()
        self.replica_id = dist.get_rank()
        # Keep a weak reference, because a group that outlives `destroy_process_group` crashes the interpreter at exit.
        self._default_group = weakref.ref(dist.group.WORLD)
        self._process_group: Any = None
        self._groups_by_ranks: dict[tuple[tuple[int, ...], ...], TorchProcessGroup] = {}
        # The DDP found for each variable, or None. The key is the id, because tensors compare element by element.
        self._ddp_of: dict[int, tuple[weakref.ref[Any], weakref.ref[Any] | None]] = {}
        self._num_failures = 0
        self._failures_taken: set[str] = set()
        if _INITIALIZE_DDP is not None:
            mine = weakref.ref(self)
            keras.Model._initialize_ddp = lambda model: _initialize_ddp(model, mine())

    @torch.compiler.disable
    def split(self, groups: Groups) -> Communicator:
        """Return the communicator of this rank's group. All ranks must make the first call together."""
        key = tuple(tuple(sorted(ranks)) for ranks in groups)
        if len(key) == 1:
            return self
        if key not in self._groups_by_ranks:
            with naming_missing_ranks():
                made = [dist.new_group(list(ranks)) for ranks in key]
            number = next(i for i, ranks in enumerate(key) if self.replica_id in ranks)
            part: Any = super().split(groups)
            part.replica_id, part._process_group = key[number].index(self.replica_id), made[number]
            self._groups_by_ranks[key] = part
        return self._groups_by_ranks[key]

    @torch.compiler.disable
    def report_failure(self, words: str, first_member: int) -> None:
        # Use the job's key-value store, because ranks of other groups now run other code and join no collective. All
        # ranks of this group write the same id, because they have counted the same failures.
        self._num_failures += 1
        self._failures_taken.add(f"{first_member}/{self._num_failures}")
        report_failure(f"{first_member}/{self._num_failures}", words)

    @torch.compiler.disable
    def has_new_failure(self) -> bool:
        found = failure()
        return found is not None and found[0] not in self._failures_taken

    @torch.compiler.disable
    def read_failure(self) -> str:
        number, words = failure() or ("", "")
        self._failures_taken.add(number)
        return words

    def are_current(self) -> bool:
        """Return whether this object's process group is still the default process group."""
        group = self._default_group()
        return group is not None and group is dist.group.WORLD

    def forget_groups(self) -> None:
        """Release the groups that `split` made, because they are destroyed with the default group."""
        self._groups_by_ranks.clear()

    @property
    def _joint_call(self) -> str:
        return EXCHANGE if self._process_group is None else ""

    @torch.compiler.disable
    def gradient_state(self, grads: Gradients, variables: Sequence[Variable]) -> GradientState:
        ddp = self._ddp_owner(_tensor(variables[0]))
        if ddp is None:
            return GradientState.LOCAL
        # A DDP reduces gradients only after a forward pass through the DDP itself, so check whether there was one.
        reduced = ddp.__dict__.pop(_REDUCED_BY_DDP, False)
        return GradientState.GLOBAL if reduced else GradientState.LOCAL

    @torch.compiler.disable
    @torch.no_grad()
    def all_reduce(self, tensors: Sequence[Tensor], op: ReduceOp) -> list[Tensor]:
        reduce = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
        result: list[Tensor] = [None] * len(tensors)
        flats = []
        under_way: list[Any] = []
        for indices in buckets_by_dtype(tensors, range(len(tensors)), BUCKET_BYTES):
            flat = torch.cat([_dense(tensors[i]).reshape(-1) for i in indices])
            note("all_reduce", [flat], self.num_replicas)
            with naming_missing_ranks(under_way):
                under_way.append(dist.all_reduce(flat, reduce, group=self._process_group, async_op=True))
            flats.append((indices, flat))
        for number, (indices, flat) in enumerate(flats):
            with naming_missing_ranks(under_way):
                wait_for(under_way[number], call=self._joint_call)
            if op == "mean":
                flat.div_(self.num_replicas)
            for i, part in zip(indices, flat.split([tensors[i].numel() for i in indices])):
                result[i] = part.view(tensors[i].shape)
        return result

    @torch.compiler.disable
    @torch.no_grad()
    def reduce_scatter(self, tensors: Sequence[Tensor], op: ReduceOp) -> list[Tensor]:
        result = []
        for tensor in tensors:
            part = self._scattered(tensor.contiguous())
            result.append(part.div_(self.num_replicas) if op == "mean" else part)
        return result

    def _scattered(self, tensor: Tensor) -> Tensor:
        group, size = self._process_group, self.num_replicas
        if dist.get_backend(group) == "gloo":
            # Use an all-to-all: gloo runs a reduce-scatter as an all-reduce, with twice the bytes (PyTorch 2.13).
            gathered = torch.empty_like(tensor)
            note("all_to_all", [tensor], size)
            with naming_missing_ranks():
                wait_for(dist.all_to_all_single(gathered, tensor, group=group, async_op=True), call=self._joint_call)
            return gathered.view(size, -1).sum(0)
        part = tensor.new_empty(tensor.numel() // size)
        note("reduce_scatter", [tensor], size)
        with naming_missing_ranks():
            _reduce_scatter(part, tensor, dist.ReduceOp.SUM, group=group)
        return part

    @torch.compiler.disable
    @torch.no_grad()
    def all_to_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return self._run("all_to_all", tensors)

    @torch.compiler.disable
    @torch.no_grad()
    def all_gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return self._run("all_gather", tensors)

    def _run(self, kind: Kind, tensors: Sequence[Tensor]) -> list[Tensor]:
        note(kind, tensors, self.num_replicas)
        under_way: list[Any] = []
        with naming_missing_ranks(under_way):
            work, result = self.begin(kind, tensors)
            under_way.append(work)
            del work  # or this frame would keep its connections open after a failure
            wait_for(under_way[0], call=self._joint_call)
        return result()

    @torch.no_grad()
    def begin(self, kind: Kind, tensors: Sequence[Tensor]) -> tuple[Any, Callable[[], list[Tensor]]]:
        """Begin an all-to-all, all-gather or all-reduce sum.

        Return the pending collective for `wait_for`, and a function that returns the result after the wait.
        """
        group, size = self._process_group, self.num_replicas
        if kind == "all_reduce":
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            work = dist.all_reduce(flat, dist.ReduceOp.SUM, group=group, async_op=True)
            parts = flat.split([tensor.numel() for tensor in tensors])
            return work, (lambda: [part.view(t.shape) for part, t in zip(parts, tensors)])
        # Send the bytes of all tensors together. In an all-to-all, the bytes for rank 0 come first.
        rows = [_bytes(tensor).view(size if kind == "all_to_all" else 1, -1) for tensor in tensors]
        sent = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
        received = sent.new_empty(size, sent.shape[1])
        run = dist.all_to_all_single if kind == "all_to_all" else _all_gather
        work = run(received.view(-1), sent.view(-1), group=group, async_op=True)
        return work, (lambda: _joined(received, rows, tensors))

    @torch.compiler.disable
    @torch.no_grad()
    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> list[Tensor]:
        result: list[Tensor] = [None] * len(tensors)
        for indices in buckets_by_dtype(tensors, range(len(tensors)), BUCKET_BYTES):
            # Send bytes, because they work for all dtypes and preserve all bits.
            flat = torch.cat([_bytes(tensors[i]) for i in indices])
            with naming_missing_ranks():
                wait_for(dist.broadcast(flat, self.members[root], group=self._process_group, async_op=True))
            sizes = [tensors[i].numel() * tensors[i].element_size() for i in indices]
            for i, part in zip(indices, flat.split(sizes)):
                result[i] = part.clone().view(tensors[i].dtype).view(tensors[i].shape)
        return result

    def broadcast_object(self, thing: Any, root: int) -> Any:
        """Return rank `root`'s picklable object on every rank."""
        things = [thing]
        with naming_missing_ranks():
            dist.broadcast_object_list(things, root)
        return things[0]

    @torch.compiler.disable
    def broadcast_from_rank_0(self, variables: Sequence[Variable], optimizer_variables: Sequence[Variable]) -> float:
        """Copy weights and state from the group's first rank. Return the factor for this rank's first gradients."""
        weights = [_tensor(v) for v in variables]
        state = [_tensor(v) for v in optimizer_variables]
        others = self.model_and_seed_state(weights)
        mine = (_signature(weights), _signature(state), _signature(others))
        theirs = gather_objects(mine, "takes the weights of rank 0")
        for what, position in (("trainable variables", 0), ("optimizer variables", 1)):
            for rank, signature in enumerate(theirs):
                if signature[position] != theirs[0][position]:
                    raise ValueError(
                        f"All replicas must have the same {what}. Received on rank 0: {theirs[0][position]}, "
                        f"on rank {rank}: {signature[position]}. Build the same model and optimizer on every rank."
                    )
        equal = self._take_from_root(weights)
        self._take_from_root(state)
        # Copy non-trainable state only if shapes and dtypes are equal, because ranks can have found different models.
        if all(signature[2] == theirs[0][2] for signature in theirs):
            self._take_from_root(others)
        seed_per_rank(self.world, [])  # repeated, because the program can have seeded PyTorch after the first call
        num_equal = torch.tensor(float(equal), device=weights[0].device)
        with naming_missing_ranks():
            dist.all_reduce(num_equal, group=self._process_group)
        return self.num_replicas / float(num_equal) if equal else 0.0

    def _take_from_root(self, tensors: Sequence[Tensor]) -> bool:
        """Assign the first rank's values to `tensors`. Return whether all values were bitwise equal before."""
        equal = True
        with torch.no_grad():
            for mine, roots in zip(tensors, self.broadcast(tensors)):
                if not torch.equal(_bytes(mine), _bytes(roots)):
                    equal = False
                    mine.copy_(roots)
        return equal

    def model_and_seed_state(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Return the non-trainable state of the model with these weights, and Keras' global seed."""
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
            own = ids_of_states(outermost)
            others = [*[v for v in outermost.variables if id(v) not in own], *buffers_of(outermost)]
            state += [_tensor(v) for v in others if id(_tensor(v)) not in trained]
        return state

    def is_reduced_by_ddp(self, variable: Variable) -> bool:
        return self._ddp_owner(_tensor(variable)) is not None

    def is_reduced_elsewhere(self, model: Any) -> bool:
        """Return whether Keras or a DDP averages the gradients of a model that has no `CrossShard`."""
        if isinstance(keras.distribution.distribution(), keras.distribution.ModelParallel):
            return True
        if _INITIALIZE_DDP is not None and has_built_in_step(model):
            return True
        return bool(model.trainable_variables) and all(map(self.is_reduced_by_ddp, model.trainable_variables))

    def has_found_no_ddp(self, variable: Variable) -> bool:
        """Return whether an earlier search found that no DDP contains this variable."""
        tensor = _tensor(variable)
        known = self._ddp_of.get(id(tensor))
        return known is not None and known[0]() is tensor and known[1] is None

    def _ddp_owner(self, parameter: Tensor) -> DistributedDataParallel | None:
        known = self._ddp_of.get(id(parameter))
        if known is None or known[0]() is not parameter:
            # Search all DDPs, because a parameter has no reference to its DDP, and Keras can create a DDP anywhere.
            owner = next((ddp for ddp in _ddps if _owns(ddp, parameter)), None)
            known = (weakref.ref(parameter), None if owner is None else weakref.ref(owner))
            self._ddp_of[id(parameter)] = known
        return None if known[1] is None else known[1]()


def _tensor(variable: Variable) -> Tensor:
    return variable.value if isinstance(variable, keras.Variable) else variable


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def _bytes(tensor: Tensor) -> Tensor:
    # Add a dimension, because an empty tensor from NumPy has a stride of 0, which PyTorch cannot view as bytes.
    return tensor.detach().contiguous().unsqueeze(-1).view(torch.uint8).reshape(-1)


def _joined(received: Tensor, rows: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Concatenate each tensor's slices from all ranks. `received` has a row per rank: the bytes of its slices."""
    parts = received.split([row.shape[1] for row in rows], 1)
    return [part.reshape(-1).view(tensor.dtype) for part, tensor in zip(parts, tensors)]


def _signature(tensors: Sequence[Tensor]) -> list[tuple[tuple[int, ...], str]]:
    return [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]


def buckets_by_dtype(tensors: Sequence[Tensor], order: Iterable[int], bucket_bytes: float) -> Iterator[list[int]]:
    """Group the positions of tensors, given in `order`, by dtype and device, at most `bucket_bytes` bytes per group."""
    alike: dict[Any, list[int]] = {}
    for i in order:
        alike.setdefault((tensors[i].dtype, tensors[i].device), []).append(i)
    num_bytes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    for positions in alike.values():
        yield from in_buckets(num_bytes, positions, bucket_bytes)
