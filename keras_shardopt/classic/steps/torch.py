"""Training steps on PyTorch: eager, or compiled with `jit_compile=True`. Each replica is a process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from keras import ops, tree

from keras_shardopt.backends.active import runtime
from keras_shardopt.backends.torch.communicator import TorchProcessGroup
from keras_shardopt.backends.torch.random_numbers import in_step
from keras_shardopt.numerics import Tensor, Variable


def compile_step(
    function: Callable[..., Tensor], variables: Sequence[Variable], jit_compile: bool | None
) -> Callable[..., Tensor]:
    """Compile a training step for this rank; without `jit_compile`, return an eager step."""
    del variables
    function = torch.compile(function) if jit_compile else function
    if isinstance(runtime.communicator(""), TorchProcessGroup):
        function = in_step(function)

    def run(*batch: Any, **constants: Any) -> Tensor:
        return function(*tree.map_structure(ops.convert_to_tensor, batch), **constants)

    return torch.no_grad()(run)
