"""One small training problem, on which replicas and one process with the whole batch must agree.

It runs on every backend. Rows differ in scale, so that each replica's part of a batch has a gradient of its own.
"""

from __future__ import annotations

import contextlib
import functools
from unittest import mock

import keras
import numpy as np

from keras_shardopt.fit.compiled import preparing_compiled

NUM_FEATURES = 5
NUM_OUTPUTS = 3
BATCH_SIZE = 16
NUM_STEPS = 20

# Largest weight difference over largest weight movement. float32 has 24 bits, 6e-8; twenty updates and sums in
# another order leave some ten times that.
TOLERANCE = 1e-6


def data(num_steps=NUM_STEPS):
    random = np.random.default_rng(7)
    rows = num_steps * BATCH_SIZE
    x = random.normal(size=(rows, NUM_FEATURES)).astype("float32")
    x *= np.tile(np.linspace(0.3, 1.8, BATCH_SIZE, dtype="float32"), num_steps)[:, None]
    y = np.tanh(x @ random.normal(size=(NUM_FEATURES, NUM_OUTPUTS))).astype("float32")
    return x, y


def rows_of_replica(x, replica, num_replicas):
    """The rows that a replica sees: the same part of every batch, as TensorFlow and JAX divide it."""
    batches = x.reshape(-1, num_replicas, BATCH_SIZE // num_replicas, *x.shape[1:])
    return batches[:, replica].reshape(-1, *x.shape[1:])


def alone():
    """A block for models that this process trains without the others, inside of `data_parallel()` too."""
    return preparing_compiled(False, True)


def rows_here(replicas):
    """Of `data()` the rows that this process of a `data_parallel` scope feeds, and how many of a batch they are."""
    number = replicas.num_processes
    x, y = (rows_of_replica(array, replicas.process_id, number) for array in data())
    return x, y, BATCH_SIZE // number


def start_weights():
    random = np.random.default_rng(11)
    shapes = [(NUM_FEATURES, 7), (7,), (7, NUM_OUTPUTS), (NUM_OUTPUTS,)]
    return [(random.normal(size=shape) * 0.4).astype("float32") for shape in shapes]


def model(constraint=None):
    layers = [
        keras.Input((NUM_FEATURES,)),
        keras.layers.Dense(7, activation="tanh", name="hidden", kernel_constraint=constraint),
        keras.layers.Dense(NUM_OUTPUTS, name="out"),
    ]
    built = keras.Sequential(layers, name="mlp")
    built.set_weights(start_weights())
    return built


class InOneLayer(keras.Model):
    """The model as one layer: `torch.compile` takes seconds for each layer of Keras."""

    def __init__(self):
        super().__init__()
        self.arrays = [self.add_weight(shape=w.shape, name=f"w{i}") for i, w in enumerate(start_weights())]
        self.built = True
        self.set_weights(start_weights())

    def call(self, x):
        kernel1, bias1, kernel2, bias2 = self.arrays
        hidden = keras.ops.tanh(keras.ops.matmul(x, kernel1) + bias1)
        return keras.ops.matmul(hidden, kernel2) + bias2


@contextlib.contextmanager
def without_generated_code():
    """A block in which `torch.compile` traces as usual and runs what it has traced as it is."""
    import torch

    with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend="eager")):
        yield
    torch._dynamo.reset()


def relative_difference(weights, reference, start=None):
    """The largest weight difference, in units of the largest movement of the reference from its start."""
    start = start_weights() if start is None else start
    movement = max(float(np.max(np.abs(r - s))) for r, s in zip(reference, start))
    difference = max(float(np.max(np.abs(w - r))) for w, r in zip(weights, reference))
    assert movement > 1e-3, "the reference did not train"
    return difference / movement


def sgd_momentum():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def keras_optimizers():
    """Every optimizer that Keras ships, by name: a function that makes one."""
    from keras import optimizers as o

    made = {
        "SGD": lambda **k: o.SGD(0.1, **k),
        "SGD momentum": lambda **k: o.SGD(0.1, momentum=0.9, **k),
        "SGD nesterov": lambda **k: o.SGD(0.1, momentum=0.9, nesterov=True, **k),
        "Adadelta": lambda **k: o.Adadelta(1.0, **k),
        "Adafactor": lambda **k: o.Adafactor(0.01, **k),
        "Adagrad": lambda **k: o.Adagrad(0.05, **k),
        "Adam": lambda **k: o.Adam(0.01, **k),
        "Adam amsgrad": lambda **k: o.Adam(0.01, amsgrad=True, **k),
        "Adamax": lambda **k: o.Adamax(0.01, **k),
        "AdamW": lambda **k: o.AdamW(0.01, weight_decay=0.1, **k),
        "Ftrl": lambda **k: o.Ftrl(0.05, **k),
        "Lamb": lambda **k: o.Lamb(0.01, **k),
        "Lion": lambda **k: o.Lion(0.01, **k),
        "Nadam": lambda **k: o.Nadam(0.01, **k),
        "RMSprop": lambda **k: o.RMSprop(0.01, **k),
        "RMSprop momentum": lambda **k: o.RMSprop(0.01, momentum=0.5, centered=True, **k),
    }
    for name in ("Muon", "ScheduleFreeAdamW"):  # not in the oldest Keras that is supported
        if hasattr(o, name):
            made[name] = lambda name=name, **k: getattr(o, name)(0.01, **k)
    return made


def tolerance(optimizer):
    """`TOLERANCE` for an optimizer of `keras_optimizers()`."""
    # ScheduleFreeAdamW divides differences of nearly equal weights: its last digits are the noisiest.
    return 3e-6 if optimizer == "ScheduleFreeAdamW" else TOLERANCE


def trained_in_numpy(update=None, rate=0.1, momentum=0.9):
    """`start_weights()` after `fit`, in float64, without Keras.

    `update(step, weights, grads)` changes the weights in place; None is SGD with momentum.
    """
    x, y = (array.astype("float64") for array in data())
    weights = [w.astype("float64") for w in start_weights()]
    velocities = [np.zeros_like(w) for w in weights]
    for start in range(0, len(x), BATCH_SIZE):
        grads = gradients_in_numpy(weights, x[start : start + BATCH_SIZE], y[start : start + BATCH_SIZE])
        if update is not None:
            update(start // BATCH_SIZE, weights, grads)
            continue
        for weight, velocity, grad in zip(weights, velocities, grads):
            velocity *= momentum
            velocity -= rate * grad
            weight += velocity
    return weights


def gradients_in_numpy(weights, inputs, targets):
    """Of the mean squared error, by hand."""
    kernel1, bias1, kernel2, bias2 = weights
    hidden = np.tanh(inputs @ kernel1 + bias1)
    error = 2 * (hidden @ kernel2 + bias2 - targets) / targets.size
    back = (error @ kernel2.T) * (1 - hidden**2)
    return [inputs.T @ back, back.sum(0), hidden.T @ error, error.sum(0)]


# Between the norms of the replicas' gradients in most steps: some are clipped and some are not.
CLIPNORM = 0.5


def replicas_in_numpy(
    num_replicas, clipnorm=None, groups=None, reduction="mean", rate=0.1, momentum=0.9, num_steps=NUM_STEPS
):
    """Each replica's weights after `fit`, in float64, without Keras: gradients clipped, then averaged in groups."""
    groups = [list(range(num_replicas))] if groups is None else groups
    x, y = (array.astype("float64") for array in data(num_steps))
    x, y = ([rows_of_replica(array, r, num_replicas) for r in range(num_replicas)] for array in (x, y))
    weights = [[w.astype("float64") for w in start_weights()] for _ in range(num_replicas)]
    velocities = [[np.zeros_like(w) for w in mine] for mine in weights]
    num_rows = BATCH_SIZE // num_replicas
    for start in range(0, len(x[0]), num_rows):
        rows = slice(start, start + num_rows)
        local = [gradients_in_numpy(weights[r], x[r][rows], y[r][rows]) for r in range(num_replicas)]
        for grads in local:
            norm = np.sqrt(sum(np.sum(g**2) for g in grads))
            if clipnorm is not None and norm > clipnorm:
                grads[:] = [g * clipnorm / norm for g in grads]
        for group in groups:
            together = [getattr(np, reduction)([local[r][i] for r in group], axis=0) for i in range(4)]
            for r in group:
                for weight, velocity, grad in zip(weights[r], velocities[r], together):
                    velocity *= momentum
                    velocity -= rate * grad
                    weight += velocity
    return weights


def moves(replicas, mine):
    """What one of four replicas gets from each move of its `mine`, `arange(4) + 10 * id`."""
    group = replicas.split([[2, 0], [1, 3]])
    found = {
        "sum": replicas.all_reduce([mine], "sum"),
        "mean": replicas.all_reduce([mine], "mean"),
        "max": replicas.all_reduce([mine], "max"),
        "group sum": group.all_reduce([mine], "sum"),
        "group mean": group.all_reduce([mine], "mean"),
        "group max": group.all_reduce([mine], "max"),
        "scatter": replicas.reduce_scatter([mine], "mean"),
        "group scatter": group.reduce_scatter([mine], "sum"),
        "gather": replicas.all_gather([mine[:1]]),
        "group gather": group.all_gather([mine[:1]]),
        "broadcast": replicas.broadcast([mine], root=2),
        "group broadcast": group.broadcast([mine], root=1),
    }
    return {name: value for name, (value,) in found.items()}


def check_moves(found):
    """Whether four replicas with `arange(4) + 10 * id` each got what the moves promise, in groups [0, 2], [1, 3]."""
    mine = [np.arange(4.0) + 10 * replica for replica in range(4)]
    group = {0: [0, 2], 2: [0, 2], 3: [1, 3], 1: [1, 3]}
    for r in range(4):
        peers = [mine[p] for p in group[r]]
        half = group[r].index(r)
        expected = {
            "sum": sum(mine),
            "mean": sum(mine) / 4,
            "max": mine[3],
            "group sum": sum(peers),
            "group mean": sum(peers) / 2,
            "group max": max(peers, key=max),
            "scatter": sum(mine)[r : r + 1] / 4,
            "group scatter": sum(peers)[2 * half : 2 * half + 2],
            "gather": np.array([m[0] for m in mine]),
            "group gather": np.array([p[0] for p in peers]),
            "broadcast": mine[2],
            "group broadcast": peers[1],
        }
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(found[name][r], value, err_msg=f"{name} on replica {r}")
