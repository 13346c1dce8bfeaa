"""One replica's input to the reduction of an update: its gradients, and how replicas combine them.

How the gradients arrive (`GradientState`) determines the collective, and the factor of its result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

from keras import ops

from keras_shardopt.backends.communicator import Communicator, GradientState
from keras_shardopt.numerics import (
    Gradients,
    ReduceOp,
    Tensor,
    Variable,
    map_values,
    overwrites_variable,
)
from keras_shardopt.update.context import StageContext
from keras_shardopt.update.step import Step

Kind = Literal["mean", "sum"]


@dataclasses.dataclass(frozen=True)
class Reduction:
    """One replica's input to the reduction of one update."""

    grads: Gradients
    """One tensor or None per variable: this replica's gradient. For float8 scales, it is instead the next value."""

    variables: Sequence[Variable]
    """The variables of `grads`, the same on all processes. These include variables of frozen layers."""

    places: Sequence[int]
    """The positions of `variables` among the optimizer's trainable variables."""

    op: ReduceOp = "mean"
    factor: float = 1.0
    """The factor by which the sums or means are multiplied."""

    is_whole: bool = True
    """Whether the gradients are those of this replica's mean loss, not yet divided by the number of replicas."""

    trained: Sequence[bool] | None = None
    """For each variable, whether this replica trains it; None if it trains all."""

    trains: bool = True
    """False if this replica has ended its training."""

    nonfinite_flags: Callable[[str], Tensor] | None = None
    """Takes a dtype. Returns numbers that mark nonfinite gradients, to reduce with the gradients. None: no check."""

    found: Tensor | None = None
    """The index, from 1, of this replica's first nonfinite gradient; 0 if all are finite, None if unchecked."""

    loss_scale: Any = None
    """The factor by which the loss was multiplied; None for the optimizer's `loss_scale`."""

    own: Sequence[Tensor] | None = None
    """Values kept from the last reduction, such as compression errors; None to read them from variables."""

    @classmethod
    def of(cls, step: Step, context: StageContext, members: Communicator, kind: Kind) -> Reduction:
        """Create the input of a reduction from a step with this replica's gradients, already times `Step.weight`."""
        grads, variables = step.grads, step.variables
        trainable, trained = context.trainable, None
        positions = context.positions(variables)
        if not members.is_spmd and len(positions) < len(trainable):
            # Every rank sends an entry for every variable, even a frozen one, so the reduction detects when ranks train
            # different variables.
            given = dict(zip(positions, grads))
            variables, positions = list(trainable), range(len(trainable))
            grads, trained = [given.get(i) for i in positions], [i in given for i in positions]
        assert step.gradient_state is not None
        return cls(
            grads,
            variables,
            positions,
            op=collective(step.gradient_state, kind),
            factor=rescaling(kind, members) if step.gradient_state is GradientState.LOCAL_PRESCALED else 1,
            is_whole=step.gradient_state is GradientState.LOCAL,
            trained=trained,
            found=step.found_inf,
            loss_scale=step.loss_scale,
            own=step.own,
        )

    @classmethod
    def of_nothing(cls, variables: Sequence[Variable], num_flags: int = 0) -> Reduction:
        """Create the input of a reduction, with zeros as gradients, for a replica that has ended its training."""
        flags = (lambda dtype: ops.zeros((num_flags,), dtype)) if num_flags else None
        nothing = [None] * len(variables)
        return cls(nothing, variables, range(len(variables)), "sum", trains=False, nonfinite_flags=flags)

    def replace(self, **changes: Any) -> Reduction:
        """Return a copy with other values in some fields."""
        return dataclasses.replace(self, **changes)

    def unpack(self, grads: Gradients, variables: Sequence[Variable]) -> Gradients:
        """Return the reduced gradients of `variables`, those of the step, from the `grads` of all variables."""
        if self.trained is None:
            return grads
        by_id = {id(variable): grad for variable, grad in zip(self.variables, grads)}
        return [by_id[id(variable)] for variable in variables]


def collective(gradient_state: GradientState, kind: Kind) -> ReduceOp:
    """Return the collective, "sum" or "mean", that reduces these gradients. `rescaling` returns a further factor."""
    # A prescaled gradient is already divided by the number of replicas, so the plain sum is the mean.
    return "mean" if gradient_state is GradientState.LOCAL and kind == "mean" else "sum"


def rescaling(kind: Kind, replicas: Communicator) -> float:
    """Return the factor that turns a sum of gradients divided by the replica count into a mean or sum (`kind`)."""
    # Gradients were divided by the number of all replicas, even if only a group is summed. So multiply by that number.
    return replicas.world.num_replicas / (1 if kind == "sum" else replicas.num_replicas)


def rescale_reduced(step: Step, kind: Kind, num_replicas: int) -> list[Tensor | None]:
    """Return gradients that arrive reduced, rescaled to their mean or sum (`kind`) without communication."""
    if step.gradient_state is GradientState.SUMMED:
        factor = 1 / num_replicas if kind == "mean" else 1
    else:
        factor = 1 if kind == "mean" else num_replicas
    return [g if g is None or overwrites_variable(v) else scaled(g, factor) for g, v in zip(step.grads, step.variables)]


def scaled(grad: Tensor, factor: float) -> Tensor:
    """Return a gradient times a number. A factor of 1 (one replica) returns the same object, without a copy."""
    return grad if factor == 1 else map_values(lambda value: ops.multiply(value, factor), grad)
