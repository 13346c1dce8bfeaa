"""Fused updates: Keras' formulas in one pass over memory, on Keras' variables.

On PyTorch, Keras makes one pass over memory, and often a new array, per operation. Its Adam takes about 13 times as
long as PyTorch's fused kernel. This file replaces only the arithmetic of an optimizer's step, and weight decay if the
kernel includes it. Keras still does clipping, averages of weights, constraints and counters.

Formulas without a kernel run on pieces that fit into the CPU's cache: with fewer operations than Keras', or with Keras'
own code (`pieces.py`). Wrappers that scale gradients pass the factors to the update, and save a pass over memory.

Private names of Keras touched here (a test checks that each exists):
    `keras.src.backend.torch.optimizers.torch_adam.Adam` and others - the classes that `keras.optimizers.Adam()` makes.
    `Nadam._u_product` - the product of its momentum coefficients so far.
    `Optimizer._apply_weight_decay(variables)`, `_use_weight_decay(variable)` - weight decay, just before the step.
Private names of PyTorch: `torch._fused_adam_`, `torch._fused_adamw_`, `torch._fused_sgd_` - the kernels of
    `torch.optim.Adam(fused=True)` and others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch
from keras import ops
from keras.src.backend.torch.optimizers import (
    torch_adagrad,
    torch_adam,
    torch_adamw,
    torch_lion,
    torch_nadam,
    torch_sgd,
)

from keras_shardopt.backends.torch.held import values_of
from keras_shardopt.backends.torch.runtime import runtime
from keras_shardopt.kernels.torch.pieces import (
    DTYPES,
    Columns,
    Factors,
    columns_of,
    is_elementwise,
    pieces_are_faster,
    step_of,
    update_in_pieces,
)
from keras_shardopt.numerics import Optimizer, Tensor, Variable


@torch.compiler.disable
def fused(optimizers: Sequence[tuple[Any, bool]], function: Callable[..., None], *args: Any) -> None:
    """Call `function(*args)`. During this call, these optimizers update with fewer passes over memory.

    This applies to Keras' element-wise optimizers, but not to a subclass, or to an optimizer with a replaced method.

    Args:
        optimizers: optimizers, each with a bool: whether updates must be bitwise identical to Keras'.
        function: calls the `apply` of the optimizers.
        args: arguments of `function`.
    """
    # Replace methods only during an update, because optimizers are copied, saved and used elsewhere in between.
    replaced = []
    for optimizer, exactly in optimizers:
        if is_elementwise(optimizer):
            replaced.append(optimizer)
            optimizer.__dict__.update(_FusedStep(optimizer, exactly).methods())
    try:
        function(*args)
    finally:
        for optimizer in replaced:
            for name in (step_of(type(optimizer)), _DECAY):
                optimizer.__dict__.pop(name, None)


def is_faster(optimizer: Optimizer, exactly: bool, variables: Sequence[Variable]) -> bool:
    """Whether `fused` speeds up updates of these variables. `exactly` requires results bitwise identical to Keras'."""
    if not is_elementwise(optimizer) or (isinstance(optimizer, torch_sgd.SGD) and optimizer.momentum == 0):
        return False
    # These rules are faster than Keras' for any size: two are kernels, and Keras' Nadam reads two numbers.
    is_fast = not exactly and _rule_of(optimizer) in (_adam, _momentum, _nadam)
    return is_fast or pieces_are_faster(variables)


class _FusedStep:
    """Replaces an optimizer's step, and its weight decay if PyTorch's fused kernel includes weight decay."""

    def __init__(self, optimizer: Optimizer, exactly: bool) -> None:
        self._optimizer, self._exactly = optimizer, exactly
        self._decayed: list[Variable] = []
        self.factors: Factors = {}
        self.divides = False

    def methods(self) -> dict[str, Callable[..., None]]:
        """Return a dict from the names of methods of the optimizer to the functions that replace these methods."""
        includes_decay = self._optimizer.weight_decay is not None and _rule_of(self._optimizer) is _adam
        return {step_of(type(self._optimizer)): self, **({_DECAY: self._decay} if includes_decay else {})}

    def _decay(self, variables: Sequence[Variable]) -> None:
        # On an accelerator, Keras decays the weights. The kernel would need a decay computed from the learning rate,
        # and reading the rate would wait for the device.
        if self._exactly or variables[0].value.device.type != "cpu":
            getattr(type(self._optimizer), _DECAY)(self._optimizer, variables)
        else:
            self._decayed = list(variables)

    def __call__(self, grads: Sequence[Tensor], variables: Sequence[Variable], learning_rate: Any) -> None:
        arguments = (self._optimizer, grads, variables, learning_rate, self.factors, self.divides)
        if self._exactly:
            update_in_pieces(*arguments)
        else:
            _update(*arguments, self._decayed)


_DECAY = "_apply_weight_decay"


def hand_over(
    optimizer: Optimizer, grads: Sequence[Any], variables: Sequence[Variable], factors: Sequence[Any], divides: bool
) -> bool:
    """Make the next update scale the gradients, if possible. This is bitwise identical to scaling them before.

    Args:
        optimizer: the optimizer that updates next.
        grads: one tensor or None per variable.
        variables: variables of the gradients.
        factors: one scalar tensor per variable, or None for no factor.
        divides: whether to divide gradients by their factors, instead of multiplying.

    Returns:
        Whether the update includes the factors. If False, the caller must apply them.
    """
    changed = [i for i, grad in enumerate(grads) if grad is not None and factors[i] is not None]
    weights = values_of([variables[i] for i in changed])
    if not all(torch.is_tensor(grads[i]) and grads[i].dtype == w.dtype for i, w in zip(changed, weights)):
        return False
    first = factors[changed[0]] if changed else None
    if first is None or (all(factors[i] is first for i in changed) and runtime.is_cheap_to_read(first) and first == 1):
        return True  # no factors, or all are 1
    step = getattr(optimizer, step_of(type(optimizer)), None)
    if not isinstance(step, _FusedStep) or _keras_reads_gradients(optimizer) or _has_replaced_methods(optimizer):
        return False
    if not all(grads[i].layout == torch.strided and grads[i].dtype in DTYPES for i in changed):
        return False
    if divides and all(factors[i] is first for i in changed) and _is_power_of_two(first):
        # Multiplying by the inverse is exact, and takes half the time of a division.
        inverse = first.reciprocal()
        factors, divides = [inverse] * len(grads), False
    step.factors, step.divides = {id(variables[i]): _like(factors[i], grads[i]) for i in changed}, divides
    return True


def _is_power_of_two(factor: Tensor) -> bool:
    """Whether the factor is a power of two with an exact inverse. False if reading it would wait for a device."""
    if not runtime.is_cheap_to_read(factor):
        return False
    mantissa, exponent = math.frexp(float(factor))
    return mantissa == 0.5 and abs(exponent) < 100


def _like(factor: Tensor, grad: Tensor) -> Tensor:
    return factor if factor.dtype == grad.dtype else factor.to(grad.dtype)


def _keras_reads_gradients(optimizer: Optimizer) -> bool:
    """Whether options such as `clipnorm` make Keras read gradients before the fused update scales them."""
    names = ("clipnorm", "global_clipnorm", "clipvalue", "gradient_accumulation_steps", "loss_scale_factor")
    return any(getattr(optimizer, name) is not None for name in names)


def _has_replaced_methods(optimizer: Optimizer) -> bool:
    """Whether other code than `fused` has replaced a method of this optimizer. That method may read gradients."""
    kind: Any = type(optimizer)
    own = {name for name in optimizer.__dict__.keys() & _methods_of(kind) if callable(optimizer.__dict__[name])}
    return not own <= {step_of(kind), _DECAY}


@functools.lru_cache(maxsize=64)
def _methods_of(kind: type) -> frozenset[str]:
    return frozenset(name for name in dir(kind) if callable(getattr(kind, name, None)))


@torch.no_grad()
def _update(
    optimizer: keras.optimizers.Optimizer,
    grads: Sequence[Tensor],
    variables: Sequence[Variable],
    learning_rate: Any,
    factors: Factors,
    divides: bool,
    decayed: Sequence[Variable],
) -> None:
    rule = _rule_of(optimizer)
    columns = None if rule is None else columns_of(optimizer, grads, variables, factors, divides)
    if rule is None or columns is None or not columns.are_uniform:
        if decayed:
            getattr(type(optimizer), _DECAY)(optimizer, decayed)
        update_in_pieces(optimizer, grads, variables, learning_rate, factors, divides)
        return
    decays = [bool(decayed) and optimizer._use_weight_decay(variable) for variable in variables]
    for has_decay in (False, True):
        # Skip empty slices: other replicas own these variables. Nadam does not skip them, because it must update
        # `_u_product` even if all slices of this replica are empty.
        is_owned = [row[0].numel() > 0 or rule is _nadam for row in columns.rows]
        chosen = columns.only([owned and decay is has_decay for owned, decay in zip(is_owned, decays)])
        if chosen.rows:
            rule(optimizer, learning_rate, chosen, *([True] if has_decay else []))


def _rule_of(optimizer: Optimizer) -> _Rule | None:
    return _RULES.get(type(optimizer), lambda _: None)(optimizer)


# -- Adam and AdamW ------------------------------------------------------------------------------------------------


def _adam_rule(optimizer: keras.optimizers.Adam) -> _Rule | None:
    return _adam if optimizer.beta_1 < 1 and optimizer.beta_2 < 1 else None


def _adam(optimizer: keras.optimizers.Adam, learning_rate: Any, columns: Columns, decays: bool = False) -> None:
    # With b_i = 1 - beta_i ** t, PyTorch computes w -= (lr / b_1) m / (sqrt(v) / sqrt(b_2) + eps), and Keras
    # w -= (lr sqrt(b_2) / b_1) m / (sqrt(v) + eps). The kernel therefore gets lr sqrt(b_2) / b_1 in Keras' precision,
    # and an infinite step count, for which its own b_i are 1.
    dtype, device = columns.like.dtype, columns.like.device
    step = (ops.convert_to_tensor(optimizer.iterations) + 1).to(dtype)
    betas = optimizer.beta_1, optimizer.beta_2
    # `torch.full` fills on the device. `ops.cast(beta, dtype)` would copy, and wait until a GPU has finished its work.
    power_1, power_2 = (torch.pow(torch.full((), beta, dtype=dtype, device=step.device), step) for beta in betas)
    rate = ops.cast(learning_rate, dtype) * ops.sqrt(1 - power_2) / (1 - power_1)
    if device.type != "cpu":
        rate = rate.to(torch.float32)  # on accelerators, the kernel needs float32
    # PyTorch multiplies the decay by the kernel's rate, Keras by `learning_rate`, so correct the decay by their ratio.
    decay = optimizer.weight_decay * _as_float(learning_rate) / (float(rate) or 1.0) if decays else 0.0
    kernel = torch._fused_adamw_ if decays else torch._fused_adam_
    infinite = torch.full((), math.inf, dtype=torch.float32, device=device)
    for weights, grads, momentums, velocities, *largest in columns.lists():
        kernel(
            weights,
            grads,
            momentums,
            velocities,
            *(largest or [[]]),
            [infinite] * len(weights),
            lr=rate.to(device),
            beta1=optimizer.beta_1,
            beta2=optimizer.beta_2,
            weight_decay=decay,
            eps=optimizer.epsilon,
            amsgrad=bool(largest),
            maximize=False,
        )


# -- SGD -----------------------------------------------------------------------------------------------------------


def _sgd_rule(optimizer: keras.optimizers.SGD) -> _Rule | None:
    if optimizer.momentum == 0:
        return None  # on CPUs, Keras' single operation is faster than PyTorch's kernel
    return _nesterov if optimizer.nesterov else _momentum


def _momentum(optimizer: keras.optimizers.SGD, learning_rate: Any, columns: Columns) -> None:
    # With momentum m and dampening d, PyTorch computes m = mu m + (1 - d) g and w -= lr m, and Keras m = mu m - rate g
    # and w += m. So the kernel gets d = 1 + rate and lr = -1.
    rate = _as_float(learning_rate)
    dampening = 1.0 + rate
    if abs((dampening - 1.0) - rate) <= 1e-7 * abs(rate):
        for weights, grads, momentums in columns.lists():
            torch._fused_sgd_(
                weights,
                grads,
                momentums,
                weight_decay=0.0,
                momentum=optimizer.momentum,
                lr=-1.0,
                dampening=dampening,
                nesterov=False,
                maximize=False,
                is_first_step=False,
            )
        return
    # The rate is so small that the dampening, 1 + rate, loses its digits. So compute without the kernel.
    for w, g, m in columns.pieces():
        w.add_(m.mul_(optimizer.momentum).add_(g, alpha=-rate))


def _nesterov(optimizer: keras.optimizers.SGD, learning_rate: Any, columns: Columns) -> None:
    rate = _as_float(learning_rate)
    for w, g, m in columns.pieces():
        m.mul_(optimizer.momentum).add_(g, alpha=-rate)
        w.add_(g, alpha=-rate).add_(m, alpha=optimizer.momentum)


# -- Adagrad -------------------------------------------------------------------------------------------------------


def _adagrad(optimizer: keras.optimizers.Adagrad, learning_rate: Any, columns: Columns) -> None:
    # PyTorch's kernel is not used, because it adds epsilon after the square root, and Keras before.
    rate = _as_float(learning_rate)
    for w, g, s in columns.pieces():
        s.addcmul_(g, g)
        w.addcdiv_(g, torch.add(s, optimizer.epsilon).sqrt_(), value=-rate)


# -- Lion and Nadam ------------------------------------------------------------------------------------------------


def _lion(optimizer: keras.optimizers.Lion, learning_rate: Any, columns: Columns) -> None:
    # This must be bitwise identical to Keras, because a difference in rounding could flip a sign.
    like = columns.like
    rate = _as_float(ops.cast(learning_rate, like.dtype))
    buffer = torch.empty(0, dtype=like.dtype, device=like.device)
    for w, g, m in columns.pieces():
        buffer = buffer if buffer.shape == m.shape else torch.empty_like(m)
        torch.mul(m, optimizer.beta_1, out=buffer).add_(g, alpha=1 - optimizer.beta_1)
        m.mul_(optimizer.beta_2).add_(g, alpha=1 - optimizer.beta_2)  # update m now, while m and g are in the cache
        w.add_(buffer.sign_(), alpha=-rate)


def _nadam(optimizer: keras.optimizers.Nadam, learning_rate: Any, columns: Columns) -> None:
    # Keras: w -= rate (u' m / (1 - p u') + (1 - u) g / (1 - p)) / (sqrt(v / (1 - b ** t)) + eps), with momentum m,
    # velocity v, b = beta_2, momentum coefficients u of step t and u' of the next, and p the product of all u so far.
    # Here numerator and denominator are multiplied by sqrt(1 - b ** t). Scalars are combined in Keras' precision:
    # 1 - b ** t loses digits by cancellation, and must lose the same digits.
    dtype = columns.like.dtype
    scalars = (optimizer.iterations, optimizer.beta_1, optimizer.beta_2, 0.96)
    step, beta_1, beta_2, decay = (ops.cast(scalar, dtype) for scalar in scalars)
    now, upcoming = (beta_1 * (1.0 - 0.5 * ops.power(decay, step + t)) for t in (1, 2))
    optimizer._u_product.assign(optimizer._u_product.value * now)
    product = optimizer._u_product.value
    root = ops.sqrt(1 - ops.power(beta_2, step + 1))
    scale = ops.cast(learning_rate, dtype) * root
    factors = (scale * upcoming / (1 - product * upcoming), scale * (1 - now) / (1 - product), root)
    momentum_factor, grad_factor, root = torch.stack(factors).tolist()  # waits for the device once
    epsilon = optimizer.epsilon * root
    for w, g, m, v in columns.pieces():
        m.mul_(optimizer.beta_1).add_(g, alpha=1 - optimizer.beta_1)
        v.mul_(optimizer.beta_2).addcmul_(g, g, value=1 - optimizer.beta_2)
        w.addcdiv_(torch.mul(m, momentum_factor).add_(g, alpha=grad_factor), torch.sqrt(v).add_(epsilon), value=-1)


def _as_float(learning_rate: Any) -> float:
    return float(ops.convert_to_numpy(learning_rate))


_Rule = Callable[..., None]
"""A function that updates variables, given an optimizer, the learning rate and `Columns`, a table of tensors."""

_RULES: dict[type, Callable[[Any], _Rule | None]] = {
    torch_adam.Adam: _adam_rule,
    torch_adamw.AdamW: _adam_rule,
    torch_sgd.SGD: _sgd_rule,
    torch_adagrad.Adagrad: lambda _: _adagrad,
    torch_lion.Lion: lambda _: _lion,
    torch_nadam.Nadam: lambda _: _nadam,
}
