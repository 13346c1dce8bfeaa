"""The learning-rate policies in Python floats and integers of any size, as plain as their formulas."""

import math


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
