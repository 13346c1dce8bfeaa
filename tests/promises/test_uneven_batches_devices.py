"""After `prepare(model)` any division of the batch trains like one process with the whole batch."""

import functools

import keras
import numpy as np
import pytest
from conftest import BACKEND
from promises.problems import apart, own_rows, uneven
from support import problem
from support.suites import some

import keras_shardopt as ks

pytestmark = pytest.mark.backends("tensorflow", "jax")


@functools.cache
def alone(case):
    return uneven.run(case, 1)


@pytest.mark.parametrize("num_replicas", [2])
@pytest.mark.parametrize("case", some(uneven.CASES, ["added loss", "mask"] if BACKEND == "tensorflow" else ["mask"]))
def test_update_and_metrics_are_those_of_one_process(case, num_replicas):
    uneven.assert_same(uneven.run(case, num_replicas), alone(case), uneven.start_of(case))


@pytest.mark.backends("jax")
@pytest.mark.parametrize("case", some(uneven.CASES, ["added loss"]))
def test_so_they_are_with_gradients_of_each_replica(case):
    # A clip that never bites: forward and backward pass run in a shard_map, in a branch for each number of rows.
    got = uneven.run(case, 4, around={"replica_clipnorm": 1e9})
    uneven.assert_same(got, alone(case), uneven.start_of(case))


def test_windows_of_each_replica_are_clipped_in_units_of_its_rows():
    around = {"replica_clipnorm": problem.CLIPNORM, "gradient_accumulation_steps": 2}
    weights, _ = uneven.run("plain", 3, around=around, validates=False)
    data = uneven.data()
    steps = [[[array[rows] for array in data] for rows in apart.parts_of(batch, 3)] for batch in uneven.batches()]
    expected, unclipped = (own_rows.of_parts(steps, 2, clipnorm)["weights"] for clipnorm in (problem.CLIPNORM, None))
    assert problem.relative_difference(weights, expected) <= 2 * problem.TOLERANCE  # two updates move little
    assert problem.relative_difference(unclipped, expected) > 1e-2


class Centered(keras.layers.Layer):
    """Subtracts the mean over the rows that it gets."""

    def call(self, x):
        return x - keras.ops.mean(x, axis=0, keepdims=True)


def over_rows():
    """A model with layers that reduce over rows, of which one has moving statistics; and a layer that drops out."""
    keras.utils.set_random_seed(5)
    layers = [keras.Input((problem.NUM_FEATURES,)), Centered(), keras.layers.Dense(6, activation="tanh")]
    layers += [keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dropout(0.2, seed=3)]
    return keras.Sequential([*layers, keras.layers.Dense(problem.NUM_OUTPUTS)])


OVER_ROWS = {
    "clipped": {"replica_clipnorm": 0.4},
    "accumulated": {"replica_clipnorm": 1e9, "gradient_accumulation_steps": 2},
    "transformed": {"replica_transform": lambda grads, variables: [2 * g for g in grads]},
    "virtual": {"virtual_replicas": 4},
}
OF_ROWS = 41  # batches of 13 rows, and 2: none for a third replica


@functools.cache
def gradients_over_rows():
    """Of one process: the values of the model's variables, which others are moving, and a compiled function."""
    import jax

    model = over_rows()
    weights, others = ([v.value for v in vs] for vs in (model.trainable_variables, model.non_trainable_variables))

    def loss(weights, others, x, y, each):
        outputs, others = model.stateless_call(weights, others, x, training=True)
        return keras.ops.mean(each[:, None] * keras.ops.square(outputs - y)), others

    is_moving = ["moving" in v.name for v in model.non_trainable_variables]
    return weights, others, is_moving, jax.jit(jax.grad(loss, has_aux=True))


def part_by_part(num_replicas, virtual_replicas=None, replica_clipnorm=1e9, replica_transform=None, **options):
    """What one process makes of the rows of each replica, one after another: weights, and moving statistics."""
    weights, others, is_moving, gradients = gradients_over_rows()
    (x, y), each = uneven.data(), uneven.row_weights()
    num_parts, window = virtual_replicas or num_replicas, options.get("gradient_accumulation_steps", 1)
    velocities, sums = [0.0] * len(weights), [0.0] * len(weights)

    for count, begin in enumerate(range(0, OF_ROWS, 13)):
        batch = np.arange(begin, min(begin + 13, OF_ROWS))
        size, moved = -(-len(batch) // num_parts), [0.0] * len(others)
        sums = [0.0] * len(weights) if count % window == 0 else sums
        parts = [batch[first : first + size] for first in range(0, len(batch), size)]
        for index, rows in enumerate(parts):
            offset = np.array([np.uint32((index * 0x9E3779B1) % 2**32), 0], "uint32")
            begun = [v if moving else v + offset for v, moving in zip(others, is_moving)]
            grads, after = gradients(weights, begun, x[rows], y[rows], each[rows])
            norm = np.sqrt(sum(np.sum(np.square(g, dtype="float64")) for g in grads))
            grads = [g * min(1.0, replica_clipnorm / norm) * (1.0 if replica_transform is None else 2.0) for g in grads]
            share = len(rows) / len(batch)
            sums = [total + share * np.asarray(g, "float64") / window for total, g in zip(sums, grads)]
            share = share if virtual_replicas is None else 1 / len(parts)
            after = [new if moving else new - offset for new, moving in zip(after, is_moving)]
            moved = [total + share * (new - old) for total, new, old in zip(moved, after, others)]
        others = [v + m if moving else new for v, m, new, moving in zip(others, moved, after, is_moving)]
        if count % window == window - 1:
            velocities = [0.9 * velocity - 0.1 * total for velocity, total in zip(velocities, sums)]
            weights = [(w + v).astype("float32") for w, v in zip(weights, velocities)]
    return weights, [v for v, moving in zip(others, is_moving) if moving]


@pytest.mark.backends("jax")
@pytest.mark.parametrize(
    ("name", "num_replicas"),
    some([(n, r) for n in OVER_ROWS for r in (2, 3, 4) if (n, r) != ("virtual", 3)], [("clipped", 3), ("virtual", 2)]),
)
def test_layers_that_reduce_over_rows_get_those_of_their_replica_alone(name, num_replicas):
    around = OVER_ROWS[name]
    weights, statistics = part_by_part(num_replicas, **around)
    with ks.data_parallel(num_replicas) as replicas:
        model = over_rows()
        start = [keras.ops.convert_to_numpy(v) for v in model.trainable_variables]
        model.compile(ks.CrossShard(problem.sgd_momentum(), **around), "mse", steps_per_execution=2)
    (x, y), each = uneven.data(), uneven.row_weights()
    each, batches = each[:OF_ROWS], {"batch_size": 13, "shuffle": False, "verbose": 0}
    model.fit(x[:OF_ROWS], y[:OF_ROWS], sample_weight=each, **batches)
    replicas.close()
    found = [keras.ops.convert_to_numpy(v) for v in model.trainable_variables]
    assert problem.relative_difference(found, weights, start) <= 5 * problem.TOLERANCE  # both are float32
    moving = [v for v in model.non_trainable_variables if "moving" in v.name]
    for variable, expected in zip(moving, statistics, strict=True):
        np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_replicas", [2])
def test_without_prepare_an_uneven_batch_is_an_error(num_replicas):
    """On TensorFlow the first batch may be even, and the last one is a mean of means then; see the README."""
    with pytest.raises(Exception, match="divi|shape"):
        uneven.run("plain", num_replicas, prepared=False, fit={"batch_size": 13})


@pytest.mark.exhaustive("jax", "tensorflow")
def test_a_batch_with_fewer_rows_than_replicas():
    few = slice(18)  # 16 and 2 rows
    uneven.assert_same(uneven.run("plain", 3, rows=few), uneven.run("plain", 1, rows=few))


@pytest.mark.backends("tensorflow")
def test_layers_that_cannot_do_without_rows_are_refused_with_the_fix():
    """With a `MirroredStrategy` of Keras' own it is an error of TensorFlow's."""
    with ks.data_parallel(4) as replicas:
        layers = [keras.Input((8, 8, 1)), keras.layers.Conv2D(4, 3), keras.layers.GlobalAveragePooling2D()]
        model = keras.Sequential([*layers, keras.layers.Dense(1)])
        model.compile(ks.CrossShard(problem.sgd_momentum()), "mse")
    x, y = np.ones((11, 8, 8, 1), "float32"), np.ones((11, 1), "float32")
    model.fit(x, y, batch_size=7, verbose=0)  # 2, 2, 2 and 1 rows; 1, 1, 1 and 1
    with pytest.raises(ValueError, match="must have a row for each replica .* fewer than 4 rows"):
        model.fit(x[:10], y[:10], batch_size=8, verbose=0)
    replicas.close()


@pytest.mark.backends("tensorflow")
def test_an_index_out_of_range_is_not_taken_for_a_replica_without_rows():
    with ks.data_parallel(2) as replicas:
        model = keras.Sequential([keras.Input((2,), dtype="int32"), keras.layers.Embedding(5, 3)])
        model.compile(ks.CrossShard(keras.optimizers.SGD(0.1)), "mse")
        with pytest.raises(Exception, match=r"is not in \[0, 5\)") as error:
            model.fit(np.full((4, 2), 7), np.zeros((4, 2, 3)), batch_size=4, verbose=0)
    assert "must have a row" not in str(error.value)
    replicas.close()


@pytest.mark.parametrize("case", some(["scalar loss", "two outputs", "added loss", "two losses"], ["two outputs"]))
def test_a_replica_without_rows_adds_nothing(case):
    few = slice(17)  # 16 rows and one
    got = uneven.run(case, 2, rows=few)
    uneven.assert_same(got, uneven.run(case, 1, rows=few), uneven.start_of(case))


@pytest.mark.backends("tensorflow")
def test_a_loss_added_where_replicas_cannot_be_told_apart_is_refused():
    class Late(keras.Sequential):
        def compute_loss(self, *args, **kwargs):
            self.add_loss(keras.ops.sum(self.weights[0]))
            return super().compute_loss(*args, **kwargs)

    with pytest.raises(ValueError, match="`add_loss` must be called in the forward pass"):
        uneven.run("plain", 2, make=lambda: Late(problem.model().layers))


@pytest.mark.parametrize("num_rows", some([48, uneven.NUM_ROWS], [uneven.NUM_ROWS]))
def test_replica_clipnorm_is_that_of_numpy(num_rows):
    def equal_parts(batch):
        size = -(-len(batch) // 4)
        return [batch[first : first + size] for first in range(0, len(batch), size)]

    expected, num_clipped = uneven.clipped_in_numpy(equal_parts, 0.9, num_rows)
    assert 2 <= num_clipped <= 14, "the limit must bite on some replicas only"
    weights, _ = uneven.run("plain", 4, around={"replica_clipnorm": 0.9}, rows=slice(num_rows), validates=False)
    assert problem.relative_difference(weights, expected) <= problem.TOLERANCE


SCALED = {
    "around CrossShard": lambda cross_shard, sgd: ks.LossScaling(cross_shard(sgd()), 64.0),
    "twice inside": lambda cross_shard, sgd: cross_shard(ks.LossScaling(sgd(loss_scale_factor=4.0), 16.0)),
}


@pytest.mark.parametrize("scaled", some(SCALED, ["twice inside"]))
@pytest.mark.exhaustive("tensorflow")
def test_replica_clipnorm_is_in_units_of_the_loss_wherever_that_is_scaled(scaled):
    def sgd(**more):
        return keras.optimizers.SGD(0.1, momentum=0.9, **more)

    def trained(make):
        x, y = problem.data(num_steps=3)
        with ks.data_parallel(2) as replicas:
            model = problem.model()
            model.compile(make(cross_shard, sgd), "mse")
            ks.prepare(model)
        model.fit(x, y, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
        replicas.close()
        return model.get_weights()

    def cross_shard(inner):
        return ks.CrossShard(inner, replica_clipnorm=0.5)

    weights = trained(SCALED[scaled])
    plain = trained(lambda cross_shard, sgd: cross_shard(sgd()))
    assert problem.relative_difference(weights, plain) <= problem.TOLERANCE


class WithState(keras.Model):
    """A model whose training does what a `shard_map` around it can get wrong: dropout, batch statistics."""

    def __init__(self):
        super().__init__()
        self.normalize = keras.layers.BatchNormalization(momentum=0.5)
        self.drop = keras.layers.Dropout(0.5, seed=5)
        self.out = keras.layers.Dense(problem.NUM_OUTPUTS)
        self.count = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False)

    def call(self, x, training=False):
        self.count.assign_add(2**24 + 1 if training else 0)  # no number of float32
        return self.out(self.drop(self.normalize(x, training=training), training=training))


@pytest.mark.backends("jax")
def test_state_of_layers_in_a_shard_map():
    x, y = uneven.data()
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
    assert model.count.value == 2 * (2**24 + 1)


def test_what_cannot_be_prepared_says_so():
    with pytest.raises(TypeError, match="`model` must be a `keras.Model`"):
        ks.prepare("model")
    model = problem.model()
    with pytest.raises(ValueError, match="compiled with a `CrossShard`"):
        ks.prepare(model)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="compiled with a `CrossShard`"):
        ks.prepare(model)


def test_groups_that_train_apart_cannot_be_prepared():
    model = uneven.compiled(around={"group_assignment": [[0, 1], [2, 3]]})
    with pytest.raises(ValueError, match="groups train separately"):
        ks.prepare(model)


@pytest.mark.backends("jax")
def test_a_train_step_of_ones_own_cannot_show_gradients_of_each_replica():
    class Own(keras.Sequential):
        def train_step(self, state, data):
            return super().train_step(state, data)

    with pytest.raises(ValueError, match="cannot divide a custom `train_step`"):
        uneven.run("plain", 2, around={"replica_clipnorm": 1.0}, make=lambda: Own(problem.model().layers))


@pytest.mark.backends("jax")
@pytest.mark.exhaustive
def test_a_prepared_model_trains_with_another_optimizer_as_keras_does():
    """XLA reduces gradients for any optimizer, so there is nothing to refuse, as there is on PyTorch."""
    results = []
    for num_replicas in (1, 4):
        x, y = uneven.data()
        with ks.data_parallel(num_replicas) as replicas:
            model = problem.model()
            for optimizer in (ks.CrossShard(problem.sgd_momentum(), gradient_accumulation_steps=2), "sgd"):
                model.compile(optimizer, "mse")
                if optimizer != "sgd":
                    ks.prepare(model)
                model.fit(x, y, batch_size=uneven.BATCH_SIZE, shuffle=False, verbose=0)
                results.append(model.get_weights())
            with pytest.raises(ValueError, match="compiled with a `CrossShard`"):
                ks.prepare(model)
        replicas.close()
    for mine, alone in zip(results[2:], results[:2]):
        assert problem.relative_difference(mine, alone) <= problem.TOLERANCE


@pytest.mark.backends("tensorflow", "jax")
def test_groups_of_a_later_compile_are_refused():
    with ks.data_parallel(4) as replicas:
        model = problem.model()
        model.compile(ks.CrossShard("sgd"), "mse")
        ks.prepare(model)
        model.compile(ks.CrossShard("sgd", group_assignment=[[0, 1], [2, 3]]), "mse")
        with pytest.raises(ValueError, match="groups train separately"):
            model.fit(*problem.data(1), batch_size=problem.BATCH_SIZE, verbose=0)
    replicas.close()


@pytest.mark.backends("jax")
def test_a_prepared_model_stays_so_under_another_distribution_of_the_same_devices():
    def distribute():
        devices = keras.distribution.list_devices()[:4]
        keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))

    distribute()
    model = problem.model()
    model.compile(ks.CrossShard(problem.sgd_momentum()), "mse")
    ks.prepare(model)
    distribute()
    x, y = problem.data(1)
    model.fit(x[:13], y[:13], batch_size=13, verbose=0)
    keras.distribution.set_distribution(None)
    alone = problem.model()
    alone.compile(problem.sgd_momentum(), "mse")
    alone.fit(x[:13], y[:13], batch_size=13, verbose=0)
    assert problem.relative_difference(model.get_weights(), alone.get_weights()) <= problem.TOLERANCE


@pytest.mark.exhaustive("jax", "tensorflow")
def test_one_replica_is_left_alone():
    expected, got = (uneven.run("plain", 1, prepared, validates=False) for prepared in (False, True))
    assert got[1] == expected[1]
    for a, b in zip(got[0], expected[0]):
        np.testing.assert_array_equal(a, b)


@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize("kind", some(["PyDataset", "generator"], ["generator"]))
def test_batches_in_the_memory_of_numpy_are_divided_and_not_overwritten(kind):
    """Keras alone trains on other rows there: TensorFlow writes into parts of them, and peeks lose batches."""
    x, y = (rows[:13] for rows in problem.data())
    before = x.copy(), y.copy()

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return x[index * 4 : index * 4 + 4], y[index * 4 : index * 4 + 4]  # views

    def generator():
        while True:
            yield from (Batches()[index] for index in range(4))

    def trained(model):
        data = {"x": Batches()} if kind == "PyDataset" else {"x": generator(), "steps_per_epoch": 4}
        model.fit(**data, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    with ks.data_parallel(2) as replicas:
        model = problem.model()
        model.compile(ks.CrossShard(problem.sgd_momentum()), "mse", jit_compile=False)
    found = trained(model)
    replicas.close()
    np.testing.assert_array_equal(x, before[0])
    np.testing.assert_array_equal(y, before[1])
    reference = problem.model()
    reference.compile(problem.sgd_momentum(), "mse", jit_compile=False)
    assert problem.relative_difference(found, trained(reference)) <= problem.TOLERANCE


def normalizing_model():
    layers = [keras.Input((problem.NUM_FEATURES,)), keras.layers.Dense(7, kernel_initializer="ones")]
    keras.utils.set_random_seed(5)
    layers += [keras.layers.BatchNormalization(), keras.layers.Dense(problem.NUM_OUTPUTS)]
    return keras.Sequential(layers)


@pytest.mark.backends("jax")
@pytest.mark.parametrize("num_rows", some([uneven.NUM_ROWS, 13], [13]))
def test_normalization_is_that_of_one_device(num_rows):
    case = {"make": normalizing_model, "rows": slice(num_rows), "weights": uneven.row_weights()}
    expected = uneven.run("sample weights", 1, **case)
    uneven.assert_same(uneven.run("sample weights", 4, **case), expected, normalizing_model().get_weights())


@pytest.mark.backends("jax")
def test_each_device_has_its_rows_of_an_uneven_batch():
    import jax

    from keras_shardopt.fit.jax import batches

    taken = []

    class Looks(keras.Sequential):
        def train_step(self, state, data):
            taken.append(jax.tree.leaves(data)[0].shape[0])
            return super().train_step(state, data)

    with ks.data_parallel(4) as replicas:
        model = Looks([keras.Input((32,)), keras.layers.Dense(8)])
        model.compile(ks.CrossShard("sgd"), "mse")
        x, y = np.ones((29, 32), "float32"), np.ones((29, 8), "float32")
        model.fit(x, y, batch_size=16, epochs=3, verbose=0)
        assert taken == [16, 13]  # one trace for all batches, one for the last of each epoch
        batch = batches._divided_on_devices((x[:13], y[:13]), keras.distribution.distribution())
        assert all(each.data.shape[0] == 4 for leaf in jax.tree.leaves(batch) for each in leaf.addressable_shards)
        state = [[v.value for v in variables] for variables in (model.trainable_variables, [], model.metrics_variables)]
        program = jax.jit(model.test_step).lower(state, batch).compile().as_text()
        assert "f32[4,8]" in program and "f32[13,8]" not in program
        assert "all-gather" not in program
    replicas.close()


@pytest.mark.backends("tensorflow")
def test_each_replica_has_its_rows_of_an_uneven_batch():
    import tensorflow as tf

    taken = []

    class Looks(keras.Sequential):
        def train_step(self, data):
            x, _ = data
            result = super().train_step(data)
            with tf.control_dependencies(
                [tf.numpy_function(lambda rows: taken.append(int(rows)), [tf.shape(x)[0]], [])]
            ):
                return tf.nest.map_structure(tf.identity, result)

    with ks.data_parallel(2) as replicas:
        model = Looks([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile(ks.CrossShard("sgd"), "mse", jit_compile=False)
        model.fit(np.ones((29, 4), "f4"), np.ones((29, 3), "f4"), batch_size=16, epochs=2, shuffle=False, verbose=0)
    replicas.close()
    batches = [sorted(taken[i : i + 2]) for i in range(0, len(taken), 2)]  # of two replicas each
    assert batches == [[8, 8], [6, 7]] * 2


@pytest.mark.backends("jax")
@pytest.mark.parametrize("call", ["predict", "predict_on_batch", "test_on_batch", "train_on_batch"])
def test_each_device_computes_its_rows_of_an_uneven_batch_only(call, monkeypatch):
    from keras.src.backend.jax import trainer

    programs, jit = [], trainer.jit

    def noting(function, **options):
        compiled = jit(function, **options)

        def run(state, data):
            programs.append(compiled.lower(state, data).compile().as_text())
            return compiled(state, data)

        return run

    x, y = problem.data(1)
    data = [x[:13]] if "predict" in call else [x[:13], y[:13]]

    def result_of(model):
        model.compile(ks.CrossShard(problem.sgd_momentum()), "mse")
        return [getattr(model, call)(*data, **({"verbose": 0} if call == "predict" else {})), *model.get_weights()]

    def model():
        keras.utils.set_random_seed(3)
        return keras.Sequential([keras.Input((x.shape[1],)), keras.layers.Dense(37), keras.layers.Dense(y.shape[1])])

    expected = result_of(model())
    with ks.data_parallel(4) as replicas:
        monkeypatch.setattr(trainer, "jit", noting)
        found = result_of(model())
    replicas.close()
    for got, wanted in zip(found, expected):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    (program,) = programs
    assert "f32[4,37]" in program and "f32[13,37]" not in program and "f32[16,37]" not in program


@pytest.mark.backends("jax", "tensorflow")
def test_a_short_last_batch_is_traced_once():
    traced, at_end = [], []

    class Traced(keras.Sequential):
        def train_step(self, *args):
            traced.append(args)
            return super().train_step(*args)

    class Counts(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            at_end.append(len(traced))

    x, y = uneven.data()
    with ks.data_parallel(2) as replicas:
        model = Traced(problem.model().layers)
        model.compile(ks.CrossShard(problem.sgd_momentum()), "mse", jit_compile=BACKEND == "jax")
        model.fit(x, y, batch_size=uneven.BATCH_SIZE, epochs=4, verbose=0, callbacks=[Counts()])
    replicas.close()
    # JAX: a program for all batches, and one for the last of each epoch. TensorFlow: one, traced on both replicas.
    assert at_end == [2] * 4


@pytest.mark.backends("jax")
def test_later_epochs_with_a_short_last_batch_compile_nothing():
    import jax

    compiled, at_end = [], []

    def note(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(seconds)

    class Counts(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            at_end.append(len(compiled))

    jax.monitoring.register_event_duration_secs_listener(note)
    x, y = uneven.data()
    with ks.data_parallel(2) as replicas:
        model = problem.model()
        model.compile(ks.CrossShard(problem.sgd_momentum()), "mse")
        model.fit(x, y, batch_size=uneven.BATCH_SIZE, epochs=4, verbose=0, callbacks=[Counts()])
    replicas.close()
    assert at_end[0] > 0
    assert at_end[2:] == at_end[1:2] * 2  # in the first one Keras computes what it shows at its end


def sparse_and_dense(num_rows):
    from scipy import sparse

    random = np.random.RandomState(0)
    x = np.zeros((num_rows, 4), "float32")
    x.flat[random.permutation(x.size)[:9]] = random.randn(9)  # two devices cannot divide 9 elements
    return sparse.csr_matrix(x), x, random.randn(num_rows, 1).astype("float32")


def model_of_sparse_rows(**options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,), sparse=True), keras.layers.Dense(1)])
    model.compile(ks.CrossShard(keras.optimizers.SGD(0.1, momentum=0.9), **options), "mse")
    return model


@pytest.mark.backends("jax")
@pytest.mark.parametrize("num_rows", [7, 8])
def test_a_sparse_batch_keeps_its_elements(num_rows):
    *both, y = sparse_and_dense(num_rows)
    found = []
    for x in both:
        with ks.data_parallel(2) as replicas:
            model = model_of_sparse_rows()
        model.fit(x, y, batch_size=num_rows, epochs=2, verbose=0)
        loss = model.evaluate(x, y, batch_size=num_rows, verbose=0)
        predicted = model.predict(x, batch_size=num_rows, verbose=0)
        found.append([keras.ops.convert_to_numpy(model.layers[0].kernel), loss, predicted])
        replicas.close()
    for ours, dense in zip(*found):
        np.testing.assert_allclose(ours, dense, rtol=1e-6)


@pytest.mark.backends("jax")
@pytest.mark.parametrize(
    "num_rows, name, value", [(8, "replica_clipnorm", 1.0), (7, "extensions", [ks.VirtualReplicas(4)])]
)
def test_a_sparse_batch_is_refused_where_replicas_need_their_rows(num_rows, name, value):
    x, _, y = sparse_and_dense(num_rows)
    with ks.data_parallel(2) as replicas:
        model = model_of_sparse_rows(**{name: value})
    words = rf"^On JAX, per-replica gradients need dense .* {num_rows} rows.* `x.toarray\(\)`.*`{name}`"
    with pytest.raises(ValueError, match=words):
        model.fit(x, y, batch_size=num_rows, verbose=0)
    replicas.close()
