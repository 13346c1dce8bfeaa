"""Detects gradients that PyTorch's `DistributedDataParallel` (DDP) has reduced, and keeps Keras from creating a DDP.

Private names of Keras touched here (a test checks that each exists):
    `Model._initialize_ddp` (Keras 3.16 and later) - wraps the model in a DDP.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import keras
import torch
from torch.nn.parallel import DistributedDataParallel

from keras_shardopt.backends.models import Living, has_built_in_step
from keras_shardopt.backends.torch.held import tensor_of
from keras_shardopt.numerics import Tensor, Variable

_REDUCED_BY_DDP = "_keras_shardopt_reduced"


def _note_forward(ddp: DistributedDataParallel, inputs: Any) -> None:
    if torch.is_grad_enabled():
        ddp.__dict__[_REDUCED_BY_DDP] = ddp.require_backward_grad_sync


_ddps = Living(DistributedDataParallel)


def noting_forward(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap DDP's constructor, so forward passes of each DDP are recorded."""
    noting = _ddps.noting(init)

    def scan() -> None:
        _ddps.scan()
        for ddp in _ddps:
            ddp.register_forward_pre_hook(_note_forward)

    @functools.wraps(init)
    def noting_forward(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        noting(ddp, *args, **kwargs)
        ddp.register_forward_pre_hook(_note_forward)

    vars(noting_forward)["scan"] = scan
    return noting_forward


class DDPs:
    """Finds the DDP of each variable, and remembers it. Variables found without a DDP do not get one from Keras."""

    def __init__(self) -> None:
        # The DDP found for each tensor, or None. The key is the id, because tensors compare element by element.
        self._found: dict[int, tuple[weakref.ref[Any], weakref.ref[Any] | None]] = {}
        if _INITIALIZE_DDP is not None:
            mine = weakref.ref(self)
            keras.Model._initialize_ddp = lambda model: _initialize_ddp(model, mine())

    def owner_of(self, variable: Variable) -> DistributedDataParallel | None:
        """Return the DDP that contains a variable, or None."""
        parameter = tensor_of(variable)
        known = self._known(parameter)
        if known is None:
            # Search all DDPs, because a parameter has no reference to its DDP, and Keras can create a DDP anywhere.
            owner = next((ddp for ddp in _ddps if _owns(ddp, parameter)), None)
            known = (weakref.ref(parameter), None if owner is None else weakref.ref(owner))
            self._found[id(parameter)] = known
        return None if known[1] is None else known[1]()

    def have_reduced(self, variable: Variable) -> bool:
        """Return whether a DDP has reduced this step's gradient of a variable. Call this once per step."""
        ddp = self.owner_of(variable)
        # A DDP reduces gradients only after a forward pass through the DDP itself, so check whether there was one.
        return ddp is not None and bool(vars(ddp).pop(_REDUCED_BY_DDP, False))

    def has_found_none(self, variable: Variable) -> bool:
        """Return whether an earlier search found that no DDP contains this variable."""
        known = self._known(tensor_of(variable))
        return known is not None and known[1] is None

    def _known(self, parameter: Tensor) -> tuple[weakref.ref[Any], weakref.ref[Any] | None] | None:
        known = self._found.get(id(parameter))
        return known if known is not None and known[0]() is parameter else None


def _owns(ddp: DistributedDataParallel, parameter: Tensor) -> bool:
    return any(owned is parameter for owned in ddp.parameters())


_INITIALIZE_DDP = getattr(keras.Model, "_initialize_ddp", None)


def _initialize_ddp(model: Any, ddps: DDPs | None) -> None:
    """Replaces Keras' method of that name. Creates no DDP if this package already reduces the model's gradients."""
    assert _INITIALIZE_DDP is not None
    if ddps is None or not any(map(ddps.has_found_none, model.trainable_variables)):
        _INITIALIZE_DDP(model)


def is_reduced_elsewhere(model: Any, ddps: DDPs) -> bool:
    """Return whether Keras or a DDP averages the gradients of a model that has no `CrossShard`."""
    if isinstance(keras.distribution.distribution(), keras.distribution.ModelParallel):
        return True
    if _INITIALIZE_DDP is not None and has_built_in_step(model):
        return True
    variables = model.trainable_variables
    return bool(variables) and all(ddps.owner_of(variable) is not None for variable in variables)
