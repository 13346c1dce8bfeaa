"""Keras' updates, one piece of the arrays at a time: bitwise identical, in a fraction of the time.

Keras makes one pass over the memory of all variables for each operation. An element-wise formula can instead finish
one piece of the arrays before the next, so the piece stays in the CPU's cache.

`_SLOTS` lists Keras' element-wise classes. Subclasses are excluded, because they may compute anything, and no
comparison of results (as in `sharding/separability.py`) proves bitwise equality.

Private names of Keras touched here (a test checks that each exists):
    `keras.src.backend.torch.optimizers` - the classes that `keras.optimizers.Adam()` and others make.
    `TorchParallelOptimizer._parallel_update_step(grads, variables, learning_rate)` - the arithmetic of a step. It
        reads the `value` of variables and slots. `Ftrl` has `_backend_update_step` instead, a loop over variables that
        calls `assign` and `assign_add`.
    `Optimizer._get_variable_index` - the position of a variable's slots.
    The slots in `_SLOTS`, and `Nadam._u_product`, a scalar that each step multiplies.
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
"""The number of elements in a piece of an array, on a CPU."""

_MIN_PIECES = 4
"""The minimum number of pieces of all variables. With fewer, the additional calls cost more than the cache saves."""

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
"""The slots of each class: its attributes with lists of state variables, one per weight. An optimizer has only the
slots that its arguments, such as `amsgrad`, need."""

DTYPES = (torch.float32, torch.float64)
"""The dtypes of arrays that can be updated in pieces. In half precision, PyTorch rounds the last elements of an array,
which do not fill a vector register, differently. Pieces would therefore differ from whole arrays.
"""

_STEPS = {"_parallel_update_step", "_backend_update_step", "update_step", "_apply_weight_decay"}


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether `optimizer` is one of Keras' element-wise optimizers, without replaced methods."""
    return type(optimizer) in _SLOTS and optimizer.__dict__.keys().isdisjoint(_STEPS)


def step_of(kind: type) -> str:
    """Return the name of the method with which an optimizer of this class computes an update."""
    return "_backend_update_step" if kind is keras.optimizers.Ftrl else "_parallel_update_step"


Factors = dict[int, Tensor]
"""Maps the `id` of a variable to a scalar tensor that multiplies or divides its gradient during the update."""


@torch.no_grad()
def update_in_pieces(
    optimizer: Optimizer,
    grads: Sequence[Tensor],
    variables: Sequence[Variable],
    learning_rate: Any,
    factors: Factors,
    divides: bool,
) -> None:
    """Update like Keras, but in pieces that fit into the CPU's cache, and with gradients scaled by `factors`."""
    kind = type(optimizer)
    step = getattr(kind, step_of(kind))
    columns = columns_of(optimizer, grads, variables, factors, divides)
    # On an accelerator, update whole arrays: pieces gain nothing there, and Keras' step over all variables makes fewer
    # calls.
    is_whole = columns.like.device.type != "cpu" or columns.num_elements < _MIN_PIECES * PIECE
    if is_whole or not columns.are_uniform or not _is_exact(kind):
        if factors:
            grads = [_scaled(grad, factors.get(id(variable)), divides) for grad, variable in zip(grads, variables)]
        step(optimizer, grads, variables, learning_rate)
        return
    # Reset Nadam's `_u_product` before each group of pieces, because each call of `step` multiplies this scalar.
    product: Any = getattr(optimizer, "_u_product", None)
    before = None if product is None else product.value.clone()
    for group in columns.groups():
        if before is not None:
            product.value.copy_(before)
        _update_piece(optimizer, step, learning_rate, *map(list, zip(*group)))


def pieces_are_faster(variables: Sequence[Variable]) -> bool:
    """Whether updating arrays in pieces that fit into the CPU's cache is faster than updating them whole."""
    values = values_of(variables)
    is_on_cpu = bool(values) and values[0].device.type == "cpu"
    return is_on_cpu and sum(value.numel() for value in values) >= _MIN_PIECES * PIECE


def _is_exact(kind: type) -> bool:
    # `pow`, in Ftrl, rounds the last elements of each thread's chunk differently, like half precision (see `DTYPES`).
    return kind is not keras.optimizers.Ftrl or torch.get_num_threads() == 1


def slot_names(optimizer: Optimizer) -> list[str]:
    """Return the names of the attributes (slots) in which this optimizer has state, such as `_momentums`."""
    return [name for name in _SLOTS[type(optimizer)] if getattr(optimizer, name, None)]


@dataclasses.dataclass
class Columns:
    """The tensors of an update as a table with one row per variable, and the factors that scale the gradients."""

    rows: list[tuple[Tensor, ...]]
    """For each variable: its weights, its gradient, and its state, such as a momentum."""

    factors: list[Tensor | None]
    """The factor of each gradient, or None."""

    divides: bool
    """Whether gradients are divided by their factors, instead of multiplied."""

    @property
    def like(self) -> Tensor:
        """A tensor with the dtype and device of all other tensors in the table, if `are_uniform`."""
        return self.rows[0][0]

    @property
    def num_elements(self) -> int:
        """The number of elements of all variables."""
        return sum([row[0].numel() for row in self.rows])

    @property
    def are_uniform(self) -> bool:
        """Whether all tensors are contiguous, on one CPU or GPU, either float32 or float64, and as large as weights."""
        dtype, device = self.like.dtype, self.like.device
        if dtype not in DTYPES or device.type not in ("cpu", "cuda"):
            return False
        for row in self.rows:
            for t in row:
                if not isinstance(t, torch.Tensor) or t.dtype != dtype or t.device != device:
                    return False
                if t.layout != torch.strided or not t.is_contiguous():
                    return False
            if row[1].numel() != row[0].numel():
                return False  # a gradient of another shape: Keras raises an error, and a kernel would crash
        return True

    def only(self, chosen: Sequence[bool]) -> Columns:
        """Return a table of the variables that have True in `chosen`."""
        kept = [i for i, is_chosen in enumerate(chosen) if is_chosen]
        return Columns([self.rows[i] for i in kept], [self.factors[i] for i in kept], self.divides)

    def pieces(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield a tuple (weights, gradient, state) per variable, or on a CPU, several tuples for a large variable."""
        for group in self.groups():
            yield from group

    def lists(self) -> Iterator[list[list[Tensor]]]:
        """Yield lists of weights, gradients and states: of all variables or, with factors, of each group of pieces."""
        groups = iter([self.rows]) if all(factor is None for factor in self.factors) else self.groups()
        for group in groups:
            yield [list(column) for column in zip(*group)]

    def groups(self) -> Iterator[list[tuple[Tensor, ...]]]:
        """Yield groups of pieces with at most `PIECE` elements in all, not counting small tensors."""
        group: list[tuple[Tensor, ...]] = []
        factors: list[Tensor | None] = []
        size = 0
        buffer = self._buffer()
        largest = PIECE if self.like.device.type == "cpu" else max(1, self.num_elements)
        for row, factor in zip(self.rows, self.factors):
            for piece in _pieces(row, largest):
                length = piece[0].numel()
                length = 0 if _is_small(piece[0]) else length
                if group and length and size + length > largest:
                    yield self._scaled(group, factors, buffer)
                    group, factors, size = [], [], 0
                group.append(piece)
                factors.append(factor)
                size += length
        if group:
            yield self._scaled(group, factors, buffer)

    def _scaled(
        self, group: list[tuple[Tensor, ...]], factors: list[Tensor | None], buffer: Tensor | None
    ) -> list[tuple[Tensor, ...]]:
        """Return the group with gradients multiplied or divided by factors. Large gradients use `buffer`."""
        chosen = [i for i, factor in enumerate(factors) if factor is not None]
        if not chosen:
            return group
        small = [i for i in chosen if buffer is None or _is_small(group[i][1])]
        run = torch._foreach_div if self.divides else torch._foreach_mul
        scaled = dict(zip(small, run([group[i][1] for i in small], [factors[i] for i in small]) if small else []))
        start = 0
        for i in chosen:
            if i not in scaled:
                grad = group[i][1]
                assert buffer is not None
                out = buffer[start : start + grad.numel()].view(grad.shape)
                scaled[i] = _scaled(grad, factors[i], self.divides, out)
                start += grad.numel()
        return [(row[0], scaled[i], *row[2:]) if i in scaled else row for i, row in enumerate(group)]

    def _buffer(self) -> Tensor | None:
        """Return memory for the scaled gradients of a group on a CPU, because a new allocation per group is slow."""
        if self.like.device.type != "cpu" or all(factor is None for factor in self.factors):
            return None
        if all(_is_small(row[0]) for row in self.rows):
            return None
        return torch.empty(min(PIECE, self.num_elements), dtype=self.like.dtype, device=self.like.device)


def _is_small(tensor: Tensor) -> bool:
    """Whether a tensor is so small that several such tensors should share one call."""
    return tensor.numel() <= PIECE // 32


def _pieces(row: tuple[Tensor, ...], length: int) -> Iterator[tuple[Tensor, ...]]:
    if row[0].numel() <= length:
        return iter([row])
    return zip(*[tensor.detach().view(-1).split(length) for tensor in row])


def _scaled(grad: Tensor, factor: Tensor | None, divides: bool, out: Tensor | None = None) -> Tensor:
    if factor is None:
        return grad
    return (torch.div if divides else torch.mul)(grad, factor, out=out)


def columns_of(
    optimizer: keras.optimizers.Optimizer,
    grads: Sequence[Tensor],
    variables: Sequence[Variable],
    factors: Factors,
    divides: bool,
) -> Columns:
    """Return the tensors of an update as a table."""
    positions = [optimizer._get_variable_index(variable) for variable in variables]
    slots = [values_of([getattr(optimizer, name)[i] for i in positions]) for name in slot_names(optimizer)]
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
    twin = object.__new__(type(optimizer))
    reads_values = step.__name__ == "_parallel_update_step"
    rows = [[_Value(t) for t in row] if reads_values else row for row in (weights, *slots)]
    positions = {id(weight): i for i, weight in enumerate(rows[0])}
    twin.__dict__.update(  # not `setattr`, because Keras tracks assigned attributes
        {
            **optimizer.__dict__,
            **dict(zip(slot_names(optimizer), rows[1:])),
            "_get_variable_index": lambda weight: positions[id(weight)],
            "assign": torch.Tensor.copy_,
            "assign_add": torch.Tensor.add_,
        }
    )
    step(twin, grads, rows[0], learning_rate)


class _Value:
    """Replaces a variable in a call of `_parallel_update_step`, which reads only its `value`."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
