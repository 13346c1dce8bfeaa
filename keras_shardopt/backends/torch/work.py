"""Counts the work of a computation (FLOPs and bytes) on PyTorch's meta device, on which tensors have no memory.

Private names of PyTorch touched here (tests/unit/sharding/test_costs.py checks that each exists):
    `torch.utils._python_dispatch.TorchDispatchMode` - intercepts every operation of a thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_FLOPS_PER_BYTE = 10.0
"""The number of float32 operations that take as long as moving one byte: 5 to 10 on CPUs, and 15 to 20 on GPUs."""


def without_memory() -> contextlib.AbstractContextManager[Any]:
    """Create tensors and variables without memory. Reading their values raises an error."""
    return keras.device("meta")


def count(function: Callable[[], Any]) -> tuple[float, int]:
    """Return the FLOPs and the number of operations of a call. A moved byte counts as `_FLOPS_PER_BYTE` FLOPs."""
    with _Counter() as counter:
        function()
    return counter.work, counter.operations


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.work = 0.0
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        kind = func.overloadpacket
        if func.is_view or "empty" in func.name():
            return out
        tensors = [x for x in keras.tree.flatten((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        self.operations += 1
        self.work += _FLOPS_PER_BYTE * sum(tensor.nbytes for tensor in tensors)
        if kind in flop_registry:
            self.work += flop_registry[kind](*args, **kwargs, out_val=out)
        return out
