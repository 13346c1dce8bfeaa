"""Training in windows of micro-batches, and the same training on batches that are that many times larger."""

from __future__ import annotations

import functools

import keras
import numpy as np
from support import problem

import keras_shardopt as ks

NUM_MICRO_STEPS = 12
NUMBERS = [(1, 2), (2, 3), (4, 2)]  # of replicas, and of micro-batches
CLIPNORM = 0.3  # between the norms of the replicas' gradients of a window


def rows():
    return problem.data(NUM_MICRO_STEPS)


def words():
    x, y = problem.data(NUM_MICRO_STEPS)
    return (np.arange(3 * len(x)).reshape(-1, 3) * 7 % 11).astype("int32"), y


def embedding_model():
    keras.utils.set_random_seed(3)
    layers = [keras.Input((3,), dtype="int32"), keras.layers.Embedding(11, 4), keras.layers.Flatten()]
    return keras.Sequential([*layers, keras.layers.Dense(problem.NUM_OUTPUTS)])


def everything():
    """What counts updates: bias correction, schedule, decay, moving average."""
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    # With an epsilon that does not blow up the last digits of small gradients.
    return keras.optimizers.AdamW(rate, weight_decay=0.01, use_ema=True, ema_momentum=0.5, epsilon=0.01)


def scaled():
    return ks.LossScaling(problem.sgd_momentum(), "Backoff", {"scale_max": 64.0, "step_window": 2})


def clipped():
    return ks.GradientClipping(keras.optimizers.SGD(1.0, momentum=0.9), 0.15)


# The inner optimizer; where they are not those of the small problem, the model and the data.
CASES = {
    "momentum": (problem.sgd_momentum, problem.model, rows),
    "clipped": (clipped, problem.model, rows),
    # Not clipped: TensorFlow counts a row that is listed twice as two, in the norm of the larger batch.
    "embedding": (problem.sgd_momentum, embedding_model, words),
    "loss scaling": (scaled, problem.model, rows),
    "updates counted": (everything, problem.model, rows),
}
OTHERS = [name for name in CASES if name != "momentum"]


def compiled(case, optimizer, **arguments):
    model = CASES[case][1]()
    model.compile(optimizer, "mse", **arguments)
    return model


@functools.cache
def start_of(case):
    return CASES[case][1]().get_weights()


@functools.cache
def on_larger_batches(case, num_steps):
    """The weights and optimizer state of one process."""
    make, _, data = CASES[case]
    model = compiled(case, make())
    model.fit(*data(), batch_size=num_steps * problem.BATCH_SIZE, shuffle=False, verbose=0)
    return model.get_weights(), [np.asarray(keras.ops.convert_to_numpy(v)) for v in model.optimizer.variables]


def clipped_in_numpy(num_replicas, num_steps):
    """The weights in float64, where each replica's gradient of a window is clipped by itself."""
    x, y = (array.astype("float64") for array in rows())
    x, y = ([problem.rows_of_replica(a, r, num_replicas) for r in range(num_replicas)] for a in (x, y))
    weights = [w.astype("float64") for w in problem.start_weights()]
    velocities = [np.zeros_like(w) for w in weights]
    num_rows = num_steps * problem.BATCH_SIZE // num_replicas
    for start in range(0, len(x[0]), num_rows):
        window = slice(start, start + num_rows)
        local = [problem.gradients_in_numpy(weights, x[r][window], y[r][window]) for r in range(num_replicas)]
        norms = [np.sqrt(sum(np.sum(g**2) for g in grads)) for grads in local]
        factors = [min(1.0, CLIPNORM / norm) for norm in norms]
        for i, (weight, velocity) in enumerate(zip(weights, velocities)):
            velocity *= 0.9
            velocity -= 0.1 * np.mean([f * grads[i] for f, grads in zip(factors, local)], axis=0)
            weight += velocity
    return weights


def check(case, num_steps, weights, state):
    expected, expected_state = on_larger_batches(case, num_steps)
    assert problem.relative_difference(weights, expected, start_of(case)) <= problem.TOLERANCE
    if state is not None:
        # Counter, rate, slots, averages; what follows is the window's.
        assert int(state[0]) == int(expected_state[0]) == NUM_MICRO_STEPS // num_steps
        for mine, theirs in zip(state, expected_state):
            largest = max(1e-3, float(np.max(np.abs(theirs), initial=0.0)))
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-6 * largest)
