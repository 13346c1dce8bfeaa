"""Updates in one pass over memory, with Keras' formulas and in Keras' variables.

Keras' own updates on PyTorch make a pass, and often a new array, for each operation of a formula: for Adam some 13
times the time of PyTorch's fused kernel, which reads and writes each array once. Here only the arithmetic of an
optimizer's own step is replaced, and the decay of weights with it where the kernel has one. Clipping, averages,
constraints and counters stay what they are in Keras.

Formulas that no kernel has run operation by operation, in pieces of the arrays that stay in the CPU's cache: here in
fewer operations than Keras', and where that gains little in Keras' own (`pieces.py`). Wrappers around such an optimizer
hand over by what gradients are to be multiplied, which then costs no pass of its own.

Private names of Keras touched here (a test holds each of them):
    `keras.src.backend.torch.optimizers.torch_adam.Adam` and others - the classes that `keras.optimizers.Adam()` makes.
    `Nadam._u_product` - the product of the rates of its momentum so far.
    `Optimizer._apply_weight_decay(variables)`, `_use_weight_decay(variable)` - what decays, just before the step.
Private names of PyTorch: `torch._fused_adam_`, `torch._fused_adamw_`, `torch._fused_sgd_` - what is behind
    `torch.optim.Adam(fused=True)`.
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
    slot_names,
    step_of,
    update_in_pieces,
)
from keras_shardopt.numerics import Optimizer, Tensor, Variable


@torch.compiler.disable
def fused(optimizers: Sequence[tuple[Any, bool]], function: Callable[..., None], *args: Any) -> None:
    """Calls `function(*args)`, in which these innermost optimizers update in one pass over memory.

    It is for Keras' own element-wise optimizers; a subclass, or one with a method replaced, keeps its own arithmetic.

    Args:
        optimizers: some of them, each with whether to keep Keras' arithmetic, bit for bit.
        function: what calls their `apply`.
        args: its arguments.
    """
    # For the time of an update only, so that optimizers can be copied and saved, and used elsewhere, as they are.
    replaced = []
    for optimizer, exactly in optimizers:
        if is_elementwise(optimizer):
            replaced.append(optimizer)
            optimizer.__dict__.update(_StandIn(optimizer, exactly).methods())
    try:
        function(*args)
    finally:
        for optimizer in replaced:
            for name in (step_of(type(optimizer)), _DECAY):
                optimizer.__dict__.pop(name, None)


def is_faster(optimizer: Optimizer, exactly: bool, variables: Sequence[Variable]) -> bool:
    """Whether `fused` makes updates of all these variables faster."""
    return is_elementwise(optimizer) and (not exactly or pieces_are_faster(variables))


class _StandIn:
    """Stands in for an optimizer's own step, and for a decay of weights that the step can make in its pass."""

    def __init__(self, optimizer: Optimizer, exactly: bool) -> None:
        self._optimizer, self._exactly = optimizer, exactly
        self._decayed: list[Variable] = []
        self.factors: Factors = {}
        self.divides = False

    def methods(self) -> dict[str, Callable[..., None]]:
        """What it stands in for, by name."""
        takes_decay = self._optimizer.weight_decay is not None and _rule_of(self._optimizer) is _adam
        return {step_of(type(self._optimizer)): self, **({_DECAY: self._decay} if takes_decay else {})}

    def _decay(self, variables: Sequence[Variable]) -> None:
        if self._exactly or variables[0].value.device.type != "cpu":  # where the rate would have to be read
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
    """Lets the update that comes multiply its gradients, if it can: with the bits of a product made before.

    Args:
        optimizer: what updates next.
        grads: one tensor or None per variable.
        variables: their variables.
        factors: one scalar tensor per variable; None leaves a gradient as it is.
        divides: whether gradients are divided by the factors.

    Returns:
        Whether it does; else nothing has changed.
    """
    changed = [i for i, grad in enumerate(grads) if grad is not None and factors[i] is not None]
    weights = values_of([variables[i] for i in changed])
    if not all(torch.is_tensor(grads[i]) and grads[i].dtype == w.dtype for i, w in zip(changed, weights)):
        return False
    # With a factor of 1 there is nothing to do, for any optimizer.
    first = factors[changed[0]] if changed else None
    if first is None or (all(factors[i] is first for i in changed) and runtime.is_cheap_to_read(first) and first == 1):
        return True
    step = getattr(optimizer, step_of(type(optimizer)), None)
    if not isinstance(step, _StandIn) or _looks_at_gradients(optimizer) or _is_changed(optimizer):
        return False
    if not all(grads[i].layout == torch.strided and grads[i].dtype in DTYPES for i in changed):
        return False
    if divides and all(factors[i] is first for i in changed) and _is_power_of_two(first):
        # Then a product has the same bits as the quotient, in half of its time.
        inverse = first.reciprocal()
        factors, divides = [inverse] * len(grads), False
    step.factors, step.divides = {id(variables[i]): _like(factors[i], grads[i]) for i in changed}, divides
    return True


def _is_power_of_two(factor: Tensor) -> bool:
    """Whether that is known without waiting for a device; and its inverse is a normal number, which has all digits."""
    if not runtime.is_cheap_to_read(factor):
        return False
    mantissa, exponent = math.frexp(float(factor))
    return mantissa == 0.5 and abs(exponent) < 100


def _like(factor: Tensor, grad: Tensor) -> Tensor:
    return factor if factor.dtype == grad.dtype else factor.to(grad.dtype)


def _looks_at_gradients(optimizer: Optimizer) -> bool:
    """Whether Keras reads gradients between `apply` and the step."""
    names = ("clipnorm", "global_clipnorm", "clipvalue", "gradient_accumulation_steps", "loss_scale_factor")
    return any(getattr(optimizer, name) is not None for name in names)


def _is_changed(optimizer: Optimizer) -> bool:
    """Whether a method of this one optimizer is replaced, which may read gradients, other than by a stand-in."""
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
    columns = None
    if rule is not None:
        columns = columns_of(optimizer, slot_names(optimizer), grads, variables, factors, divides)
    if rule is None or columns is None or not columns.are_alike:
        if decayed:
            getattr(type(optimizer), _DECAY)(optimizer, decayed)
        update_in_pieces(optimizer, grads, variables, learning_rate, factors, divides)
        return
    decays = [bool(decayed) and optimizer._use_weight_decay(variable) for variable in variables]
    for which in (False, True):
        # Where another replica owns all of a variable, there is nothing; but Nadam has a number that is everyone's.
        has_rest = [row[0].numel() > 0 or rule is _nadam for row in columns.rows]
        part = columns.only([has and each is which for has, each in zip(has_rest, decays)])
        if part.rows:
            rule(optimizer, learning_rate, part, *([True] if which else []))


def _rule_of(optimizer: Optimizer) -> _Rule | None:
    return _RULES.get(type(optimizer), lambda _: None)(optimizer)


# -- Adam and AdamW ------------------------------------------------------------------------------------------------


def _adam_rule(optimizer: keras.optimizers.Adam) -> _Rule | None:
    return _adam if optimizer.beta_1 < 1 and optimizer.beta_2 < 1 else None


def _adam(optimizer: keras.optimizers.Adam, learning_rate: Any, columns: Columns, decays: bool = False) -> None:
    # With b_i = 1 - beta_i ** t, PyTorch computes w -= (lr / b_1) m / (sqrt(v) / sqrt(b_2) + eps), and Keras
    # w -= (lr sqrt(b_2) / b_1) m / (sqrt(v) + eps). So Keras' rate, in Keras' precision, with b_i = 1: at a step
    # so late that they are.
    dtype, device = columns.like.dtype, columns.like.device
    step = ops.cast(optimizer.iterations + 1, dtype)
    power_1, power_2 = (ops.power(ops.cast(beta, dtype), step) for beta in (optimizer.beta_1, optimizer.beta_2))
    rate = ops.cast(learning_rate, dtype) * ops.sqrt(1 - power_2) / (1 - power_1)
    if device.type != "cpu":
        rate = rate.to(torch.float32)  # all that the kernel takes there
    # PyTorch decays by its rate times its decay, and Keras by its own rate.
    decay = optimizer.weight_decay * _number(learning_rate) / (float(rate) or 1.0) if decays else 0.0
    kernel = torch._fused_adamw_ if decays else torch._fused_adam_
    for weights, grads, momentums, velocities, *largest in columns.lists():
        kernel(
            weights,
            grads,
            momentums,
            velocities,
            *(largest or [[]]),
            [_never(device)] * len(weights),
            lr=rate.to(device),
            beta1=optimizer.beta_1,
            beta2=optimizer.beta_2,
            weight_decay=decay,
            eps=optimizer.epsilon,
            amsgrad=bool(largest),
            maximize=False,
        )


@functools.lru_cache(maxsize=16)
def _never(device: torch.device) -> Tensor:
    return torch.tensor(float("inf"), dtype=torch.float32, device=device)


# -- SGD -----------------------------------------------------------------------------------------------------------


def _sgd_rule(optimizer: keras.optimizers.SGD) -> _Rule:
    if optimizer.momentum == 0:
        return _sgd
    return _nesterov if optimizer.nesterov else _momentum


def _sgd(optimizer: keras.optimizers.SGD, learning_rate: Any, columns: Columns) -> None:
    del optimizer
    rate = _number(learning_rate)
    for weights, grads in columns.lists():
        _fused_sgd(weights, grads, [], momentum=0.0, lr=rate, dampening=0.0)


def _momentum(optimizer: keras.optimizers.SGD, learning_rate: Any, columns: Columns) -> None:
    # PyTorch: m = mu m + (1 - d) g and w -= lr m; Keras: m = mu m - rate g and w += m. So 1 - d = -rate and lr = -1.
    rate = _number(learning_rate)
    dampening = 1.0 + rate
    if abs((dampening - 1.0) - rate) <= 1e-7 * abs(rate):
        for weights, grads, momentums in columns.lists():
            _fused_sgd(weights, grads, momentums, momentum=optimizer.momentum, lr=-1.0, dampening=dampening)
        return
    # A rate so small that 1 + rate has lost its digits.
    for w, g, m in columns.pieces():
        w.add_(m.mul_(optimizer.momentum).add_(g, alpha=-rate))


def _fused_sgd(weights: list[Tensor], grads: list[Tensor], momentums: list[Tensor], **numbers: float) -> None:
    torch._fused_sgd_(
        weights, grads, momentums, weight_decay=0.0, nesterov=False, maximize=False, is_first_step=False, **numbers
    )


def _nesterov(optimizer: keras.optimizers.SGD, learning_rate: Any, columns: Columns) -> None:
    rate = _number(learning_rate)
    for w, g, m in columns.pieces():
        m.mul_(optimizer.momentum).add_(g, alpha=-rate)
        w.add_(g, alpha=-rate).add_(m, alpha=optimizer.momentum)


# -- Adagrad -------------------------------------------------------------------------------------------------------


def _adagrad(optimizer: keras.optimizers.Adagrad, learning_rate: Any, columns: Columns) -> None:
    # PyTorch's kernel has epsilon outside of the root.
    rate = _number(learning_rate)
    for w, g, s in columns.pieces():
        s.addcmul_(g, g)
        w.addcdiv_(g, torch.add(s, optimizer.epsilon).sqrt_(), value=-rate)


# -- Lion and Nadam ------------------------------------------------------------------------------------------------


def _lion(optimizer: keras.optimizers.Lion, learning_rate: Any, columns: Columns) -> None:
    # With Keras' bits: elsewhere a sign might be another one. That of 0 is 0.
    like = columns.like
    rate = _number(ops.cast(learning_rate, like.dtype))
    room = torch.empty(0, dtype=like.dtype, device=like.device)
    for w, g, m in columns.pieces():
        room = room if room.shape == m.shape else torch.empty_like(m)
        torch.mul(m, optimizer.beta_1, out=room).add_(g, alpha=1 - optimizer.beta_1)
        m.mul_(optimizer.beta_2).add_(g, alpha=1 - optimizer.beta_2)  # while both are in the cache
        w.add_(room.sign_(), alpha=-rate)


def _nadam(optimizer: keras.optimizers.Nadam, learning_rate: Any, columns: Columns) -> None:
    # Keras: w -= rate (u' m / (1 - p u') + (1 - u) g / (1 - p)) / (sqrt(v / (1 - b ** t)) + eps), with p the product of
    # all u so far and u' the next one. Here all is multiplied by sqrt(1 - b ** t), and numbers by each other first.
    # The numbers are in Keras' precision, as 1 - b ** t has few digits.
    dtype = columns.like.dtype
    numbers = (optimizer.iterations, optimizer.beta_1, optimizer.beta_2, 0.96)
    step, beta_1, beta_2, decay = (ops.cast(number, dtype) for number in numbers)
    now, next_one = (beta_1 * (1.0 - 0.5 * ops.power(decay, step + t)) for t in (1, 2))
    optimizer._u_product.assign(optimizer._u_product.value * now)
    product = optimizer._u_product.value
    root = ops.sqrt(1 - ops.power(beta_2, step + 1))
    scale = ops.cast(learning_rate, dtype) * root
    factors = (scale * next_one / (1 - product * next_one), scale * (1 - now) / (1 - product), root)
    of_momentum, of_grad, root = torch.stack(factors).tolist()  # one wait for a device
    epsilon = optimizer.epsilon * root
    for w, g, m, v in columns.pieces():
        m.mul_(optimizer.beta_1).add_(g, alpha=1 - optimizer.beta_1)
        v.mul_(optimizer.beta_2).addcmul_(g, g, value=1 - optimizer.beta_2)
        w.addcdiv_(torch.mul(m, of_momentum).add_(g, alpha=of_grad), torch.sqrt(v).add_(epsilon), value=-1)


# ------------------------------------------------------------------------------------------------------------------


def _number(learning_rate: Any) -> float:
    return float(ops.convert_to_numpy(learning_rate))


_Rule = Callable[..., None]
"""`(optimizer, learning_rate, columns) -> None`: the whole step. That of Adam can decay weights, too."""

_RULES: dict[type, Callable[[Any], _Rule | None]] = {
    torch_adam.Adam: _adam_rule,
    torch_adamw.AdamW: _adam_rule,
    torch_sgd.SGD: _sgd_rule,
    torch_adagrad.Adagrad: lambda _: _adagrad,
    torch_lion.Lion: lambda _: _lion,
    torch_nadam.Nadam: lambda _: _nadam,
}
