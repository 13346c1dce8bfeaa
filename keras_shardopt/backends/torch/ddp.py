"""PyTorch's DDP: which gradients it has reduced, and where Keras would make one.

Private names of Keras touched here (a test holds each of them):
    `Model._initialize_ddp` (Keras 3.16 and later) - hands the model's gradients to PyTorch's DDP.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import torch
from torch.nn.parallel import DistributedDataParallel

from keras_shardopt.backends.models import Living
from keras_shardopt.numerics import Tensor

_REDUCED_BY_DDP = "_keras_shardopt_reduced"


def _note_forward(ddp: DistributedDataParallel, inputs: Any) -> None:
    if torch.is_grad_enabled():
        ddp.__dict__[_REDUCED_BY_DDP] = ddp.require_backward_grad_sync


_ddps = Living(DistributedDataParallel)


def noticing(init: Callable[..., None]) -> Callable[..., None]:
    """Return the constructor of DDPs whose forward passes are noted. Those of existing DDPs are noted from now on."""
    noting = _ddps.noting(init)

    def scan() -> None:
        _ddps.scan()
        for ddp in _ddps:
            ddp.register_forward_pre_hook(_note_forward)

    @functools.wraps(init)
    def noticing(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        noting(ddp, *args, **kwargs)
        ddp.register_forward_pre_hook(_note_forward)

    vars(noticing)["scan"] = scan
    return noticing


def _owns(ddp: DistributedDataParallel, parameter: Tensor) -> bool:
    return any(owned is parameter for owned in ddp.parameters())


_INITIALIZE_DDP = getattr(keras.Model, "_initialize_ddp", None)


def _initialize_ddp(model: Any, ranks: Any) -> None:
    """Stands in for Keras' method, and makes no DDP of weights whose gradients are reduced here already."""
    assert _INITIALIZE_DDP is not None
    if ranks is None or not any(ranks.has_found_no_ddp(variable) for variable in model.trainable_variables):
        _INITIALIZE_DDP(model)
