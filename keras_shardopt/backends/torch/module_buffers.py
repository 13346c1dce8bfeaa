"""Buffers of PyTorch modules, the state of `torch.nn.BatchNorm1d` and others, as Keras variables.

Private names of Keras touched here (a test checks that each exists):
    `Variable._value`, `_initialize`, `_path` - the tensor of a variable, its creation, and the path.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import keras
import torch

from keras_shardopt.numerics import Tensor


class Buffer(keras.Variable):
    """A buffer of a PyTorch module as a non-trainable variable. It reads and assigns the module's current tensor."""

    def __init__(self, module: torch.nn.Module, name: str, path: str) -> None:
        self._module = weakref.ref(module)
        self._buffer = name
        super().__init__(getattr(module, name), trainable=False, autocast=False, name=name)
        self._path = path

    def _initialize(self, value: Tensor) -> None:
        """Do nothing: the buffer has a value already."""

    @property
    def _value(self) -> Tensor:
        return getattr(self._module(), self._buffer)


_made: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, Buffer]] = weakref.WeakKeyDictionary()


def buffers_of(layer: Any) -> list[Buffer]:
    """Return the buffers of a layer and of the modules it wraps, without the buffers of nested layers."""
    found = []
    for place, tensor in layer.named_buffers(recurse=isinstance(layer, keras.layers.TorchModuleWrapper)):
        where, _, name = place.rpartition(".")
        module = layer.get_submodule(where)
        made = _made.setdefault(module, {})
        if name not in made and not tensor.is_complex():  # complex tensors are constants, such as rotary tables
            made[name] = Buffer(module, name, f"{layer.name}/{place}")
        found += [made[name]] if name in made else []
    return found


def batch_normalizations_in(layers: Sequence[Any]) -> list[str]:
    """Describe the PyTorch modules in these layers that normalize with the rows of one rank only."""
    kinds = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
    wrappers = [layer for layer in layers if isinstance(layer, keras.layers.TorchModuleWrapper)]
    return [
        f"a `torch.nn.{type(module).__name__}` in the layer `{layer.name}`"
        for layer in wrappers
        for module in layer.modules()
        if isinstance(module, kinds)
    ]
