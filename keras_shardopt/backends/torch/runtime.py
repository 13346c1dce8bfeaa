"""Tracing and control flow on PyTorch, mostly the defaults."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from keras_shardopt.backends.communicator import Communicator, SingleReplica
from keras_shardopt.backends.runtime import Runtime
from keras_shardopt.backends.torch.communicator import TorchProcessGroup
from keras_shardopt.backends.torch.held import tensor_of
from keras_shardopt.backends.torch.process_group import job_of_environment
from keras_shardopt.numerics import Tensor, Variable


class TorchRuntime(Runtime):
    """Traces and differentiates on PyTorch. Each replica is a process (rank) with its own data."""

    _ranks: TorchProcessGroup | None = None

    def communicator(self, axis_name: str) -> Communicator:
        if self._ranks is not None and self._ranks.are_current():  # reused, because each step calls this several times
            return self._ranks
        if not dist.is_initialized():
            size, _ = job_of_environment() if "WORLD_SIZE" in os.environ else (1, 0)  # checked first for speed
            if size > 1:
                raise ValueError(
                    "Several processes were started, but no process group is open, so each process would train a "
                    f"separate model. Received: WORLD_SIZE={size}. Build, compile (with a `CrossShard`) and train the "
                    "model inside `with keras_shardopt.data_parallel():`."
                )
            return SingleReplica()
        if dist.get_world_size() == 1:
            return SingleReplica()
        self._ranks = TorchProcessGroup()
        return self._ranks

    def value_and_grad(
        self,
        loss: Callable[[], tuple[Tensor, Any]],
        variables: Sequence[Variable],
        axis_name: str | None,
        before_assign: Callable[[Variable], None] | None = None,
    ) -> tuple[list[Tensor | None], Any]:
        parameters = [tensor_of(v) for v in variables]
        before = [p.grad for p in parameters]
        untrained = [p for p in parameters if axis_name is None and not p.requires_grad]
        try:
            for parameter in parameters:
                parameter.grad = None
            for parameter in untrained:
                parameter.requires_grad_()
            with torch.enable_grad():
                value, more = loss()
            # Avoid `torch.autograd.grad`: a DDP that contains the parameters reduces gradients only in `backward`.
            if value.requires_grad:
                value.backward(inputs=parameters)
            return [p.grad for p in parameters], more if more is None else more.detach()
        finally:
            for parameter in untrained:
                parameter.requires_grad_(False)
            for parameter, grad in zip(parameters, before):
                parameter.grad = grad

    @torch.compiler.disable
    def no_compile(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def is_concrete(self, value: Any) -> bool:
        return not torch.compiler.is_compiling()

    def is_cheap_to_read(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and not torch.compiler.is_compiling()

    def version(self, variable: Variable) -> int | None:
        return int(tensor_of(variable)._version)

    @torch.no_grad()
    def add_n(self, variables: Sequence[Variable], values: Sequence[Tensor | None], starts: bool) -> None:
        pairs = [(tensor_of(v), value) for v, value in zip(variables, values)]
        given = [(tensor, value) for tensor, value in pairs if value is not None]
        if starts:
            for tensor, value in pairs:
                if value is None:
                    tensor.zero_()
        if given:
            (torch._foreach_copy_ if starts else torch._foreach_add_)(*map(list, zip(*given)))


runtime = TorchRuntime()
