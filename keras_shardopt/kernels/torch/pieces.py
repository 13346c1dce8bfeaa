"""Keras' own updates, a piece of the arrays at a time: the same operations and bits, in a fraction of the time.

Keras makes a pass over the memory of all variables for each operation of a formula. Where a formula is element-wise,
pieces can go through all of it one after another, and stay in the CPU's cache meanwhile.

Which formulas are is a list of Keras' own classes. Subclasses are not in it: what the formula of a stranger reads
cannot be seen, and a trial such as that of `sharding/separability.py` does not show equal bits.

Private names of Keras touched here (a test holds each of them):
    `keras.src.backend.torch.optimizers` - the classes that `keras.optimizers.Adam()` and others make.
    `TorchParallelOptimizer._parallel_update_step(grads, variables, learning_rate)` - the arithmetic of a step, which
        reads the `value` of variables and slots. `Ftrl` has `_backend_update_step`, which goes from variable to
        variable, and `assign`, `assign_add`.
    `Optimizer._get_variable_index` - the position of a variable's slots.
    The slots in `_SLOTS`, and `Nadam._u_product`, a number that each step multiplies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import torch
from keras.src.backend.torch.optimizers import (
    torch_adadelta,
    torch_adagrad,
    torch_adam,
    torch_adamax,
    torch_adamw,
    torch_lion,
    torch_nadam,
    torch_rmsprop,
    torch_sgd,
)

from keras_shardopt.backends.torch.held import values_of
from keras_shardopt.numerics import Optimizer, Tensor, Variable

PIECE = 2**18
"""How many elements of each array are worked on at a time, on a CPU."""

_FEWEST = 4
"""In how many pieces all arrays together must be for that to gain anything: each costs calls."""

_SLOTS: dict[type, tuple[str, ...]] = {
    torch_adadelta.Adadelta: ("_accumulated_grads", "_accumulated_delta_vars"),
    torch_adagrad.Adagrad: ("_accumulators",),
    torch_adam.Adam: ("_momentums", "_velocities", "_velocity_hats"),
    torch_adamax.Adamax: ("_m", "_u"),
    torch_adamw.AdamW: ("_momentums", "_velocities", "_velocity_hats"),
    torch_lion.Lion: ("_momentums",),
    torch_nadam.Nadam: ("_momentums", "_velocities"),
    torch_rmsprop.RMSprop: ("_velocities", "_momentums", "_average_gradients"),
    torch_sgd.SGD: ("momentums",),
    keras.optimizers.Ftrl: ("_accumulators", "_linears"),
}
"""The slots of each class; an optimizer has those that its arguments ask for."""

DTYPES = (torch.float32, torch.float64)
"""Of half precision the end of an array, which fills no vector register, is rounded otherwise than the rest: pieces
and whole arrays have not the same bits."""

_STEPS = {"_parallel_update_step", "_backend_update_step", "update_step", "_apply_weight_decay"}


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether an optimizer is known to update each element by itself."""
    return type(optimizer) in _SLOTS and optimizer.__dict__.keys().isdisjoint(_STEPS)


def step_of(kind: type) -> str:
    """The name of the method that is the arithmetic of such an optimizer's step."""
    return "_backend_update_step" if kind is keras.optimizers.Ftrl else "_parallel_update_step"


Factors = dict[int, Tensor]
"""By what gradients are multiplied, or divided, on the way: scalar tensors by the `id` of the variable."""


@torch.no_grad()
def update_in_pieces(
    optimizer: Optimizer,
    grads: Sequence[Tensor],
    variables: Sequence[Variable],
    learning_rate: Any,
    factors: Factors,
    divides: bool,
) -> None:
    """Stands in for the step of an optimizer that `is_elementwise`."""
    kind = type(optimizer)
    step = getattr(kind, step_of(kind))
    columns = columns_of(optimizer, slot_names(optimizer), grads, variables, factors, divides)
    # Elsewhere than on a CPU pieces gain nothing, and Keras' own pass over all variables makes the fewest calls.
    is_whole = columns.like.device.type != "cpu" or columns.num_elements < _FEWEST * PIECE
    if is_whole or not columns.are_alike or not _is_exact(kind):
        if factors:
            grads = [_scaled(grad, factors.get(id(variable)), divides) for grad, variable in zip(grads, variables)]
        step(optimizer, grads, variables, learning_rate)
        return
    # The number that belongs to no variable, and is multiplied once.
    product: Any = getattr(optimizer, "_u_product", None)
    before = None if product is None else product.value.clone()
    for group in columns.groups():
        if before is not None:
            product.value.copy_(before)
        _update_piece(optimizer, step, learning_rate, *map(list, zip(*group)))


def pieces_are_faster(variables: Sequence[Variable]) -> bool:
    """Whether a step on all of these takes less time in pieces than as a whole."""
    values = values_of(variables)
    return values[0].device.type == "cpu" and sum(value.numel() for value in values) >= _FEWEST * PIECE


def _is_exact(kind: type) -> bool:
    # Powers are rounded like half precision, at the end of each thread's part of an array.
    return kind is not keras.optimizers.Ftrl or torch.get_num_threads() == 1


def slot_names(optimizer: Optimizer) -> list[str]:
    """Which slots this one has."""
    return [name for name in _SLOTS[type(optimizer)] if getattr(optimizer, name, None)]


@dataclasses.dataclass
class Columns:
    """The tensors of an update, and by what its gradients are multiplied on the way."""

    rows: list[tuple[Tensor, ...]]
    """For each variable its weights, its gradient and its slots."""

    factors: list[Tensor | None]
    """For each variable; None leaves its gradient as it is."""

    divides: bool
    """Whether gradients are divided by them."""

    @property
    def like(self) -> Tensor:
        """One of them."""
        return self.rows[0][0]

    @property
    def num_elements(self) -> int:
        """Of all variables."""
        return sum([row[0].numel() for row in self.rows])

    @property
    def are_alike(self) -> bool:
        """Whether all are float32, or all float64, on one CPU or GPU, and lie in memory as they are counted."""
        dtype, device = self.like.dtype, self.like.device
        if dtype not in DTYPES or device.type not in ("cpu", "cuda"):
            return False
        for row in self.rows:
            for t in row:
                if not isinstance(t, torch.Tensor) or t.dtype != dtype or t.device != device:
                    return False
                if t.layout != torch.strided or not t.is_contiguous():
                    return False
        return True

    def only(self, chosen: Sequence[bool]) -> Columns:
        """Those of some variables."""
        kept = [i for i, is_chosen in enumerate(chosen) if is_chosen]
        return Columns([self.rows[i] for i in kept], [self.factors[i] for i in kept], self.divides)

    def pieces(self) -> Iterator[tuple[Tensor, ...]]:
        """The rows, those of large tensors in flat pieces; on a GPU whole."""
        for group in self.groups():
            yield from group

    def lists(self) -> Iterator[list[list[Tensor]]]:
        """Lists of weights, of gradients and of slots: of all, if nothing is multiplied, or a few pieces at a time."""
        groups = iter([self.rows]) if all(factor is None for factor in self.factors) else self.groups()
        for group in groups:
            yield [list(column) for column in zip(*group)]

    def groups(self) -> Iterator[list[tuple[Tensor, ...]]]:
        """The pieces, of large tensors one at a time, of small ones several."""
        group: list[tuple[Tensor, ...]] = []
        factors: list[Tensor | None] = []
        size = 0
        room = self._room()
        largest = PIECE if self.like.device.type == "cpu" else max(1, self.num_elements)
        for row, factor in zip(self.rows, self.factors):
            for piece in _cut(row, largest):
                length = piece[0].numel()
                length = 0 if _is_small(piece[0]) else length
                if group and length and size + length > largest:
                    yield self._scaled(group, factors, room)
                    group, factors, size = [], [], 0
                group.append(piece)
                factors.append(factor)
                size += length
        if group:
            yield self._scaled(group, factors, room)

    def _scaled(
        self, group: list[tuple[Tensor, ...]], factors: list[Tensor | None], room: Tensor | None
    ) -> list[tuple[Tensor, ...]]:
        """With gradients that are multiplied: large ones in `room`, all small ones by one call."""
        chosen = [i for i, factor in enumerate(factors) if factor is not None]
        if not chosen:
            return group
        few = [i for i in chosen if room is None or _is_small(group[i][1])]
        run = torch._foreach_div if self.divides else torch._foreach_mul
        made = dict(zip(few, run([group[i][1] for i in few], [factors[i] for i in few]) if few else []))
        start = 0
        for i in chosen:
            if i not in made:
                grad = group[i][1]
                assert room is not None
                out = room[start : start + grad.numel()].view(grad.shape)
                made[i] = _scaled(grad, factors[i], self.divides, out)
                start += grad.numel()
        return [(row[0], made[i], *row[2:]) if i in made else row for i, row in enumerate(group)]

    def _room(self) -> Tensor | None:
        """Where the products of one group lie, on a CPU, whose system gives out memory slowly."""
        if self.like.device.type != "cpu" or all(factor is None for factor in self.factors):
            return None
        if all(_is_small(row[0]) for row in self.rows):
            return None
        return torch.empty(min(PIECE, self.num_elements), dtype=self.like.dtype, device=self.like.device)


def _is_small(tensor: Tensor) -> bool:
    """Whether it travels with others: where calls take longer than their arithmetic."""
    return tensor.numel() <= PIECE // 32


def _cut(row: tuple[Tensor, ...], length: int) -> Iterator[tuple[Tensor, ...]]:
    if row[0].numel() <= length:
        return iter([row])
    return zip(*[tensor.detach().view(-1).split(length) for tensor in row])


def _scaled(grad: Tensor, factor: Tensor | None, divides: bool, out: Tensor | None = None) -> Tensor:
    if factor is None:
        return grad
    return (torch.div if divides else torch.mul)(grad, factor, out=out)


def columns_of(
    optimizer: keras.optimizers.Optimizer,
    names: Sequence[str],
    grads: Sequence[Tensor],
    variables: Sequence[Variable],
    factors: Factors,
    divides: bool,
) -> Columns:
    """For each variable its weights, its gradient and its slots."""
    places = [optimizer._get_variable_index(variable) for variable in variables]
    slots = [values_of([getattr(optimizer, name)[i] for i in places]) for name in names]
    grads = [g.contiguous() if torch.is_tensor(g) and not g.is_sparse else g for g in grads]
    rows = list(zip(values_of(variables), grads, *slots))
    return Columns(rows, [factors.get(id(variable)) for variable in variables], divides)


def _update_piece(
    optimizer: Optimizer,
    step: Any,
    learning_rate: Any,
    weights: list[Tensor],
    grads: list[Tensor],
    *slots: list[Tensor],
) -> None:
    stand_in = object.__new__(type(optimizer))
    reads_values = step.__name__ == "_parallel_update_step"
    rows = [[_Value(t) for t in row] if reads_values else row for row in (weights, *slots)]
    places = {id(weight): i for i, weight in enumerate(rows[0])}
    # Not by assignment, of which Keras keeps account.
    stand_in.__dict__.update(
        {
            **optimizer.__dict__,
            **dict(zip(slot_names(optimizer), rows[1:])),
            "_get_variable_index": lambda weight: places[id(weight)],
            "assign": torch.Tensor.copy_,
            "assign_add": torch.Tensor.add_,
        }
    )
    step(stand_in, grads, rows[0], learning_rate)


class _Value:
    """What such a step reads of a variable."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
