"""`GradientNoise` against its formulas in NumPy, with uneven rows, accumulation, loss scaling and half precision.

Also after an unequal start, in which the gradients of one replica do not count.
"""

import keras
import numpy as np
import pytest
from support.suites import some
from support.worlds import FakeWorld

import keras_shardopt as ks
from keras_shardopt.backends.active import placement
from keras_shardopt.update.trainer_context import BatchShare, batch_shared

NUM_REPLICAS, NUM_UPDATES, MOMENTUM = 4, 8, 0.75
SHAPES = [(4, 3), (3,)]
EVEN, UNEVEN = [4, 4, 4, 4], [9, 4, 2, 1]
BAD_UPDATE = 4
UNEQUAL_START = [4 / 3, 4 / 3, 4 / 3, 0.0]  # what each replica's first gradients count


def scaled(inner):
    return ks.LossScaling(inner, "Backoff", {"scale_max": 64.0, "step_window": 2})


CASES = {
    "even rows": {},
    "uneven rows": {"rows": "uneven"},
    "in windows": {"rows": "uneven", "window": 2},
    "scaled": {"rows": "uneven", "inner": scaled},
    "skips": {"rows": "uneven", "is_bad": True, "on_nonfinite": "skip"},
    "scaled, skips": {"is_bad": True, "inner": scaled},
    "scaled in windows, skips": {"rows": "uneven", "window": 2, "is_bad": True, "inner": scaled},
    "in half precision": {"rows": "uneven", "compression": "bfloat16"},
    "unequal start": {"starts": UNEQUAL_START},
}


def gradients(num_steps, is_bad):
    """`[micro-batch][replica][variable]`. Half precision holds them and their means."""
    random = np.random.default_rng(2)
    found = [
        [[(random.integers(-7, 8, shape) / 16 + 1).astype("float32") for shape in SHAPES] for _ in range(NUM_REPLICAS)]
        for _ in range(num_steps)
    ]
    if is_bad:
        found[BAD_UPDATE * num_steps // NUM_UPDATES][1][0][2, 1] = np.nan
    return found


def rows_of(step, window, kind):
    """Of each replica; in every second update uneven ones."""
    return UNEVEN if kind == "uneven" and step // window % 2 else EVEN


def in_numpy(window, kind, is_bad, starts_equal):
    """The noise scale in units of a part, and as a number of rows."""
    steps = [[[g.astype("float64") for g in mine] for mine in step] for step in gradients(NUM_UPDATES * window, is_bad)]
    averages = np.zeros(3)
    for update in range(NUM_UPDATES):
        first = update * window
        if rows_of(first, window, kind) != EVEN or (is_bad and update == BAD_UPDATE):
            continue
        if update == 0 and not starts_equal:
            continue
        windows = [[steps[s][r] for s in range(first, first + window)] for r in range(NUM_REPLICAS)]
        own = [np.mean([np.concatenate([g.ravel() for g in grads]) for grads in mine], axis=0) for mine in windows]
        of_mean = np.sum(np.mean(own, axis=0) ** 2)
        mean = np.mean([np.sum(each**2) for each in own])
        signal = (NUM_REPLICAS * of_mean - mean) / (NUM_REPLICAS - 1)
        noise = NUM_REPLICAS / (NUM_REPLICAS - 1) * (mean - of_mean)
        now = np.array([signal, noise, noise * EVEN[0] * window])
        averages = MOMENTUM * averages + (1 - MOMENTUM) * now
    return averages[1] / averages[0], averages[2] / averages[0]


# Replicas in threads: updates are not traced there.
@pytest.mark.backends("torch")
@pytest.mark.filterwarnings("ignore")  # of numbers that half precision has not
@pytest.mark.parametrize("name", some(CASES, lambda name: name != "even rows"))
def test_the_noise_scale_is_that_of_the_formulas(monkeypatch, name):
    case = CASES[name]
    window, kind, is_bad = case.get("window", 1), case.get("rows", "even"), case.get("is_bad", False)
    world = FakeWorld(NUM_REPLICAS, is_spmd=False).hold(monkeypatch)
    arguments = {key: case[key] for key in ("on_nonfinite", "compression") if key in case}
    inner, starts = case.get("inner", lambda sgd: sgd), case.get("starts", [1.0] * NUM_REPLICAS)
    monkeypatch.setattr(placement, "broadcast_state", lambda _, state, replicas: starts[replicas.replica_id])

    def work(replicas):
        mine = [keras.Variable(np.zeros(shape, "float32")) for shape in SHAPES]
        noise = ks.GradientNoise(MOMENTUM)
        steps = window if window > 1 else None
        optimizer = ks.CrossShard(
            inner(keras.optimizers.SGD(0.1)), gradient_accumulation_steps=steps, stages=[noise], **arguments
        )
        optimizer.build(mine)
        for step, everyones in enumerate(gradients(NUM_UPDATES * window, is_bad)):
            rows = rows_of(step, window, kind)
            scale = float(optimizer.scale_loss(keras.ops.ones(())))
            own = [keras.ops.convert_to_tensor(g * np.float32(scale)) for g in everyones[replicas.replica_id]]
            with batch_shared(BatchShare(rows[replicas.replica_id], sum(rows), replicas)):
                optimizer.apply(own, mine)
        return noise.noise_scale, noise.in_rows, int(optimizer.skipped_steps), int(optimizer.iterations)

    for *found, skipped, iterations in world.run(work):
        np.testing.assert_allclose(found, in_numpy(window, kind, is_bad, "starts" not in case), rtol=1e-5)
        assert (skipped, iterations) == (is_bad, NUM_UPDATES - is_bad)
