"""Replicas of PyTorch programs: the processes of `torch.distributed`, one replica each.

Private names of Keras touched here (a test holds each of them):
    `keras.src.utils.rng_utils.get_random_seed` - the seed given to `keras.utils.set_random_seed`, or None.
    `keras.src.backend.common.global_state` - holds "global_seed_generator", the seed of layers without their own.
    `Model._initialize_ddp` (Keras 3.16 and later) - hands the model's gradients to PyTorch's DDP.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import torch
import torch.distributed as dist
from keras.src.backend.common import global_state
from keras.src.utils import rng_utils
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from keras_shardopt._typing import Gradients, Groups, ReduceOp, Tensor, Variable
from keras_shardopt.backends.communicator import Arrival, ReplicaBackend, SingleReplica
from keras_shardopt.backends.processes import World
from keras_shardopt.backends.runtime import Framework
from keras_shardopt.backends.torch.fused import fused, may_fuse
from keras_shardopt.backends.torch.overlap import Buckets, can_bucket
from keras_shardopt.backends.torch.process_group import (
    close_group,
    failure,
    gather_objects,
    meet,
    open_group,
    say_failure,
    taking_part,
    tell,
)
from keras_shardopt.backends.torch.random_numbers import draw_apart, in_step, note_seed
from keras_shardopt.models import Living, living_models, models_with

BUCKET_BYTES = 25 * 2**20
"""Tensors travel in flat buckets of about this size, as in PyTorch's own DDP."""


# The names since PyTorch 2.13, which warns about the older ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Ranks(ReplicaBackend):
    """The ranks of the default process group."""

    runs_one_program = False
    spans_processes = True

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

    def is_at_hand(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and not torch.compiler.is_compiling()

    @torch.compiler.disable
    def arrival(self, grads: Gradients, variables: Sequence[Variable]) -> Arrival:
        ddp = self._ddp_owner(_tensor(variables[0]))
        if ddp is None:
            return Arrival.LOCAL
        # DDP reduces what went forward through it, and nothing else.
        reduced = ddp.__dict__.pop(_REDUCED_BY_DDP, False)
        return Arrival.GLOBAL if reduced else Arrival.LOCAL

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
            with taking_part(under_way):
                under_way.append(dist.all_reduce(flat, reduce, group=group, async_op=True))
            flats.append((indices, flat))
        for number, (indices, flat) in enumerate(flats):
            with taking_part(under_way):
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
            with taking_part():
                dist.all_to_all_single(everyones, tensor, group=group)
            return everyones.view(size, -1).sum(0)
        part = tensor.new_empty(tensor.numel() // size)
        with taking_part():
            _reduce_scatter(part, tensor, dist.ReduceOp.SUM, group=group)
        return part

    @torch.compiler.disable
    @torch.no_grad()
    def all_gather(self, tensors: Sequence[Tensor], groups: Groups | None = None) -> list[Tensor]:
        group, size = self._group(groups)
        result = []
        for tensor in tensors:
            whole = tensor.new_empty(tensor.numel() * size)
            with taking_part():
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
            with taking_part():
                dist.broadcast(flat, source, group=group)
            sizes = [tensors[i].numel() * tensors[i].element_size() for i in indices]
            for i, part in zip(indices, flat.split(sizes)):
                result[i] = part.clone().view(tensors[i].dtype).view(tensors[i].shape)
        return result

    def broadcast_object(self, thing: Any, root: int) -> Any:
        """Every rank gets rank `root`'s `thing`, whatever it is."""
        things = [thing]
        with taking_part():
            dist.broadcast_object_list(things, root)
        return things[0]

    @torch.compiler.disable
    def start_together(
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
        with taking_part():
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
            with taking_part():
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


_REDUCED_BY_DDP = "_keras_shardopt_reduced"


def _note_forward(ddp: DistributedDataParallel, inputs: Any) -> None:
    if torch.is_grad_enabled():
        ddp.__dict__[_REDUCED_BY_DDP] = ddp.require_backward_grad_sync


def _noticing(init: Callable[..., None]) -> Callable[..., None]:
    """The constructor of DDPs of which it is noted from the first one on what goes forward through them."""

    @functools.wraps(init)
    def noticing(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        init(ddp, *args, **kwargs)
        ddp.register_forward_pre_hook(_note_forward)

    return noticing


_ddps = Living(DistributedDataParallel, "__init__")
DistributedDataParallel.__init__ = _noticing(DistributedDataParallel.__init__)


def _owns(ddp: DistributedDataParallel, parameter: Tensor) -> bool:
    return any(owned is parameter for owned in ddp.parameters())


_INITIALIZE_DDP = getattr(keras.Model, "_initialize_ddp", None)


def _initialize_ddp(model: Any, ranks: Ranks | None) -> None:
    """Stands in for Keras' method, and makes no DDP of weights whose gradients are reduced here already."""
    assert _INITIALIZE_DDP is not None
    if ranks is None or not any(ranks.has_found_no_ddp(variable) for variable in model.trainable_variables):
        _INITIALIZE_DDP(model)


class Torch(Framework):
    """`torch.distributed`: one process per replica, each with its own data."""

    outlives_its_block = True
    processes_start_apart = True
    divides_state = True

    def __init__(self) -> None:
        super().__init__()
        self._ranks: Ranks | None = None
        # The numbers in counters, and the versions of the tensors that hold them.
        self._counts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def replicas(self, axis_name: str) -> ReplicaBackend:
        if not (dist.is_available() and dist.is_initialized()):
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise ValueError(
                    "Several processes were started, but no process group is open, so each would train a model of its "
                    f"own. Received: WORLD_SIZE={os.environ['WORLD_SIZE']}. Build and compile the model inside "
                    "`with keras_shardopt.data_parallel():`, and do not close that before training ends."
                )
            return SingleReplica()
        if dist.get_world_size() == 1:
            return SingleReplica()
        if self._ranks is None or not self._ranks.are_current():
            self._ranks = Ranks()
        return self._ranks

    def update_fused(self, optimizers: Sequence[Any], update: Callable[..., None], *args: Any) -> None:
        if may_fuse(optimizers):
            fused(optimizers, update, *args)
        else:
            update(*args)

    @torch.compiler.disable
    def buckets(
        self,
        replicas: ReplicaBackend,
        variables: Sequence[Variable],
        takes_mean: bool,
        bucket_bytes: float,
        compression: str | None,
        check: Callable[[bool, float, float, int], None],
    ) -> Any:
        if not isinstance(replicas, Ranks) or not can_bucket(variables):
            return None
        if replicas.is_reduced_by_ddp(variables[0]):
            return None
        return Buckets(replicas, variables, takes_mean, bucket_bytes, compression, check)

    def versions(self) -> dict[str, str]:
        # Without the suffix: builds for other devices are the same version.
        return {"PyTorch": str(torch.__version__).partition("+")[0]}

    def process(self) -> tuple[int, int]:
        if dist.is_available() and dist.is_initialized():
            return dist.get_world_size(), dist.get_rank()
        return int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))

    def gradients_and_more(
        self, loss: Callable[[], tuple[Tensor, Any]], variables: Sequence[Variable], axis_name: str
    ) -> tuple[list[Tensor | None], Any]:
        parameters = [_tensor(v) for v in variables]
        before = [p.grad for p in parameters]
        try:
            for parameter in parameters:
                parameter.grad = None
            with torch.enable_grad():
                value, more = loss()
            # Not `torch.autograd.grad`: a DDP that owns the parameters reduces in `backward` only.
            if value.requires_grad:
                value.backward(inputs=parameters)
            return [p.grad for p in parameters], more if more is None else more.detach()
        finally:
            for parameter, grad in zip(parameters, before):
                parameter.grad = grad

    def num_replicas_of_steps(self) -> int:
        return int(self.replicas("").num_replicas)

    def compiled(
        self, function: Callable[..., Tensor], variables: Sequence[Variable], jit_compile: bool | None
    ) -> Callable[..., Tensor]:
        function = torch.compile(function) if jit_compile else function
        if isinstance(self.replicas(""), Ranks):
            function = in_step(function)
        return torch.no_grad()(super().compiled(function, variables, jit_compile))

    @torch.compiler.disable
    def uncompiled(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def is_compiling(self) -> bool:
        return bool(torch.compiler.is_compiling())

    @torch.no_grad()
    def copied(self, tensors: Sequence[Tensor], into: Sequence[Tensor] | None = None) -> Sequence[Tensor]:
        if into is None:
            return [tensor.clone() for tensor in tensors]
        if into:
            torch._foreach_copy_(into, tensors)
        return into

    def stamp(self, counter: Variable) -> Any:
        return _tensor(counter)._version  # to read a number from a GPU is to wait for it

    def has_moved(self, before: Any, after: Any) -> Any:
        return before != after

    @torch.compiler.disable
    def count_up(self, counter: Variable, period: int, starts_over: bool | None = None) -> tuple[bool, bool]:
        # Counted here as well: to read a number from a GPU is to wait for it. PyTorch counts what others assign.
        tensor = counter.value
        known = self._counts.get(tensor)
        before = known[0] if known is not None and known[1] == tensor._version else int(tensor)
        is_over = before + 1 == period if starts_over is None else starts_over
        after = 0 if is_over else before + 1
        with torch.no_grad():
            tensor.fill_(after)
        self._counts[tensor] = (after, tensor._version)
        return before == 0, is_over

    @torch.no_grad()
    def add_to(self, variables: Sequence[Variable], values: Sequence[Tensor | None], starts: bool) -> None:
        pairs = [(_tensor(v), value) for v, value in zip(variables, values)]
        given = [(tensor, value) for tensor, value in pairs if value is not None]
        if starts:
            for tensor, value in pairs:
                if value is None:
                    tensor.zero_()
        if given:
            (torch._foreach_copy_ if starts else torch._foreach_add_)(*map(list, zip(*given)))

    @torch.no_grad()
    def follow_slice(self, stand_in: Variable, variable: Variable, start: int, stop: int) -> None:
        whole, part = _tensor(variable), _tensor(stand_in)
        if whole.is_contiguous():
            # The same memory: an update of the slice is one of the weights. Each time anew, as a module may have
            # got other memory in between.
            part.data = whole.data.view(-1)[start:stop]
        else:
            part.copy_(whole.reshape(-1)[start:stop])

    @torch.no_grad()
    def assign_slices(self, variable: Variable, slices: Sequence[Tensor]) -> None:
        whole = _tensor(variable)
        if not whole.is_contiguous():
            whole.copy_(torch.cat(list(slices)).view(whole.shape))
            return
        start = 0
        for values in slices:
            whole.data.view(-1)[start : start + values.numel()].copy_(values)
            start += values.numel()

    def meet(self, purpose: str, seconds: float, advice: str) -> None:
        if not isinstance(self.replicas(""), SingleReplica):
            meet(purpose, seconds, advice)

    def gradient_of(self, function: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = value.detach().clone().requires_grad_()
            (gradient,) = torch.autograd.grad(function(leaf), leaf)
        return gradient

    @contextlib.contextmanager
    def world(self, num_replicas: int | None, timeout: datetime.timedelta | None = None) -> Iterator[World]:
        running = dist.is_available() and dist.is_initialized()
        # As of now: fewer ranks may meet the second time.
        size, rank = self.process()
        if num_replicas not in (None, size):
            raise ValueError(
                "`num_replicas` must be the number of processes, because on PyTorch each replica is one. "
                f"Received: num_replicas={num_replicas}, with {size} process(es). "
                f"Start the program with: torchrun --nproc-per-node {num_replicas} {sys.argv[0] or 'train.py'}"
            )
        if size == 1:
            yield World()
            return
        if running and timeout is not None:
            raise ValueError(
                "`timeout` is that of the process group, and must be given where it is opened. "
                f"Received: timeout={timeout.total_seconds():g} s, and a group that is open already. "
                "Use `torch.distributed.init_process_group(..., timeout=...)`, or let `data_parallel` open the group."
            )
        device = None
        if torch.cuda.is_available():
            device = torch.cuda.current_device()
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if not running:
            open_group("gloo" if device is None else "nccl", rank, size, timeout)
        try:
            _agree_on_seed()
            yield World(size, replica_id=rank, is_chief=rank == 0, num_processes=size, process_id=rank)
        finally:
            if not running:
                if self._ranks is not None:
                    self._ranks.forget_groups()
                close_group()
            if device is not None:
                torch.cuda.set_device(device)

    def prepare(self, model: Any, reducers_of: Callable[[Any], list[Any]]) -> None:
        from keras_shardopt.fit import torch as torch_fit  # it builds on this module

        torch_fit.prepare(model, self, reducers_of)

    def largest_difference(self, variables: Sequence[Variable]) -> float:
        if isinstance(self.replicas(""), SingleReplica) or not variables:
            return 0.0
        tell("compares weights")
        flat = torch.cat([_tensor(v).detach().reshape(-1).to(torch.float64) for v in variables])
        largest, smallest = flat.clone(), flat
        with taking_part():
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            dist.all_reduce(smallest, dist.ReduceOp.MIN)
        return float((largest - smallest).max())

    def fingerprints(self, variables: Sequence[Variable]) -> np.ndarray:
        mine = _fingerprints([_tensor(v).detach() for v in variables])
        is_open = dist.is_available() and dist.is_initialized()
        everyones = gather_objects(mine, "compares all variables") if is_open else [mine]
        counts = [len(row) for row in everyones]
        if len(set(counts)) > 1:
            raise ValueError(
                f"All replicas must have the same variables. Received: by rank, {counts} of them. "
                "Build the same model and optimizer on every rank."
            )
        return np.stack(everyones)

    def start_equal(self, variables: Sequence[Variable], optimizer_variables: Sequence[Variable]) -> None:
        replicas = self.replicas("")
        if isinstance(replicas, Ranks):
            tell("takes the weights of rank 0 in a callback (`SyncReplicas`, `BackupAndRestore`)")
        replicas.start_together(variables, optimizer_variables)

    def random_state(self) -> Any:
        devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return [state.tolist() for state in [torch.get_rng_state(), *devices]]

    def set_random_state(self, state: Any) -> None:
        on_cpu, *on_devices = [torch.tensor(each, dtype=torch.uint8) for each in state]
        torch.set_rng_state(on_cpu)
        if on_devices and len(on_devices) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(on_devices)
        note_seed()

    def draw_apart(self, variables: Sequence[Variable]) -> None:
        if dist.is_available() and dist.is_initialized():
            replicas = self.replicas("")
            if isinstance(replicas, Ranks):
                draw_apart(replicas, models_with(variables))

    def gather_objects(self, value: Any) -> list[Any]:
        if not (dist.is_available() and dist.is_initialized()):
            return [value]
        caller = sys._getframe(1).f_code.co_name
        return gather_objects(value, _CALLS.get(caller, "exchanges values"))


_CALLS = {  # of functions that ask for objects
    "check_agreement": "compares what it trains before its first update",
    "_check_all_were_given_alike": "calls `shard_data`",
}


_CHUNK = 2**16
"""How many words of a fingerprint are computed at a time, so that what is in between stays in the CPU's cache."""


def _fingerprints(tensors: Sequence[Tensor]) -> np.ndarray:
    # The sum of all 32-bit words w_i times factors c_i, modulo 2**64. The factors are odd, so a change of w_i by
    # 2**k is never lost. They are 64 bits long although the words are not: two words that change places add
    # (c_i - c_j) * (w_j - w_i), which would be 0 for any two floats of opposite sign if 32 bits were all.
    with torch.no_grad():
        sums = [_fingerprint(tensor) for tensor in tensors]
        # Together, because each number that is read would wait for the device.
        devices = {total.device for total in sums}
        by_device = {device: torch.stack([s for s in sums if s.device == device]).cpu() for device in devices}
    rows = {device: iter(values.tolist()) for device, values in by_device.items()}
    return np.array([next(rows[total.device]) for total in sums], "int64").view("uint64")


def _fingerprint(tensor: Tensor) -> Tensor:
    words = _words(tensor)
    chunk = _CHUNK if words.device.type == "cpu" else 2**22
    factors = _odd_factors(chunk, words.device)
    sums = [part.to(torch.int64).mul_(factors[: part.numel()]).sum() for part in words.split(chunk)]
    if len(sums) == 1:
        return sums[0]
    # Each chunk by an odd factor of its own: the product of two odd factors is one.
    over_chunks = _odd_factors(1 << len(sums).bit_length(), words.device, seed=2)
    return torch.stack(sums).mul_(over_chunks[: len(sums)]).sum()


def _words(tensor: Tensor) -> Tensor:
    """The bits of a tensor in signed integers of at most 32 bits."""
    flat = tensor.contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    size = flat.element_size()
    return flat.view({1: torch.int8, 2: torch.int16}.get(size, torch.int32))


@functools.lru_cache(maxsize=32)
def _odd_factors(num_factors: int, device: Any, seed: int = 1) -> Tensor:
    factors = np.random.default_rng(seed).integers(0, 2**64, num_factors, dtype="uint64") | np.uint64(1)
    return torch.from_numpy(factors.view("int64")).to(device)


def _agree_on_seed() -> None:
    """Lets models built from here on start equal: all ranks take rank 0's Keras seed unless they agree already."""
    seeds = gather_objects(rng_utils.get_random_seed(), "enters `data_parallel()`")
    if seeds[0] is None or any(seed != seeds[0] for seed in seeds):
        chosen = [random.randint(1, 10**9) if seeds[0] is None else seeds[0]]
        with taking_part():
            dist.broadcast_object_list(chosen)
        keras.utils.set_random_seed(chosen[0])
