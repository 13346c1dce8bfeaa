"""Four steps on four replicas with gradients of their own, of which one, in the second step, is not finite."""

from __future__ import annotations

import keras
import numpy as np

import keras_shardopt as ks

NUM_REPLICAS = 4
NUM_STEPS = 4
BAD_STEP = 1


def _unchanged(inner):
    return inner


def _scaled(inner):
    return ks.LossScaling(inner, "Backoff", {"scale_max": 64.0})


# What is put around the inner optimizer, and the arguments of `CrossShard`.
WAYS = {
    "each step": (_unchanged, {"on_nonfinite": "skip"}),
    "accumulating": (_unchanged, {"on_nonfinite": "skip", "gradient_accumulation_steps": 2}),
    "in groups": (_unchanged, {"on_nonfinite": "skip", "group_assignment": [[0, 2], [1, 3]]}),
    "clipped": (_unchanged, {"on_nonfinite": "skip", "replica_clipnorm": 1e6, "gradient_accumulation_steps": 2}),
    "loss scaling": (_scaled, {"on_nonfinite": "skip"}),
    "loss scaling, accumulating": (_scaled, {"on_nonfinite": "skip", "gradient_accumulation_steps": 2}),
    "loss scaling alone, accumulating": (_scaled, {"gradient_accumulation_steps": 2}),
}


def weights():
    return [keras.Variable([1.0, 2.0, 3.0], name="first"), keras.Variable([[4.0, 5.0]], name="second")]


def gradients(bad=None, replica=0):
    """`[step][variable][replica]`; in the bad one, of the second variable."""
    random = np.random.default_rng(2)
    steps = [
        [random.normal(size=(NUM_REPLICAS, *shape)).astype("float32") for shape in ((3,), (1, 2))]
        for _ in range(NUM_STEPS)
    ]
    if bad is not None:
        steps[BAD_STEP][1][replica, 0, 1] = bad
    return steps


def expected(way, replica=0):
    """The weights of a replica in float64, without the window that holds the bad step; and how many updates."""
    arguments = WAYS[way][1]
    size = arguments.get("gradient_accumulation_steps", 1)
    group = next((g for g in arguments.get("group_assignment", []) if replica in g), range(NUM_REPLICAS))
    found = [np.array([1.0, 2.0, 3.0]), np.array([[4.0, 5.0]])]
    velocities = [np.zeros_like(w) for w in found]
    starts = [start for start in range(0, NUM_STEPS, size) if not start <= BAD_STEP < start + size]
    steps = gradients()
    for start in starts:
        for i, (weight, velocity) in enumerate(zip(found, velocities)):
            window = [steps[step][i][r].astype("float64") for step in range(start, start + size) for r in group]
            velocity *= 0.9
            velocity -= 0.1 * np.mean(window, axis=0)
            weight += velocity
    return found, len(starts)


def number(value):
    return float(np.asarray(keras.ops.convert_to_numpy(value)))


def check(way, optimizer, mine, bad_replica, replica=0):
    """Whether the weights `mine` of a replica, and the optimizer, are as if the bad window had not been."""
    reference, num_updates = expected(way, replica)
    for weight, other in zip(mine, reference):
        np.testing.assert_allclose(weight, other, rtol=1e-6)
    assert number(optimizer.iterations) == num_updates
    assert number(optimizer.skipped_steps) == 1
    if "on_nonfinite" in WAYS[way][1]:
        assert optimizer.last_nonfinite == (bad_replica, "second")
    else:
        assert optimizer.last_nonfinite is None
    if way.startswith("loss scaling"):
        assert number(optimizer.loss_scale) == 32.0
