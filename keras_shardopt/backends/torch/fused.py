"""Updates in one pass over memory, with Keras' formulas and in Keras' variables.

Keras' own updates on PyTorch make a pass, and often a new array, for each operation of a formula: for Adam some 13
times the time of PyTorch's fused kernel, which reads and writes each array once. Here only the arithmetic of an
optimizer's own step is replaced. Clipping, decay, averages, constraints and counters stay what they are in Keras.

Formulas that no kernel has run operation by operation, in pieces of the arrays that stay in the CPU's cache.

Private names of Keras touched here (a test holds each of them):
    `keras.src.backend.torch.optimizers.torch_adam.Adam`, `torch_adamw.AdamW`, `torch_sgd.SGD`,
        `torch_adagrad.Adagrad` - the classes that `keras.optimizers.Adam()` and others make.
    `TorchParallelOptimizer._parallel_update_step(grads, variables, learning_rate)` - the arithmetic of a step.
    `Adam._momentums`, `_velocities`, `_velocity_hats`, `SGD.momentums`, `Adagrad._accumulators` - the slots.
    `Optimizer._get_variable_index` - the position of a variable's slots.
Private names of PyTorch: `torch._fused_adam_`, `torch._fused_sgd_` - what is behind `torch.optim.Adam(fused=True)`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from keras import ops
from keras.src.backend.torch.optimizers import torch_adagrad, torch_adam, torch_adamw, torch_sgd

from keras_shardopt.numerics import Tensor, Variable

_STEP = "_parallel_update_step"

PIECE = 2**18
"""How many elements of each array are worked on at a time where there is no kernel, on a CPU."""

_DTYPES = (torch.float32, torch.float64)


def may_fuse(optimizers: Sequence[Any]) -> bool:
    """Whether one of these innermost optimizers can update in one pass over memory.

    It is for Keras' own Adam, AdamW, SGD and Adagrad; a subclass, or one with a method replaced, keeps its own
    arithmetic. So does an update of other dtypes than float32 and float64 (or of several), on other devices than a CPU
    or GPU, or of sparse gradients.
    """
    return any(_fits(optimizer) for optimizer in optimizers)


@torch.compiler.disable
def fused(optimizers: Sequence[Any], function: Callable[..., None], *args: Any) -> None:
    """Calls `function(*args)`, in which these innermost optimizers update in one pass over memory."""
    # For the time of an update only, so that optimizers can be copied and saved, and used elsewhere, as they are.
    replaced = [optimizer for optimizer in optimizers if _fits(optimizer)]
    for optimizer in replaced:
        optimizer.__dict__[_STEP] = functools.partial(_update, optimizer)
    try:
        function(*args)
    finally:
        for optimizer in replaced:
            del optimizer.__dict__[_STEP]


def _fits(optimizer: Any) -> bool:
    return type(optimizer) in _RULES and not _OVERRIDDEN & optimizer.__dict__.keys()


_OVERRIDDEN = {_STEP, "_backend_update_step", "update_step"}


@torch.no_grad()
def _update(optimizer: Any, grads: Sequence[Tensor], variables: Sequence[Variable], learning_rate: Any) -> None:
    """Stands in for an optimizer's own `_parallel_update_step`."""
    names, rule = _RULES[type(optimizer)](optimizer)
    places = [optimizer._get_variable_index(variable) for variable in variables]
    weights = [variable.value for variable in variables]
    slots = [[getattr(optimizer, name)[i].value for i in places] for name in names]
    grads = [g.contiguous() if torch.is_tensor(g) and not g.is_sparse else g for g in grads]
    if rule is None or not _are_alike([*weights, *grads, *[slot for each in slots for slot in each]]):
        getattr(type(optimizer), _STEP)(optimizer, grads, variables, learning_rate)
        return
    # Where another replica owns all of a variable, there is nothing.
    columns = [column for column in zip(weights, grads, *slots) if column[0].numel()]
    if columns:
        rule(optimizer, learning_rate, *map(list, zip(*columns)))


def _are_alike(tensors: Sequence[Tensor]) -> bool:
    """Whether one kernel can take them all."""
    dtype, device = tensors[0].dtype, tensors[0].device
    if dtype not in _DTYPES or device.type not in ("cpu", "cuda"):
        return False
    return all(
        torch.is_tensor(t)
        and t.dtype == dtype
        and t.device == device
        and t.layout == torch.strided
        and t.is_contiguous()
        for t in tensors
    )


# -- Adam and AdamW ------------------------------------------------------------------------------------------------


def _adam_rule(optimizer: Any) -> tuple[list[str], Callable[..., None] | None]:
    names = ["_momentums", "_velocities", *(["_velocity_hats"] if optimizer.amsgrad else [])]
    return names, _adam if optimizer.beta_1 < 1 and optimizer.beta_2 < 1 else None


def _adam(
    optimizer: Any,
    learning_rate: Any,
    weights: list[Tensor],
    grads: list[Tensor],
    momentums: list[Tensor],
    velocities: list[Tensor],
    *largest: list[Tensor],
) -> None:
    # With b_i = 1 - beta_i ** t, PyTorch computes w -= (lr / b_1) m / (sqrt(v) / sqrt(b_2) + eps), and Keras
    # w -= (lr sqrt(b_2) / b_1) m / (sqrt(v) + eps). So Keras' rate, in Keras' precision, with b_i = 1: at a step
    # so late that they are.
    dtype = weights[0].dtype
    step = ops.cast(optimizer.iterations + 1, dtype)
    power_1, power_2 = (ops.power(ops.cast(beta, dtype), step) for beta in (optimizer.beta_1, optimizer.beta_2))
    rate = ops.cast(learning_rate, dtype) * ops.sqrt(1 - power_2) / (1 - power_1)
    if weights[0].device.type != "cpu":
        rate = rate.to(torch.float32)  # all that the kernel takes there
    torch._fused_adam_(
        weights,
        grads,
        momentums,
        velocities,
        *(largest or [[]]),
        [_never(weights[0].device)] * len(weights),
        lr=rate.to(weights[0].device),
        beta1=optimizer.beta_1,
        beta2=optimizer.beta_2,
        weight_decay=0.0,
        eps=optimizer.epsilon,
        amsgrad=bool(largest),
        maximize=False,
    )


@functools.lru_cache(maxsize=16)
def _never(device: torch.device) -> Tensor:
    return torch.tensor(float("inf"), dtype=torch.float32, device=device)


# -- SGD -----------------------------------------------------------------------------------------------------------


def _sgd_rule(optimizer: Any) -> tuple[list[str], Callable[..., None] | None]:
    if optimizer.momentum == 0:
        return [], _sgd
    return ["momentums"], _nesterov if optimizer.nesterov else _momentum


def _sgd(optimizer: Any, learning_rate: Any, weights: list[Tensor], grads: list[Tensor]) -> None:
    del optimizer
    rate = _number(learning_rate)
    _fused_sgd(weights, grads, [], momentum=0.0, lr=rate, dampening=0.0)


def _momentum(
    optimizer: Any, learning_rate: Any, weights: list[Tensor], grads: list[Tensor], momentums: list[Tensor]
) -> None:
    # PyTorch: m = mu m + (1 - d) g and w -= lr m; Keras: m = mu m - rate g and w += m. So 1 - d = -rate and lr = -1.
    rate = _number(learning_rate)
    dampening = 1.0 + rate
    if abs((dampening - 1.0) - rate) <= 1e-7 * abs(rate):
        _fused_sgd(weights, grads, momentums, momentum=optimizer.momentum, lr=-1.0, dampening=dampening)
        return
    # A rate so small that 1 + rate has lost its digits.
    for w, g, m in _pieces(weights, grads, momentums):
        w.add_(m.mul_(optimizer.momentum).add_(g, alpha=-rate))


def _fused_sgd(weights: list[Tensor], grads: list[Tensor], momentums: list[Tensor], **numbers: float) -> None:
    torch._fused_sgd_(
        weights, grads, momentums, weight_decay=0.0, nesterov=False, maximize=False, is_first_step=False, **numbers
    )


def _nesterov(
    optimizer: Any, learning_rate: Any, weights: list[Tensor], grads: list[Tensor], momentums: list[Tensor]
) -> None:
    rate = _number(learning_rate)
    for w, g, m in _pieces(weights, grads, momentums):
        m.mul_(optimizer.momentum).add_(g, alpha=-rate)
        w.add_(g, alpha=-rate).add_(m, alpha=optimizer.momentum)


# -- Adagrad -------------------------------------------------------------------------------------------------------


def _adagrad_rule(optimizer: Any) -> tuple[list[str], Callable[..., None] | None]:
    del optimizer
    return ["_accumulators"], _adagrad


def _adagrad(
    optimizer: Any, learning_rate: Any, weights: list[Tensor], grads: list[Tensor], squares: list[Tensor]
) -> None:
    # PyTorch's kernel has epsilon outside of the root.
    rate = _number(learning_rate)
    for w, g, s in _pieces(weights, grads, squares):
        s.addcmul_(g, g)
        w.addcdiv_(g, torch.add(s, optimizer.epsilon).sqrt_(), value=-rate)


# ------------------------------------------------------------------------------------------------------------------


def _number(learning_rate: Any) -> float:
    return float(ops.convert_to_numpy(learning_rate))


def _pieces(*lists: list[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Flat pieces of each of the tensors, along with those of the others at the same place."""
    for tensors in zip(*lists):
        size = PIECE if tensors[0].device.type == "cpu" else tensors[0].numel()
        yield from zip(*[tensor.detach().view(-1).split(size) for tensor in tensors])


_RULES: dict[type, Callable[[Any], tuple[list[str], Callable[..., None] | None]]] = {
    torch_adam.Adam: _adam_rule,
    torch_adamw.AdamW: _adam_rule,
    torch_sgd.SGD: _sgd_rule,
    torch_adagrad.Adagrad: _adagrad_rule,
}
