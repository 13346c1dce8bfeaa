"""After `prepare(model)` any division of the batch trains like one process with the whole batch."""

import functools

import keras
import numpy as np
import pytest
from support import problem

import keras_shardopt as ks

pytestmark = pytest.mark.backends("tensorflow", "jax")

NUM_ROWS = 61  # prime, so that nothing divides
BATCH_SIZE = 16  # and the last batch, of 13 rows, does not divide either


def data():
    x, y = problem.data(num_steps=4)
    return x[:NUM_ROWS], y[:NUM_ROWS]


def weights_of_rows():
    # Unequal on the replicas: those of a batch's last rows are far larger.
    return np.tile(np.linspace(0.1, 3.0, BATCH_SIZE, dtype="float32"), 4)[:NUM_ROWS]


def fitted(num_replicas, optimizer=None, prepared=True, fit=None, make=problem.model, rows=None, **compiled):
    """The weights and the history after `fit` on that many replicas."""
    x, y = rows or data()
    keras.utils.set_random_seed(3)
    with ks.data_parallel(num_replicas) as replicas:
        model = make()
        metrics = {"metrics": ["mae"], "weighted_metrics": ["mse"]}
        model.compile(optimizer or ks.CrossShard(problem.sgd_momentum()), **{"loss": "mse", **metrics, **compiled})
        if prepared:
            assert ks.prepare(ks.prepare(model)) is model
    history = model.fit(
        x, y, **{"batch_size": BATCH_SIZE, "shuffle": False, "verbose": 0, "validation_data": (x, y), **(fit or {})}
    )
    replicas.close()
    return model.get_weights(), history.history


def assert_same(got, expected, start=None):
    assert problem.relative_difference(got[0], expected[0], start) <= problem.TOLERANCE
    assert got[1].keys() == expected[1].keys()
    for name, values in expected[1].items():
        np.testing.assert_allclose(got[1][name], values, rtol=1e-6, err_msg=name)


class Masked(keras.layers.Layer):
    """Sequences of sums, those of negative inputs masked out."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(1,), initializer="ones")

    def call(self, x):
        return x[..., None] * self.kernel

    def compute_mask(self, x, mask=None):
        return x > 0


def masked_model():
    return keras.Sequential([keras.Input((5,)), Masked(), keras.layers.Dense(1, kernel_initializer="ones")])


def masked_data():
    x, _ = data()
    return x, np.tanh(x)[..., None]


def two_outputs():
    inputs = keras.Input((problem.NUM_FEATURES,))
    first = keras.layers.Dense(3, kernel_initializer="ones", name="first", activity_regularizer="l2")(inputs)
    second = keras.layers.Dense(3, kernel_initializer="ones", kernel_regularizer="l2", name="second")(first)
    return keras.Model(inputs, [first, second])


CASES = {
    "plain": {},
    "sample weights": {"fit": {"sample_weight": weights_of_rows()}},
    "divided by weights": {
        "fit": {"sample_weight": weights_of_rows()},
        "loss": keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
    },
    "sum": {"loss": keras.losses.MeanSquaredError(reduction="sum"), "optimizer": lambda: keras.optimizers.SGD(1e-3)},
    "mask": {"make": masked_model, "rows": masked_data},
    "two outputs": {"make": two_outputs, "rows": lambda: (data()[0], [data()[1], data()[1] ** 2]), "metrics": None,
                    "weighted_metrics": None},
    "scalar loss": {"loss": lambda y, p: keras.ops.mean(keras.ops.square(y - p))},
    "classes": {"fit": {"class_weight": {0: 0.1, 1: 2.0}}},
}


def run(case, num_replicas, **more):
    arguments = {**CASES[case], **more}
    rows = arguments.pop("rows", data)()
    if case == "classes":
        rows = rows[0], (rows[1][:, 0] > 0).astype("int32")
        arguments["loss"] = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        arguments["metrics"] = ["accuracy"]
        arguments["weighted_metrics"] = []
    inner = arguments.pop("optimizer", problem.sgd_momentum)()
    around = arguments.pop("around", {})
    return fitted(num_replicas, ks.CrossShard(inner, **around), rows=rows, **arguments)


@functools.cache
def alone(case):
    return run(case, 1)


@pytest.mark.parametrize("num_replicas", [4])
@pytest.mark.parametrize("case", CASES)
def test_update_and_metrics_are_those_of_one_process(case, num_replicas):
    assert_same(run(case, num_replicas), alone(case), CASES[case].get("make", problem.model)().get_weights())


@pytest.mark.backends("jax")
@pytest.mark.parametrize("case", [case for case in CASES if case not in ("scalar loss", "two outputs")])
def test_so_they_are_with_gradients_of_each_replica(case):
    # A clip that never bites: forward and backward pass run in a shard_map, on batches with rows to fill them up.
    got = run(case, 4, around={"replica_clipnorm": 1e9})
    assert_same(got, alone(case), CASES[case].get("make", problem.model)().get_weights())


@pytest.mark.backends("jax")
@pytest.mark.parametrize("case", ["scalar loss", "two outputs"])
def test_what_would_count_rows_that_fill_up_a_batch_is_refused(case):
    around = {"replica_clipnorm": 1e9}
    with pytest.raises(ValueError, match="13 rows on 4 replicas"):
        run(case, 4, around=around)
    x, y = CASES[case].get("rows", data)()
    even = {"rows": lambda: keras.tree.map_structure(lambda a: a[:48], (x, y))}
    got = run(case, 4, around=around, **even)
    assert_same(got, run(case, 1, **even), CASES[case].get("make", problem.model)().get_weights())


@pytest.mark.parametrize("num_replicas", [2])
def test_without_prepare_an_uneven_batch_is_an_error(num_replicas):
    """On TensorFlow the first batch may be even, and the last one is a mean of means then; see the README."""
    with pytest.raises(Exception, match="divi|shape"):
        fitted(num_replicas, prepared=False, fit={"batch_size": 13})


def test_a_batch_with_fewer_rows_than_replicas():
    few = {"rows": lambda: keras.tree.map_structure(lambda a: a[:18], data())}  # 16 and 2 rows on 4 replicas
    assert_same(run("plain", 4, **few), run("plain", 1, **few))


# The clipping of each replica's gradient, in NumPy, for even and uneven batches.


def clipped_in_numpy(num_replicas, limit, num_rows):
    x, y = (array[:num_rows].astype("float64") for array in data())
    kernel1, bias1, kernel2, bias2 = weights = [w.astype("float64") for w in problem.start_weights()]
    velocities = [np.zeros_like(w) for w in weights]
    num_clipped = 0
    for start in range(0, num_rows, BATCH_SIZE):
        batch = np.arange(start, min(start + BATCH_SIZE, num_rows))
        total = [np.zeros_like(w) for w in weights]
        size = -(-len(batch) // num_replicas)
        for first in range(0, len(batch), size):
            rows = batch[first : first + size]
            hidden = np.tanh(x[rows] @ kernel1 + bias1)
            error = 2 * (hidden @ kernel2 + bias2 - y[rows]) / y[rows].size
            back = (error @ kernel2.T) * (1 - hidden**2)
            grads = [x[rows].T @ back, back.sum(0), hidden.T @ error, error.sum(0)]
            norm = np.sqrt(sum(np.sum(g**2) for g in grads))
            num_clipped += norm > limit
            for sum_, grad in zip(total, grads):
                sum_ += grad * min(1, limit / norm) * len(rows) / len(batch)
        for weight, velocity, grad in zip(weights, velocities, total):
            velocity *= 0.9
            velocity -= 0.1 * grad
            weight += velocity
    return weights, num_clipped


@pytest.mark.parametrize("num_rows", [48, NUM_ROWS])
def test_replica_clipnorm_is_that_of_numpy(num_rows):
    expected, num_clipped = clipped_in_numpy(4, 0.5, num_rows)
    assert 2 <= num_clipped <= 14, "the limit must bite on some replicas only"
    rows = {"rows": lambda: keras.tree.map_structure(lambda a: a[:num_rows], data())}
    weights, _ = run("plain", 4, around={"replica_clipnorm": 0.5}, **rows)
    assert problem.relative_difference(weights, expected) <= problem.TOLERANCE


class WithState(keras.Model):
    """A model whose training does what a `shard_map` around it can get wrong: dropout, batch statistics."""

    def __init__(self):
        super().__init__()
        self.normalize = keras.layers.BatchNormalization(momentum=0.5)
        self.drop = keras.layers.Dropout(0.5, seed=5)
        self.out = keras.layers.Dense(problem.NUM_OUTPUTS)

    def call(self, x, training=False):
        return self.out(self.drop(self.normalize(x, training=training), training=training))


@pytest.mark.backends("jax")
def test_state_of_layers_in_a_shard_map():
    x, y = data()
    with ks.data_parallel(4):
        model = WithState()
        model.compile(ks.CrossShard(problem.sgd_momentum(), replica_clipnorm=1e9), "mse", steps_per_execution=2)
        ks.prepare(model)
    model.fit(x[:32], y[:32], batch_size=16, shuffle=False, verbose=0)
    batches = x[:32].astype("float64").reshape(2, 4, 4, -1)
    mean = np.zeros(problem.NUM_FEATURES)
    for batch in batches:  # each replica normalises with its rows; the moving mean is the mean of theirs
        mean = 0.5 * mean + 0.5 * batch.mean(axis=1).mean(axis=0)
    np.testing.assert_allclose(model.normalize.moving_mean, mean, rtol=1e-5)
    seed = keras.ops.convert_to_numpy(model.drop.seed_generator.state)
    assert seed[0] == 5 and seed[1] == 2  # one draw for each batch, and the seed itself as it was


def test_what_cannot_be_prepared_says_so():
    with pytest.raises(TypeError, match="`model` must be a `keras.Model`"):
        ks.prepare("model")
    model = problem.model()
    with pytest.raises(ValueError, match="compiled with a `CrossShard`"):
        ks.prepare(model)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="compiled with a `CrossShard`"):
        ks.prepare(model)


@pytest.mark.backends("jax")
def test_a_train_step_of_ones_own_cannot_show_gradients_of_each_replica():
    class Own(keras.Sequential):
        def train_step(self, state, data):
            return super().train_step(state, data)

    with pytest.raises(ValueError, match="`train_step` of your own"):
        fitted(
            2,
            ks.CrossShard(problem.sgd_momentum(), replica_clipnorm=1.0),
            make=lambda: Own(problem.model().layers),
        )


def test_one_replica_is_left_alone():
    expected = fitted(1, prepared=False)
    got = fitted(1)
    assert got[1] == expected[1]
    for a, b in zip(got[0], expected[0]):
        np.testing.assert_array_equal(a, b)
