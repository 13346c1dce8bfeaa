"""Batches that no number of replicas divides, with losses whose mean depends on the division."""

from __future__ import annotations

import functools

import keras
import numpy as np
from support import problem

import keras_shardopt as ks

NUM_ROWS = 61  # prime
BATCH_SIZE = 16  # the last batch has 13 rows


def data():
    x, y = problem.data(num_steps=4)
    return x[:NUM_ROWS], y[:NUM_ROWS]


def classes():
    x, y = data()
    return x, (y[:, 0] > 0).astype("int32")


def row_weights():
    # The last rows of each batch weigh far more than the first.
    return np.tile(np.linspace(0.1, 3.0, BATCH_SIZE, dtype="float32"), 4)[:NUM_ROWS]


class Masked(keras.layers.Layer):
    """Sequences of numbers, the negative ones masked out."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(1,), initializer="ones")

    def call(self, x):
        return x[..., None] * self.kernel

    def compute_mask(self, x, mask=None):
        return x > 0


def masked_model():
    return keras.Sequential([keras.Input((5,)), Masked(), keras.layers.Dense(1, kernel_initializer="ones")])


def sequences():
    x, _ = data()
    return x, np.tanh(x)[..., None]


@functools.cache
def penalties_are_means():
    """Whether Keras divides a penalty on activities by the number of rows; where not, parts of them mean nothing."""
    layer = keras.layers.Dense(1, kernel_initializer="ones", activity_regularizer="l2")
    layer(np.ones((2, 1)))
    return abs(float(keras.ops.convert_to_numpy(layer.losses[0])) - 0.01) < 1e-6


def two_outputs():
    penalty = "l2" if penalties_are_means() else None
    inputs = keras.Input((problem.NUM_FEATURES,))
    first = keras.layers.Dense(3, kernel_initializer="ones", name="first", activity_regularizer=penalty)(inputs)
    second = keras.layers.Dense(3, kernel_initializer="ones", kernel_regularizer="l2", name="second")(first)
    return keras.Model(inputs, [first, second])


def two_targets():
    x, y = data()
    return x, [y, y**2]


class AddsLoss(keras.layers.Layer):
    """Adds a mean over rows to the loss."""

    def call(self, x):
        self.add_loss(keras.ops.mean(keras.ops.square(x)))
        return x


def model_that_adds_a_loss():
    layers = [keras.Input((problem.NUM_FEATURES,)), keras.layers.Dense(3, kernel_initializer="ones"), AddsLoss()]
    return keras.Sequential(layers)


class TwoLosses(keras.Sequential):
    """Takes Keras' loss twice, and calls `fit` in its own way."""

    def fit(self, *args, **kwargs):
        return super().fit(*args, **kwargs)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        first = super().compute_loss(x, y, y_pred, sample_weight, training)
        return first + super().compute_loss(x, 2 * y, y_pred, sample_weight, training) / 2


def model_of_two_losses():
    dense = keras.layers.Dense(3, kernel_initializer="ones", kernel_regularizer="l2", bias_regularizer="l1")
    return TwoLosses([keras.Input((problem.NUM_FEATURES,)), dense])


MSE = keras.losses.MeanSquaredError
CASES = {
    "plain": {},
    "sample weights": {"weights": row_weights()},
    "divided by weights": {"weights": row_weights(), "loss": MSE(reduction="mean_with_sample_weight")},
    "sum": {"loss": MSE(reduction="sum"), "inner": lambda: keras.optimizers.SGD(1e-3, momentum=0.9)},
    "mask": {"make": masked_model, "data": sequences},
    "two outputs": {"make": two_outputs, "data": two_targets, "metrics": None, "weighted_metrics": None},
    "scalar loss": {"loss": lambda y, p: keras.ops.mean(keras.ops.square(y - p))},
    "added loss": {"make": model_that_adds_a_loss},
    "two losses": {"make": model_of_two_losses},
    "class weights": {
        "data": classes,
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
        "weighted_metrics": [],
        "fit": {"class_weight": {0: 0.1, 1: 2.0}},
    },
}


def compiled(
    make=problem.model,
    inner=problem.sgd_momentum,
    around=None,
    loss="mse",
    metrics=("mae",),
    weighted_metrics=("mse",),
    **_,
):
    """The model of a case."""
    keras.utils.set_random_seed(3)
    model = make()
    optimizer = ks.CrossShard(inner(), **(around or {}))
    listed = {"metrics": metrics, "weighted_metrics": weighted_metrics}
    model.compile(optimizer, loss, **{name: None if of is None else list(of) for name, of in listed.items()})
    return model


def rows_of(case, rows=slice(None)):
    """`(x, y)` or `(x, y, sample_weight)` of a case, some rows of it."""
    x, y = case.get("data", data)()
    whole = (x, y, case["weights"]) if "weights" in case else (x, y)
    return keras.tree.map_structure(lambda array: array[rows], whole)


def run(case, num_replicas, prepared=True, rows=slice(None), validates=True, **more):
    """The weights and the history of a case, on that many replicas of this process."""
    case = {**CASES.get(case, {}), **more}
    x, y, *weights = rows_of(case, rows)
    with ks.data_parallel(num_replicas, prepare=False) as replicas:
        model = compiled(**case)
        if prepared:
            assert ks.prepare(ks.prepare(model)) is model
    given = {"batch_size": BATCH_SIZE, "shuffle": False, "verbose": 0, **case.get("fit", {})}
    if validates:
        given["validation_data"] = (x, y, *weights)
    history = model.fit(x, y, sample_weight=weights[0] if weights else None, **given)
    replicas.close()
    return model.get_weights(), history.history


class Batches(keras.utils.PyDataset):
    """This rank's rows of each batch; where it has none, the batch is left out."""

    def __init__(self, case, rows):
        super().__init__()
        self._batches = [rows_of(case, chosen) for chosen in rows if len(chosen)]

    def __len__(self):
        return len(self._batches)

    def __getitem__(self, index):
        return self._batches[index]


def batches():
    return [np.arange(start, min(start + BATCH_SIZE, NUM_ROWS)) for start in range(0, NUM_ROWS, BATCH_SIZE)]


def divided(rank, size):
    """A part of each batch for each rank, the first one larger than the others."""
    return [
        np.split(batch, [len(batch) - 3 * (size - 1) + 3 * r for r in range(size - 1)])[rank] for batch in batches()
    ]


def some_without(rank, size):
    """As `divided`, but of the last two batches rank 0 has all rows, so that the others have fewer batches."""
    return [
        part if i < 2 else batch if rank == 0 else batch[:0]
        for i, (batch, part) in enumerate(zip(batches(), divided(rank, size)))
    ]


def all_on_the_last(rank, size):
    return [batch if rank == size - 1 else batch[:0] for batch in batches()]


def start_of(case):
    return CASES[case].get("make", problem.model)().get_weights()


def assert_same(got, expected, start=None):
    assert problem.relative_difference(got[0], expected[0], start) <= problem.TOLERANCE
    assert got[1].keys() == expected[1].keys()
    for name, values in expected[1].items():
        np.testing.assert_allclose(got[1][name], values, rtol=1e-6, err_msg=name)


def clipped_in_numpy(divide, limit, num_rows=NUM_ROWS):
    """The weights of the case "plain" where each replica's gradient is clipped, in float64, and how often it was.

    `divide(batch)` gives the row numbers of each replica.
    """
    x, y = (array.astype("float64") for array in data())
    kernel1, bias1, kernel2, bias2 = weights = [w.astype("float64") for w in problem.start_weights()]
    velocities = [np.zeros_like(w) for w in weights]
    num_clipped = 0
    for start in range(0, num_rows, BATCH_SIZE):
        batch = np.arange(start, min(start + BATCH_SIZE, num_rows))
        mean = [np.zeros_like(w) for w in weights]
        for rows in divide(batch):
            hidden = np.tanh(x[rows] @ kernel1 + bias1)
            error = 2 * (hidden @ kernel2 + bias2 - y[rows]) / y[rows].size
            back = (error @ kernel2.T) * (1 - hidden**2)
            grads = [x[rows].T @ back, back.sum(0), hidden.T @ error, error.sum(0)]
            norm = np.sqrt(sum(np.sum(g**2) for g in grads))
            num_clipped += norm > limit
            for total, grad in zip(mean, grads):
                total += grad * min(1, limit / norm) * len(rows) / len(batch)
        for weight, velocity, grad in zip(weights, velocities, mean):
            velocity *= 0.9
            velocity -= 0.1 * grad
            weight += velocity
    return weights, num_clipped
