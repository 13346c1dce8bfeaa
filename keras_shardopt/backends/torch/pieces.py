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

from keras_shardopt.numerics import Tensor, Variable

PIECE = 2**18
"""How many elements of each array are worked on at a time, on a CPU."""

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

_DTYPES = (torch.float32, torch.float64)
"""Of half precision the end of an array, which fills no vector register, is rounded otherwise than the rest: pieces
and whole arrays have not the same bits."""

_STEPS = {"_parallel_update_step", "_backend_update_step", "update_step"}


def is_elementwise(optimizer: Any) -> bool:
    """Whether an optimizer is known to update each element by itself."""
    return type(optimizer) in _SLOTS and optimizer.__dict__.keys().isdisjoint(_STEPS)


def step_of(kind: type) -> str:
    """The name of the method that is the arithmetic of such an optimizer's step."""
    return "_backend_update_step" if kind is keras.optimizers.Ftrl else "_parallel_update_step"


@torch.no_grad()
def update_in_pieces(
    optimizer: Any, grads: Sequence[Tensor], variables: Sequence[Variable], learning_rate: Any
) -> None:
    """Stands in for the step of an optimizer that `is_elementwise`."""
    kind = type(optimizer)
    step = getattr(kind, step_of(kind))
    columns = columns_of(optimizer, slot_names(optimizer), grads, variables)
    # Elsewhere than on a CPU pieces gain nothing, and Keras' own pass over all variables makes the fewest calls.
    is_whole = columns[0][0].device.type != "cpu" or sum(column[0].numel() for column in columns) <= PIECE
    if is_whole or not are_alike(columns) or not _is_exact(kind):
        step(optimizer, grads, variables, learning_rate)
        return
    # The number that belongs to no variable, and is multiplied once.
    product: Any = getattr(optimizer, "_u_product", None)
    before = None if product is None else product.value.clone()
    for group in _groups(columns):
        if before is not None:
            product.value.copy_(before)
        _update_piece(optimizer, step, learning_rate, *map(list, zip(*group)))


def _is_exact(kind: type) -> bool:
    # Powers are rounded like half precision, at the end of each thread's part of an array.
    return kind is not keras.optimizers.Ftrl or torch.get_num_threads() == 1


def slot_names(optimizer: Any) -> list[str]:
    """Which slots this one has."""
    return [name for name in _SLOTS[type(optimizer)] if getattr(optimizer, name, None)]


def columns_of(
    optimizer: Any, names: Sequence[str], grads: Sequence[Tensor], variables: Sequence[Variable]
) -> list[tuple[Tensor, ...]]:
    """For each variable its weights, its gradient and its slots."""
    places = [optimizer._get_variable_index(variable) for variable in variables]
    slots = [[getattr(optimizer, name)[i].value for i in places] for name in names]
    grads = [g.contiguous() if torch.is_tensor(g) and not g.is_sparse else g for g in grads]
    return list(zip([variable.value for variable in variables], grads, *slots))


def are_alike(columns: Sequence[tuple[Tensor, ...]]) -> bool:
    """Whether all are float32, or all float64, on one CPU or GPU, and lie in memory as they are counted."""
    dtype, device = columns[0][0].dtype, columns[0][0].device
    return (
        all(
            torch.is_tensor(t)
            and t.dtype == dtype
            and t.device == device
            and t.layout == torch.strided
            and t.is_contiguous()
            for column in columns
            for t in column
        )
        and dtype in _DTYPES
        and device.type in ("cpu", "cuda")
    )


def _update_piece(
    optimizer: Any, step: Any, learning_rate: Any, weights: list[Tensor], grads: list[Tensor], *slots: list[Tensor]
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


def _groups(columns: Sequence[tuple[Tensor, ...]]) -> Iterator[list[tuple[Tensor, ...]]]:
    """Flat pieces of the tensors, along with those of the others in the column: of large ones one, of small several."""
    group: list[tuple[Tensor, ...]] = []
    size = 0
    for piece in pieces(columns):
        if group and size + piece[0].numel() > PIECE:
            yield group
            group, size = [], 0
        group.append(piece)
        size += piece[0].numel()
    if group:
        yield group


def pieces(columns: Sequence[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
    """Flat pieces of the tensors of each column; on a GPU the whole tensors."""
    for column in columns:
        size = PIECE if column[0].device.type == "cpu" else max(1, column[0].numel())
        yield from zip(*[tensor.detach().view(-1).split(size) for tensor in column])
