"""Reductions without an optimizer."""

import types

from keras_shardopt.backends.communicator import GradientState
from keras_shardopt.update import all_reduce, exchange
from keras_shardopt.update.reduction import Reduction, collective, rescale_reduced, rescaling
from keras_shardopt.update.step import Step
from keras_shardopt.update.transport import Transfer

_move = exchange.move


def global_gradients(grads, variables, replicas, kind="mean", gradient_state=None, trained=None):
    """The global gradients, of gradients that arrive in some state; None asks `replicas`."""
    state = replicas.gradient_state(grads, variables) if gradient_state is None else gradient_state
    step = Step(grads, variables, state)
    if not step.is_local:
        return rescale_reduced(step, kind, replicas.num_replicas)
    factor = rescaling(kind, replicas) if state is GradientState.LOCAL_PRESCALED else 1
    places = range(len(variables))
    reduction = Reduction(grads, variables, places, collective(state, kind), factor, trained=trained)
    return _move(reduction, Transfer(replicas), replicas).grads


def replacing(fault):
    """What stands for `exchange.move` so that `fault(grads, variables, members, kind, gradient_state)` reduces."""

    def move(reduction, transfer, members):
        if not reduction.trains:
            return _move(reduction, transfer, members)
        state = GradientState.LOCAL if reduction.is_whole else GradientState.LOCAL_PRESCALED
        is_sum = reduction.factor == members.world.num_replicas
        kind = reduction.op if reduction.is_whole else ("sum" if is_sum else "mean")
        return exchange.Moved(list(fault(reduction.grads, reduction.variables, members, kind, state)), None)

    return move


def plant(monkeypatch, fault):
    """Lets `fault(grads, variables, members, kind, gradient_state)` stand for each reduction of an `AllReduce`.

    Gradients that arrive reduced are not moved: for these `members` has their number alone.
    """

    def without_collective(step, kind, num_replicas):
        members = types.SimpleNamespace(num_replicas=num_replicas)
        members.world = members
        return list(fault(step.grads, step.variables, members, kind, step.gradient_state))

    monkeypatch.setattr(exchange, "move", replacing(fault))
    monkeypatch.setattr(all_reduce, "rescale_reduced", without_collective)
