"""What is promised, once more and as plain as its formulas: arithmetic that shares nothing with the package.

What `CrossShard`'s docstring says, for all replicas at once, in NumPy and float64; and the learning-rate policies in
Python floats and integers of any size.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np


@dataclasses.dataclass
class Outcome:
    """What one replica has in the end."""

    weights: list
    iterations: int = 0
    skipped_steps: int = 0
    last_nonfinite: tuple | None = None
    """Replica and position of the variable."""

    bad_updates: list = dataclasses.field(default_factory=list)
    """Which updates had a gradient that was not finite."""


def trained(
    start,
    gradients,
    shares,
    inner,
    first_weights=None,
    reduction="mean",
    groups=None,
    num_steps=1,
    clipnorm=None,
    transform=None,
    on_nonfinite="ignore",
    names_replicas=True,
    inner_skips=None,
):
    """Each replica's `Outcome`.

    Args:
        start: the weights.
        gradients: `[micro-batch][replica][variable]`, each of the replica's own mean loss; None for none.
        shares: `[micro-batch][replica]`, rows in units of an equal part of the batch.
        inner: a function that makes an inner optimizer, with `update(weights, grads)`.
        first_weights: by what each replica's very first gradient counts more or less, and not at all with 0.
        num_steps: how many micro-batches make an update.
        transform: of an array.
        names_replicas: whether gradients arrive before they are reduced, so that it is known whose they were.
        inner_skips: None; "together" or "in groups" if the inner optimizer leaves out updates by itself.
    """
    num_replicas = len(shares[0])
    groups = [list(range(num_replicas))] if groups is None else groups
    outcomes = [Outcome([np.asarray(w, "float64") for w in start]) for _ in range(num_replicas)]
    inners = [inner() for _ in range(num_replicas)]
    for update in range(len(gradients) // num_steps):
        window = range(update * num_steps, (update + 1) * num_steps)
        first = [1.0] * num_replicas if update or first_weights is None else first_weights
        sent, found = [], []
        for r in range(num_replicas):
            # Within a window they count where they are added up; else after they were clipped.
            factors = [first[r] if s == window[0] and num_steps > 1 else 1.0 for s in window]
            share = np.mean([shares[s][r] for s in window])
            mine = [_mean([gradients[s][r][i] for s in window], [shares[s][r] for s in window], factors)
                    for i in range(len(start))]  # fmt: skip
            own, position = _own(mine, share, clipnorm, transform)
            factor = first[r] if num_steps == 1 else 1.0
            sent.append([None if g is None else g * factor if factor else np.zeros_like(g) for g in own])
            found.append(position if share and factor else None)
        reduced = [_reduced([sent[r] for r in group], reduction) for group in groups]
        is_bad = [_first_bad(grads) is not None for grads in reduced]
        for group, grads, group_is_bad in zip(groups, reduced, is_bad):
            for r in group:
                mine = outcomes[r]
                if any(is_bad):
                    mine.bad_updates.append(update)
                    if on_nonfinite != "ignore":
                        who = next((q, i) for q, i in enumerate(found) if i is not None)
                        mine.last_nonfinite = who if names_replicas else (None, min(i for i in found if i is not None))
                    if inner_skips == "together" or (inner_skips is None and on_nonfinite != "ignore"):
                        mine.skipped_steps += 1
                        continue
                    if inner_skips == "in groups" and group_is_bad:
                        continue
                inners[r].update(mine.weights, grads)
                mine.iterations += 1
    return outcomes


def _mean(grads, shares, factors):
    if all(g is None for g in grads):
        return None
    shape = next(g.shape for g in grads if g is not None)
    counted = [g * s * f for g, s, f in zip(grads, shares, factors) if g is not None and s and f]
    return sum(counted, np.zeros(shape)) / len(grads)


def _own(grads, share, clipnorm, transform):
    """Transformed and clipped in units of the replica's own mean loss; and the first that is not finite before that."""
    if not share:
        return grads, None
    own = [None if g is None else g / share for g in grads]
    if transform is not None:
        own = [None if g is None else transform(g) for g in own]
    position = _first_bad(own)
    if clipnorm is not None:
        own, _ = clipped(own, clipnorm)
    return [None if g is None else g * share for g in own], position


def clipped(grads, limit):
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in grads if g is not None))
    return [None if g is None else g * np.minimum(1.0, limit / norm) for g in grads], norm


def _reduced(members, reduction):
    columns = [[g for g in column if g is not None] for column in zip(*members)]
    divisor = len(members) if reduction == "mean" else 1
    return [sum(column) / divisor if column else None for column in columns]


def _first_bad(grads):
    return next((i for i, g in enumerate(grads) if g is not None and not np.all(np.isfinite(g))), None)


class Momentum:
    """SGD, perhaps clipped by the global norm, and scaled as `LARC` does."""

    def __init__(self, rate=0.5, momentum=0.9, clip_gradients=None, larc_eta=None):
        self.rate, self.momentum, self.clip_gradients, self.larc_eta = rate, momentum, clip_gradients, larc_eta
        self.velocities = {}

    def update(self, weights, grads):
        if self.clip_gradients is not None:
            grads, _ = clipped(grads, self.clip_gradients)
        for i, grad in enumerate(grads):
            if grad is None:
                continue
            if self.larc_eta is not None:
                ratio = self.larc_eta * np.linalg.norm(weights[i]) / (self.rate * (np.linalg.norm(grad) + 1e-7))
                grad = grad * np.minimum(1.0, ratio)
            self.velocities[i] = self.momentum * self.velocities.get(i, 0.0) - self.rate * grad
            weights[i] = weights[i] + self.velocities[i]


class Adam:
    """Keras' Adam with `clipnorm`, decoupled decay and a rate that halves with each update."""

    def __init__(self, rate=1.0, decay=0.1, clipnorm=None, epsilon=0.05):
        self.rate, self.decay, self.clipnorm, self.epsilon = rate, decay, clipnorm, epsilon
        self.updates, self.means, self.squares = 0, {}, {}

    def update(self, weights, grads):
        rate = self.rate * 0.5**self.updates
        self.updates += 1
        step = rate * np.sqrt(1 - 0.75**self.updates) / (1 - 0.75**self.updates)
        for i, grad in enumerate(grads):
            if grad is None:
                continue
            if self.clipnorm is not None:
                (grad,), _ = clipped([grad], self.clipnorm)
            self.means[i] = 0.75 * self.means.get(i, 0.0) + 0.25 * grad
            self.squares[i] = 0.75 * self.squares.get(i, 0.0) + 0.25 * grad**2
            weights[i] = weights[i] * (1 - self.decay * rate)
            weights[i] = weights[i] - step * self.means[i] / (np.sqrt(self.squares[i]) + self.epsilon)


# -- learning rates --------------------------------------------------------------------------------------------------


def _warmed_up(step, learning_rate, warmup_steps):
    return learning_rate * step / warmup_steps if step < warmup_steps else learning_rate


def _elapsed(step, decay_steps, begin_decay_at):
    return min(max(step - begin_decay_at, 0), decay_steps)


def fixed_lr(step, learning_rate):
    return learning_rate


def piecewise_constant(step, learning_rate, boundaries, decay_rates, steps_per_epoch=None):
    if steps_per_epoch is not None:
        boundaries = [boundary * steps_per_epoch for boundary in boundaries]
    return learning_rate * [1.0, *decay_rates][sum(boundary < step for boundary in boundaries)]


def exp_decay(step, learning_rate, decay_steps, decay_rate, use_staircase_decay, begin_decay_at=0, min_lr=0.0):
    since = max(step - begin_decay_at, 0)
    exponent = since // decay_steps if use_staircase_decay else since / decay_steps
    return max(min_lr, learning_rate * decay_rate**exponent)


def poly_decay(step, learning_rate, decay_steps, power=1.0, begin_decay_at=0, min_lr=0.0, warmup_steps=0):
    rate = _warmed_up(step, learning_rate, warmup_steps)
    if step < begin_decay_at:
        return rate
    left = decay_steps - _elapsed(step, decay_steps, begin_decay_at)
    return (rate - min_lr) * (left / decay_steps) ** power + min_lr


def cosine_decay(step, learning_rate, decay_steps, power=1.0, begin_decay_at=0, min_lr=0.0, warmup_steps=0):
    rate = _warmed_up(step, learning_rate, warmup_steps)
    cosine = math.cos(math.pi * _elapsed(step, decay_steps, begin_decay_at) / decay_steps)
    return rate * ((1 - min_lr) * (1 + cosine) / 2 + min_lr)


def inv_poly_decay(step, learning_rate, decay_steps, min_lr, power=1.0):
    end = min(max(min_lr, 1e-8), learning_rate)
    slope = ((learning_rate / end) ** (1 / power) - 1) / decay_steps
    return learning_rate / (1 + slope * step) ** power


def transformer_policy(step, learning_rate, d_model, warmup_steps, max_lr=None, coefficient=1.0):
    update = step + 1
    rate = learning_rate * coefficient * d_model**-0.5 * min(update * warmup_steps**-1.5, update**-0.5)
    return rate if max_lr is None else min(rate, max_lr)


POLICIES = {
    "FixedLR": fixed_lr,
    "PiecewiseConstant": piecewise_constant,
    "ExpDecay": exp_decay,
    "PolyDecay": poly_decay,
    "CosineDecay": cosine_decay,
    "InvPolyDecay": inv_poly_decay,
    "TransformerPolicy": transformer_policy,
}
