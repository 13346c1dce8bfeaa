"""Batches that are cut into parts on TensorFlow: where they come from, what is refused, and what stays as it was."""

import contextlib

import keras
import numpy as np
import pytest
from support.suites import some

import keras_shardopt as ks

pytestmark = pytest.mark.backends("tensorflow")

NUM_PARTS = 4
RANDOM = np.random.RandomState(0)
X = RANDOM.randn(22, 5).astype("float32")
Y = RANDOM.randn(22, 1).astype("float32")


class Penalized(keras.layers.Layer):
    def call(self, inputs):
        self.add_loss(keras.ops.mean(inputs**2))
        return inputs


def net():
    keras.utils.set_random_seed(3)
    layers = [
        keras.Input((5,)),
        keras.layers.Dense(6, kernel_regularizer=keras.regularizers.L2(0.01)),
        Penalized(),
        keras.layers.Dense(4, activity_regularizer=keras.regularizers.L2(0.1)),
        keras.layers.Dense(1),
    ]
    return layers


@contextlib.contextmanager
def compiled(num_devices, kind=keras.Sequential, layers=net, num_parts=NUM_PARTS, loss="mse", options=(), **arguments):
    with ks.data_parallel(num_devices) as replicas:
        model = kind(layers())
        optimizer = ks.CrossShard(keras.optimizers.SGD(0.1, momentum=0.9), virtual_replicas=num_parts, **dict(options))
        model.compile(optimizer, loss, metrics=["mae"], **arguments)
        yield ks.prepare(model)
    replicas.close()


def bits(model):
    return b"".join(keras.ops.convert_to_numpy(weight).tobytes() for weight in model.weights)


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, i):
        return X[8 * i : 8 * i + 8], Y[8 * i : 8 * i + 8]


def _dataset():
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)


SOURCES = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": 8, "shuffle": False},
    "dataset": lambda: {"x": _dataset(), "shuffle": False},
    "py_dataset": lambda: {"x": Batches(), "shuffle": False},
    "generator": lambda: {"x": (Batches()[i % 3] for i in range(9)), "steps_per_epoch": 3, "shuffle": False},
}


def trained_on(num_devices, sources):
    """What comes of each of them: one model begins anew with each, and is traced once."""
    with compiled(num_devices) as model:
        start = model.get_weights()
        for source in sources:
            model.set_weights(start)
            for momentum in [v for v in model.optimizer.variables if len(v.shape)]:
                momentum.assign(np.zeros(momentum.shape))
            yield source, model.fit(**SOURCES[source](), epochs=2, verbose=0).history, bits(model)


def test_the_parts_of_a_batch_are_those_of_its_rows_wherever_it_comes_from():
    (_, *expected), *others = trained_on(1, ["arrays", "dataset", "py_dataset", "generator"])
    for source, *found in [*others, *trained_on(2, ["generator", "py_dataset", "dataset", "arrays"])]:
        assert found == expected, source


@pytest.mark.exhaustive
def test_added_losses_and_penalties_count_as_without_parts():
    found = []
    for num_parts in (None, NUM_PARTS):
        with compiled(2, num_parts=num_parts) as model:
            history = model.fit(X, Y, batch_size=8, shuffle=False, epochs=2, verbose=0).history
            found.append([*history.values(), *map(keras.ops.convert_to_numpy, model.weights)])
            found[-1] += [np.array(model.evaluate(X, Y, batch_size=10, verbose=0))]
    for one, other in zip(*found):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
def test_single_batches_are_cut_too():
    found = []
    for num_devices in (1, 2):
        with compiled(num_devices) as model:
            logs = [model.train_on_batch(X[:rows], Y[:rows]) for rows in (7, 5)]
            found.append([*np.ravel(logs), *model.test_on_batch(X, Y), bits(model)])
    assert found[0] == found[1]


def _of_inputs(sparse):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((5,), sparse=sparse)
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dense(4, "tanh")(inputs)))


@pytest.mark.parametrize("num_devices", some([1, 2], [1]))
def test_sparse_inputs_are_cut_as_dense_ones_are(num_devices):
    import tensorflow as tf

    dense = X * (X > 0.5)
    found = []
    for is_sparse in (False, True):
        with compiled(num_devices, kind=_of_inputs, layers=lambda is_sparse=is_sparse: is_sparse) as model:
            x, few = (tf.sparse.from_dense(v) for v in (dense, dense[:3])) if is_sparse else (dense, dense[:3])
            logs = list(model.fit(x, Y, batch_size=8, shuffle=False, epochs=2, verbose=0).history.values())
            logs += [model.evaluate(x, Y, batch_size=8, verbose=0), model.train_on_batch(few, Y[:3])]
            found.append([*map(np.array, logs), *map(keras.ops.convert_to_numpy, model.weights)])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
def test_several_steps_of_an_execution_are_made_one_by_one():
    found = []
    for steps in (1, 2):
        with compiled(1, steps_per_execution=steps) as model:
            model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
            found.append(bits(model))
    assert found[0] == found[1]


def test_a_scalar_loss_counts_by_rows():
    def loss(y_true, y_pred):
        return keras.ops.mean(keras.ops.abs(y_true - y_pred))

    found = []
    for num_parts in (None, NUM_PARTS):
        with compiled(2, num_parts=num_parts, loss=loss) as model:
            model.fit(X[:8], Y[:8], batch_size=8, shuffle=False, verbose=0)
            found.append([keras.ops.convert_to_numpy(weight) for weight in model.weights])
    for one, other in zip(*found):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_parts_without_rows_count_for_nothing():
    found = []
    for num_parts in (None, NUM_PARTS):
        with compiled(1, num_parts=num_parts) as model:
            model.train_on_batch(X[:2], Y[:2])
            found.append([keras.ops.convert_to_numpy(weight) for weight in model.weights])
    for one, other in zip(*found):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_rows", [2, 8])
def test_moving_statistics_change_by_the_mean_over_parts_that_have_rows(num_rows):
    def layers():
        return [keras.Input((5,)), keras.layers.BatchNormalization(momentum=0.9), keras.layers.Dense(1)]

    with compiled(2, layers=layers) as model:
        model.train_on_batch(X[:num_rows], Y[:num_rows])
        statistics = [keras.ops.convert_to_numpy(weight) for weight in model.layers[0].non_trainable_variables]
    parts = np.split(X[:num_rows], min(num_rows, NUM_PARTS))
    mean, variance = np.mean([part.mean(axis=0) for part in parts], 0), np.mean([part.var(axis=0) for part in parts], 0)
    np.testing.assert_allclose(statistics[0], 0.1 * mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(statistics[1], 0.9 + 0.1 * variance, rtol=1e-5)


def test_outputs_do_not_depend_on_parts():
    with compiled(2) as model:
        predicted = model.predict(X, batch_size=8, verbose=0)
        np.testing.assert_allclose(predicted, keras.ops.convert_to_numpy(model(X)), rtol=1e-5, atol=1e-6)


class OwnTest(keras.Sequential):
    def test_step(self, data):
        x, y = data
        self.compute_loss(x, y, self(x, training=False), training=False)
        return self.compute_metrics(x, y, self(x, training=False))


def test_a_test_step_of_the_models_own_gets_the_rows_of_its_replica():
    found = []
    for kind in (keras.Sequential, OwnTest):
        with compiled(2, kind=kind) as model:
            found.append(model.evaluate(X, Y, batch_size=3, verbose=0, return_dict=True)["mae"])
    np.testing.assert_allclose(*found, rtol=1e-5)


@pytest.mark.parametrize("num_devices", some([1, 2], [1]))
def test_another_model_that_is_called_meanwhile_has_its_batches_whole(num_devices):
    """By a callback, or by what makes batches."""
    with compiled(num_devices) as model:
        other = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        other.compile("sgd", "mse")
        expected = other.predict(X, verbose=0), other.evaluate(X, Y, verbose=0)
        found = []

        def look(*_):
            found.append((other.predict(X, verbose=0), other.evaluate(X, Y, verbose=0)))

        def batches():
            look()
            yield X[:8], other.predict(X[:8], verbose=0)

        model.fit(
            batches(),
            steps_per_epoch=1,
            shuffle=False,
            verbose=0,
            callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=look)],
        )
        assert len(found) == 2
        for outputs, loss in found:
            np.testing.assert_allclose(outputs, expected[0], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(loss, expected[1], rtol=1e-5)


def _holding_infinity():
    hidden = keras.layers.Dense(5, trainable=False)
    hidden.build((None, 5))
    hidden.kernel.assign(np.where(np.eye(5), -0.0, 1.0))
    hidden.bias.assign([np.inf, -np.inf, 0, 1, 2])
    return [keras.Input((5,)), hidden, keras.layers.Activation("sigmoid"), keras.layers.Dense(1)]


def test_weights_that_a_step_does_not_change_keep_their_bits():
    with compiled(2, layers=_holding_infinity) as model:
        frozen = bits(model.layers[0])
        history = model.fit(X, Y, batch_size=8, verbose=0).history
        assert bits(model.layers[0]) == frozen
        assert np.isfinite(history["loss"][0])


def test_a_model_without_trainable_weights_is_warned_of_as_by_keras():
    def layers():
        return [keras.Input((5,)), keras.layers.Dense(1, trainable=False)]

    with compiled(2, layers=layers) as model:
        before = bits(model)
        with pytest.warns(UserWarning, match="does not have any trainable weights"):
            history = model.fit(X, Y, batch_size=8, verbose=0, shuffle=False).history
        assert bits(model) == before
        np.testing.assert_allclose(history["loss"], model.evaluate(X, Y, verbose=0)[0], rtol=1e-5)


# -- what is refused ---------------------------------------------------------------------------------------------------


class OwnStep(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)


class OwnMetrics(keras.Sequential):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return {**super().compute_metrics(x, y, y_pred, sample_weight), "largest": keras.ops.max(y_pred)}


class Counting(keras.layers.Layer):
    elsewhere = None

    def call(self, inputs):
        type(self).elsewhere.assign(type(self).elsewhere + 1.0)
        return inputs


class Undrawn(keras.layers.Layer):
    def call(self, inputs):
        return inputs + keras.random.normal(keras.ops.shape(inputs))


def _counting():
    Counting.elsewhere = keras.Variable(0.0, trainable=False)
    return [keras.Input((5,)), Counting(), keras.layers.Dense(1)]


def _constrained():
    return [keras.Input((5,)), keras.layers.SpectralNormalization(keras.layers.Dense(1))]


def _synchronized():
    return [keras.Input((5,)), keras.layers.BatchNormalization(synchronized=True), keras.layers.Dense(1)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kind": OwnStep}, "custom `train_step`"),
        ({"run_eagerly": True}, "run_eagerly=True"),
        ({"kind": OwnMetrics}, r"\['largest'\]"),
        ({"layers": _counting}, "a change of variable"),
        ({"layers": lambda: [keras.Input((5,)), Undrawn(), keras.layers.Dense(1)]}, "without a seed"),
        ({"layers": _constrained}, "a change of .*kernel"),
        ({"layers": _synchronized}, "synchronized"),
        ({"num_parts": 1}, r"VirtualReplicas\(1\), with 2 replicas"),
    ],
)
def test_what_would_not_be_right_is_refused_before_anything_is_changed(arguments, words):
    with compiled(2, **arguments) as model:
        before = bits(model)
        with pytest.raises(ValueError, match=words):
            model.fit(X, Y, batch_size=8, verbose=0)
        assert bits(model) == before


def test_an_evaluation_that_changes_other_variables_is_refused():
    with compiled(2, layers=_counting) as model:
        with pytest.raises(ValueError, match="a change of variable"):
            model.evaluate(X, Y, batch_size=8, verbose=0)
        assert keras.ops.convert_to_numpy(Counting.elsewhere) == 0.0


def test_a_dataset_that_is_divided_already_is_refused():
    with compiled(2) as model:
        divided = model.distribute_strategy.experimental_distribute_dataset(_dataset())
        with pytest.raises(ValueError, match="already divided"):
            model.fit(divided, steps_per_epoch=2, shuffle=False, verbose=0)


def test_several_workers_are_refused(monkeypatch):
    from keras_shardopt.extensions.equal_bits.tensorflow import step as parts

    with compiled(2) as model:
        monkeypatch.setattr(parts, "num_workers", lambda strategy: 2)
        with pytest.raises(ValueError, match="one machine"):
            model.fit(X, Y, verbose=0)


def test_a_step_that_is_called_by_itself_is_refused():
    with compiled(2) as model, pytest.raises(ValueError, match="direct call of a step"):
        model.distribute_strategy.run(model.train_step, args=((X, Y),))


# -- what stays as it was ----------------------------------------------------------------------------------------------


def test_xla_is_left_out_with_a_warning():
    with compiled(1, jit_compile=True) as model:
        with pytest.warns(UserWarning, match="not compiled with XLA"):
            model.fit(X, Y, batch_size=8, verbose=0)
        assert model.jit_compile


def test_how_other_functions_are_optimized_does_not_change():
    import tensorflow as tf
    from tensorflow.python.eager import context

    before = tf.config.optimizer.get_experimental_options(), context.context().function_call_options
    with compiled(2) as model:
        model.fit(X, Y, batch_size=8, verbose=0, validation_data=(X, Y))
    after = tf.config.optimizer.get_experimental_options(), context.context().function_call_options
    assert after[0] == before[0] and after[1] is before[1]
