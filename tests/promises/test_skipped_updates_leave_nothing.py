"""A skipped update leaves nothing behind: statistics, seeds and counters are those of a run without the bad batch."""

import contextlib
import copy
import pickle

import keras
import numpy as np
import pytest
from conftest import BACKEND
from support import launch, problem, suites

import keras_shardopt as ks
from keras_shardopt.backends.active import placement

# Dynamo looks at every tensor's, and PyTorch warns of that.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

ROWS, FEATURES, OUTPUTS = 8, 4, 2
NUM_BATCHES = 8
SGD = keras.optimizers.SGD


class Counter(keras.layers.Layer):
    """Counts its calls in training, as a layer of a user's may."""

    def build(self, shape):
        self.count = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False, name="count")

    def call(self, x, training=False):
        if training:
            self.count.assign(self.count + 1)
        return x


def model():
    frozen = keras.layers.Dense(FEATURES, kernel_initializer="identity", name="frozen")
    frozen.trainable = False
    layers = [
        keras.Input((FEATURES,)),
        frozen,
        keras.layers.BatchNormalization(momentum=0.5, name="first"),
        keras.layers.Dropout(0.25, seed=3),
        Counter(),
        keras.layers.Dense(OUTPUTS, kernel_initializer="ones", name="out"),
        keras.layers.BatchNormalization(momentum=0.5, name="second"),
    ]
    return keras.Sequential(layers)


class InOneLayer(keras.layers.Layer):
    """What the model's layers have, in one: `torch.compile` takes seconds for each layer of Keras."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(FEATURES, OUTPUTS), initializer="ones", name="kernel")
        self.mean = self.add_weight(shape=(FEATURES,), initializer="zeros", trainable=False, name="moving_mean")
        self.count = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False, name="count")
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, x, training=False):
        if training:
            self.count.assign(self.count + 1)
            self.mean.assign(0.5 * (self.mean + keras.ops.mean(x, axis=0)))
            self.seeds.next()
        return keras.ops.matmul(x - self.mean, self.kernel)


def batches(num_batches=NUM_BATCHES):
    random = np.random.default_rng(5)
    x = random.normal(size=(num_batches, ROWS, FEATURES)).astype("float32")
    return x, np.tanh(x[..., :OUTPUTS])


def joined(arrays):
    return arrays.reshape(-1, *arrays.shape[2:])


def arrays_of(variables):
    return [(v.path, np.asarray(keras.ops.convert_to_numpy(v))) for v in variables]


def state(model):
    """What is the model's, with its path; not the loss scale, nor counts of skips."""
    slots = innermost(model.optimizer).variables
    return arrays_of([*model.weights, *seeds(model), *slots])


def seeds(model):
    return [v for v in model.non_trainable_variables if "seed" in v.path]


def innermost(optimizer):
    while (inner := getattr(optimizer, "inner", getattr(optimizer, "inner_optimizer", None))) is not None:
        optimizer = inner
    return optimizer


def assert_equal(found, expected):
    for (path, value), (_, reference) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(value, reference, err_msg=path)


def skipping(inner, **arguments):
    return ks.CrossShard(inner, on_nonfinite="skip", **arguments)


# Powers of two as scales, which leave every bit of a gradient. What does not skip can be compared with it.
WAYS = {
    "skip": skipping,
    "scaling": lambda inner, **a: ks.CrossShard(ks.LossScaling(inner, "Backoff", {"scale_max": 4.0}), **a),
    "scaling outermost": lambda inner: ks.LossScaling(inner, "Backoff", {"scale_max": 4.0}),
    "stock": lambda inner, **a: ks.CrossShard(keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0), **a),
    "skip and scaling": lambda inner, **a: skipping(ks.LossScaling(inner, "Backoff", {"scale_max": 4.0}), **a),
}


def trained(optimizer, x, y, in_one_layer=False, **arguments):
    built = keras.Sequential([keras.Input((FEATURES,)), InOneLayer()]) if in_one_layer else model()
    built.compile(optimizer, "mse", **arguments)
    built.fit(joined(x), joined(y), batch_size=ROWS, shuffle=False, verbose=0)
    return built


def inner():
    return SGD(0.125, momentum=0.5)


def without(arrays, left_out):
    return np.delete(arrays, left_out, axis=0)


def with_nan(x, batch):
    x = x.copy()
    x[batch, 3, 1] = np.nan
    return x


ARGUMENTS = {"": {}, "eager": {"run_eagerly": True}, "jit": {"jit_compile": True}, "steps": {"steps_per_execution": 2}}
FIT = [(way, "") for way in WAYS] + [("skip", name) for name in ARGUMENTS if name]
FIT = [(way, name) for way, name in FIT if not (BACKEND == "torch" and name == "steps")]
CASES = [(*case, 1) for case in FIT] + [(way, "", 4) for way in WAYS if way != "scaling outermost"]
CASES += [("skip", "eager", 4), ("skip", "jit", 4)]
if BACKEND == "tensorflow":  # each way and each argument once, and either window with each kind of way
    CASES = [("skip", "steps", 1), ("scaling", "", 1), ("scaling outermost", "", 1)]
    CASES += [("stock", "", 4), ("skip and scaling", "", 4), ("skip", "eager", 4), ("skip", "jit", 4)]
# Who skips is the same Python on all backends; what each compiles, and how many times, is its own.
CHOSEN = {
    "torch": [case for case in CASES if case[1] != "jit"],
    "jax": [("skip", "steps", 1), ("stock", "", 4)],
    "tensorflow": [("skip", "steps", 1), ("stock", "", 4)],
}


@pytest.fixture(autouse=True)
def quickly_compiled():
    with problem.without_generated_code() if BACKEND == "torch" else contextlib.nullcontext():
        yield


@pytest.mark.parametrize(("way", "arguments", "window"), suites.some(CASES, CHOSEN[BACKEND]))
def test_it_is_as_if_the_batch_had_never_come(way, arguments, window):
    """With windows of four, good batches of the window with the bad one count for nothing, too."""
    x, y = batches(NUM_BATCHES * (2 if window > 1 else 1))
    bad = 5
    options = {} if window == 1 else {"gradient_accumulation_steps": window}
    one = BACKEND == "torch" and (arguments, window) == ("jit", 1)
    found = trained(WAYS[way](inner(), **options), with_nan(x, bad), y, one, **ARGUMENTS[arguments])
    gone = np.arange(bad - bad % window, bad - bad % window + window)
    # Of the same kind, so that windows and scales are no matter; none of its batches is bad.
    same = {} if BACKEND == "torch" else ARGUMENTS[arguments]  # the same bits there, and compiling takes long
    expected = trained(WAYS[way](inner(), **options), without(x, gone), without(y, gone), one, **same)
    assert_equal(state(found), state(expected))
    found.jit_compile = False if BACKEND == "torch" else found.jit_compile
    assert np.isfinite(found.evaluate(joined(x), joined(y), verbose=0))
    values = {path.rpartition("/")[2]: value for path, value in state(found)}
    assert {"moving_mean", "count", "seed_generator_state", "kernel", "iteration"} <= set(values)
    # Good batches of a window that is not complete, or was not skipped, have left what they should.
    assert values["count"] == len(x) - len(gone) and values["seed_generator_state"][1] == len(x) - len(gone)


@pytest.mark.exhaustive("jax", "tensorflow")
def test_the_first_batch_too():
    """On TensorFlow the optimizer is built while the first step is traced, after its forward pass."""
    x, y = batches()
    found = trained(skipping(inner()), with_nan(x, 0), y)
    assert_equal(state(found), state(trained(skipping(inner()), x[1:], y[1:])))


@pytest.mark.parametrize("window", [1, 4] if BACKEND != "tensorflow" else [4])
@pytest.mark.exhaustive("jax", "tensorflow")
def test_raise_leaves_nothing_behind_either(window):
    x, y = batches()
    raising = ks.CrossShard(inner(), on_nonfinite="raise", gradient_accumulation_steps=window)
    found = model()
    found.compile(raising, "mse")
    arguments = {"batch_size": ROWS, "shuffle": False, "verbose": 0, "callbacks": [ks.callbacks.StopOnNonFinite()]}
    with pytest.raises(Exception, match="NaN or infinity"):
        found.fit(joined(with_nan(x, 5)), joined(y), **arguments)
    kept = 5 if window == 1 else 4
    expected = trained(skipping(inner(), gradient_accumulation_steps=window), x[:kept], y[:kept])
    assert_equal(state(found), state(expected))


RNNS = [(layer, window) for layer in ("LSTM", "Bidirectional") for window in (1, 4)]
if BACKEND == "tensorflow":
    RNNS = [("LSTM", 4), ("Bidirectional", 1)]


@pytest.mark.backends("tensorflow", "torch")  # on JAX Keras' `fit` carries no states from batch to batch
@pytest.mark.parametrize(("layer", "window"), suites.some(RNNS, [("LSTM", 4)], "tensorflow"))
@pytest.mark.exhaustive("tensorflow")
def test_the_states_of_a_stateful_rnn_too(layer, window):
    """They are variables of the layer that Keras tracks nowhere."""
    x, y = batches()
    x, y = x.reshape(NUM_BATCHES, ROWS, 2, FEATURES // 2), y[:, :, :1]
    gone = [1] if window == 1 else range(4)

    def run(x, y):
        # Without dropout Keras' own backward pass fails on PyTorch: the states are assigned after they are read.
        rnn = keras.layers.LSTM(3, stateful=True, recurrent_dropout=0.25, seed=2)
        rnn = keras.layers.Bidirectional(rnn) if layer == "Bidirectional" else rnn
        dense = keras.layers.Dense(1, kernel_initializer="ones")
        built = keras.Sequential([keras.Input((2, FEATURES // 2), batch_size=ROWS), rnn, dense])
        built.set_weights([0.125 * np.ones(w.shape) for w in built.get_weights()])
        built.compile(skipping(inner(), gradient_accumulation_steps=window), "mse", jit_compile=False)
        for rows, targets in zip(x, y):
            built.train_on_batch(rows, targets)
        return built, arrays_of([*keras.tree.flatten(rnn.states), *built.weights])

    found, states = run(with_nan(x, 1), y)
    assert int(keras.ops.convert_to_numpy(found.optimizer.skipped_steps)) == 1
    assert all(np.any(value) for _, value in states)
    assert_equal(states, run(without(x, gone), without(y, gone))[1])


@pytest.mark.exhaustive("jax", "tensorflow")
def test_what_others_set_between_updates_stays(tmp_path):
    x, y = batches()
    source = trained(inner(), x, y)
    source.save_weights(tmp_path / "source.weights.h5")
    found = trained(skipping(inner()), x[:2], y[:2])
    found.load_weights(tmp_path / "source.weights.h5", skip_mismatch=True)
    found.get_layer("second").moving_mean.assign([7.0, 8.0])
    found.train_on_batch(with_nan(x, 2)[2], y[2])
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(found.get_layer("second").moving_mean), [7.0, 8.0])
    first, other = (m.get_layer("first").moving_variance for m in (found, source))
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(first), keras.ops.convert_to_numpy(other))


@pytest.mark.backends("torch")
def test_what_others_set_between_a_forward_pass_and_its_update_stays():
    layer = keras.layers.BatchNormalization()
    built = keras.Sequential([keras.Input((2,)), layer])
    weights, optimizer = built.trainable_variables, skipping(inner())
    optimizer.build(weights)
    optimizer.apply([keras.ops.zeros(v.shape) for v in weights], weights)
    built(keras.ops.ones((4, 2)), training=True)
    layer.moving_mean.assign([7.0, 8.0])
    optimizer.apply([keras.ops.full(v.shape, np.nan) for v in weights], weights)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(layer.moving_mean), [7.0, 8.0])
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(layer.moving_variance), [1.0, 1.0])


def others(kind, start, folder):
    """A model that skips, made in some way out of one that does."""
    if kind == "loaded":
        start.save(folder / "model.keras")
        return keras.saving.load_model(folder / "model.keras", custom_objects={"Counter": Counter})
    if kind == "copied":
        with keras.utils.custom_object_scope({"Counter": Counter}):
            return pickle.loads(pickle.dumps(start))
    if kind == "cloned":
        made = keras.models.clone_model(start, clone_function=lambda layer: type(layer).from_config(layer.get_config()))
        made.set_weights(start.get_weights())
        made.compile(skipping(inner()), "mse")
        return made
    if kind == "compiled again":
        start.compile(copy.deepcopy(skipping(inner())), "mse")
    return start


KINDS = ["itself", "loaded", "copied", "cloned", "compiled again"]


@pytest.mark.parametrize("kind", suites.some(KINDS, ["compiled again"], "jax"))
@pytest.mark.exhaustive("tensorflow")
def test_it_holds_for_loaded_and_copied_and_compiled_again(tmp_path, kind):
    x, y = batches()
    good, bad = (x[0], y[0]), (with_nan(x, 1)[1], y[1])
    start = trained(inner() if kind == "compiled again" else skipping(inner()), x[:3], y[:3])
    built = others(kind, start, tmp_path)
    built.train_on_batch(*good)
    before = arrays_of(built.weights)
    built.train_on_batch(*bad)
    assert int(keras.ops.convert_to_numpy(built.optimizer.skipped_steps)) == 1
    assert_equal(arrays_of(built.weights), before)
    built.train_on_batch(*good)
    assert any(np.any(a != b) for (_, a), (_, b) in zip(arrays_of(built.weights), before))
    if kind == "compiled again":
        built.compile("sgd", "mse")  # which skips nothing
        built.train_on_batch(*bad)
        assert np.isnan(keras.ops.convert_to_numpy(built.get_layer("first").moving_mean)).any()


# -- several replicas ----------------------------------------------------------------------------------------------

CLIPPED = {"replica_clipnorm": 1e9}
REPLICATED = [("skip", False, 1, {}), ("stock", True, 1, {}), ("scaling", False, 4, {}), ("skip", True, 4, {})]
REPLICATED = REPLICATED[1:] if BACKEND == "tensorflow" else REPLICATED
REPLICATED += [("skip", True, 1, CLIPPED)] * (BACKEND == "jax")


def replicated(way, prepared, options, x, y):
    with ks.data_parallel(2, prepare=False) as replicas:
        built = model()
        built.compile(WAYS[way](inner(), **options), "mse")
        if prepared:
            ks.prepare(built)
        built.fit(joined(x), joined(y), batch_size=ROWS, shuffle=False, verbose=0)
        if prepared:  # in another order: the step was there before
            ks.prepare(built)
            again = (joined(array[:4]) for array in batches())
            built.fit(*again, batch_size=ROWS, shuffle=False, verbose=0)
    found = [(v.path, value) for v in built.variables for value in placement.replica_values(v)]
    replicas.close()
    return found


@pytest.mark.backends("tensorflow", "jax")
@pytest.mark.filterwarnings("ignore:.*accumulates gradients that are already averaged")
@pytest.mark.parametrize(
    ("way", "prepared", "window", "more"),
    suites.some(REPLICATED, lambda case: case == REPLICATED[-1]),
)
@pytest.mark.exhaustive("tensorflow")
def test_on_several_replicas(way, prepared, window, more):
    x, y = batches()
    gone = [1] if window == 1 else range(4)
    options = more if window == 1 else {**more, "gradient_accumulation_steps": window}
    found = replicated(way, prepared, options, with_nan(x, 1), y)
    order = [i for i in range(NUM_BATCHES) if i not in gone]
    assert_equal(found, replicated(way, prepared, options, x[order], y[order]))


# -- custom training loops --------------------------------------------------------------------------------------------


def step_of_ones_own(model, optimizer):
    def loss(x, y):
        return keras.ops.mean(keras.ops.square(model(x, training=True) - y))

    if BACKEND == "torch":

        def step(x, y):
            model.zero_grad()
            optimizer.scale_loss(loss(x, keras.ops.convert_to_tensor(y))).backward()
            optimizer.apply([v.value.grad for v in model.trainable_variables], model.trainable_variables)

        return step
    import tensorflow as tf

    def step(x, y):
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(loss(x, y))
        optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)

    return step


LOOPS = [(way, window, False) for way in ("skip", "stock") for window in (1, 4)]
LOOPS += [("scaling", 4, True)] * (BACKEND == "tensorflow")


@pytest.mark.backends("tensorflow", "torch")
@pytest.mark.parametrize(("way", "window", "traced"), LOOPS)
@pytest.mark.exhaustive("tensorflow")
def test_in_a_custom_training_loop(way, window, traced):
    x, y = batches()
    gone = range(1) if window == 1 else range(4)

    def run(x, y):
        built = model()
        built.optimizer = WAYS[way](inner(), **({} if window == 1 else {"gradient_accumulation_steps": window}))
        step = step_of_ones_own(built, built.optimizer)
        if traced:
            import tensorflow as tf

            step = tf.function(step)
        for rows, targets in zip(x, y):
            step(rows, targets)
        return state(built)

    assert_equal(run(with_nan(x, 0), y), run(without(x, gone), without(y, gone)))


@pytest.mark.parametrize("iter_size", suites.some([1, 4], [4], "jax"))
@pytest.mark.exhaustive("tensorflow")
def test_in_a_step_of_optimize_loss(iter_size):
    x, y = batches()
    gone = [1] if iter_size == 1 else range(4)

    def run(x, y):
        built = model()

        def loss(x, y):
            return keras.ops.mean(keras.ops.square(built(x, training=True) - y))

        step = ks.optimize_loss(loss, skipping(inner(), gradient_accumulation_steps=iter_size), model=built)
        for rows, targets in zip(x, y):
            step(rows, targets)
        return arrays_of([*built.weights, *seeds(built)])

    assert_equal(run(with_nan(x, 1), y), run(without(x, gone), without(y, gone)))


@pytest.mark.backends("jax")
def test_another_optimizer_than_that_of_compile_is_left_alone_with_a_warning():
    """As in Keras' GAN guide: which parts of the state its step updates is up to the model."""
    x, y = batches()
    built = model()
    built.second = skipping(inner())
    built.second.build(built.trainable_variables)
    built.compile("sgd", "mse")
    with pytest.warns(UserWarning, match=r"cannot be restored here.*other than `model.optimizer`"):
        built.fit(joined(x), joined(y), batch_size=ROWS, shuffle=False, verbose=0)


# -- statistics of parts of a batch --------------------------------------------------------------------------------

PARTS = [[4, 4, 4, 4], [1, 1, 1, 0]]


def statistics_of(rows):
    return rows.astype("float64").mean(axis=0), rows.astype("float64").var(axis=0)


@pytest.mark.backends("tensorflow", "jax")
@pytest.mark.parametrize("window", suites.some([None, 2], [None], "jax", "tensorflow"))
def test_statistics_of_uneven_parts_are_those_of_numpy_and_a_part_without_rows_skips_nothing(window):
    """A mean over no rows is a NaN, which no row of the batch is to blame for."""
    x = np.random.default_rng(1).normal(size=(19, FEATURES)).astype("float32")
    more = CLIPPED if BACKEND == "jax" else {}
    with ks.data_parallel(4) as replicas:
        normalize = keras.layers.BatchNormalization(momentum=0.5)
        built = keras.Sequential([keras.Input((FEATURES,)), normalize, keras.layers.Dense(1)])
        built.compile(skipping(inner(), gradient_accumulation_steps=window, **more), "mse")
        ks.prepare(built)
        built.fit(x, x[:, :1], batch_size=16, shuffle=False, verbose=0)
    assert int(keras.ops.convert_to_numpy(built.optimizer.skipped_steps)) == 0
    assert int(keras.ops.convert_to_numpy(built.optimizer.iterations)) == (2 if window is None else 1)
    expected = [np.zeros(FEATURES), np.ones(FEATURES)]
    start = 0
    for part in PARTS:
        changes = np.zeros((2, FEATURES))
        for num_rows in part:
            rows, start = x[start : start + num_rows], start + num_rows
            if num_rows:
                change = [0.5 * (new - old) for new, old in zip(statistics_of(rows), expected)]
                changes += np.array(change) * num_rows / sum(part)
        expected = [old + change for old, change in zip(expected, changes)]
    for i, variable in enumerate((normalize.moving_mean, normalize.moving_variance)):
        for value in placement.replica_values(variable):
            np.testing.assert_allclose(value, expected[i], rtol=1e-5, atol=1e-6)
    replicas.close()


FIRST_OF_ALL = """
import keras, numpy as np, keras_shardopt as ks
x = np.ones((8, 4), "float32")
x[0, 0] = np.nan
model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
model.compile(ks.CrossShard("sgd", on_nonfinite="skip"), "mse", jit_compile=False)
model.fit(x, np.ones((8, 1)), batch_size=8, verbose=0)
print("mean", float(np.sum(keras.ops.convert_to_numpy(model.layers[0].moving_mean))))
"""


@pytest.mark.xdist_group("processes")
@pytest.mark.backends("tensorflow", "torch")
def test_the_first_batch_of_a_program_is_put_back():
    """In a process of its own: assignments are noted from the first optimizer on that skips, whichever that is."""
    assert "mean 0.0" in launch.program(BACKEND, FIRST_OF_ALL, environment=launch.variables(BACKEND))
