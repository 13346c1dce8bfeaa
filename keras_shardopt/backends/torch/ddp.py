"""Detects gradients that PyTorch's `DistributedDataParallel` (DDP) has reduced, and keeps Keras from creating a DDP.

Private names of Keras touched here (a test checks that each exists):
    `Model._initialize_ddp` (Keras 3.16 and later) - wraps the model in a DDP.
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


def _owns(ddp: DistributedDataParallel, parameter: Tensor) -> bool:
    return any(owned is parameter for owned in ddp.parameters())


_INITIALIZE_DDP = getattr(keras.Model, "_initialize_ddp", None)


def _initialize_ddp(model: Any, ranks: Any) -> None:
    """Replaces Keras' method of that name. Creates no DDP if this package already reduces the model's gradients."""
    assert _INITIALIZE_DDP is not None
    if ranks is None or not any(ranks.has_found_no_ddp(variable) for variable in model.trainable_variables):
        _INITIALIZE_DDP(model)
