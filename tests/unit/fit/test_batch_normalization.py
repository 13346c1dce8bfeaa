"""`BatchNormalization(synchronized=True)` on every backend: made, converted, saved, and alone."""

import keras
import numpy as np
import pytest
from support import problem

import keras_shardopt as ks

BatchNormalization = keras.layers.BatchNormalization


def nested(**more):
    inside = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4), BatchNormalization(momentum=0.5, **more)])
    inputs = keras.Input((5,))
    repeated = keras.layers.Reshape((2, 2))(inside(inputs))
    repeated = keras.layers.TimeDistributed(BatchNormalization(name="each"))(repeated)
    return keras.Model(inputs, keras.layers.Dense(problem.NUM_OUTPUTS)(keras.layers.Flatten()(repeated)))


def normalizing(model):
    return [layer for layer in model._flatten_layers() if isinstance(layer, BatchNormalization)]


class OfOnesOwn(BatchNormalization):
    def __init__(self, factor=2.0, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor


def test_every_backend_takes_the_argument():
    ks.CrossShard("sgd")  # the first use
    layer = BatchNormalization(1, 0.9, synchronized=True)
    assert layer.synchronized is True and layer.axis == 1 and layer.momentum == 0.9
    config = layer.get_config()
    assert config["synchronized"] is True and BatchNormalization.from_config(config).get_config() == config
    assert OfOnesOwn(synchronized=True).synchronized and not OfOnesOwn().synchronized
    assert BatchNormalization().synchronized is False


def test_a_model_is_converted_at_any_depth():
    model = nested()
    assert ks.synchronize_batch_normalization(model) is model
    assert [layer.synchronized for layer in normalizing(model)] == [True, True]
    layer = BatchNormalization()
    assert ks.synchronize_batch_normalization(layer) is layer and layer.synchronized
    with pytest.raises(TypeError, match=r"`model` must be a `keras.Model` or a layer. Received: model='x'"):
        ks.synchronize_batch_normalization("x")


def test_it_is_in_files_and_in_copies(tmp_path):
    model = ks.synchronize_batch_normalization(nested())
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    copy = keras.models.clone_model(model)
    for other in (loaded, copy):
        assert [layer.synchronized for layer in normalizing(other)] == [True, True]


def trained(model, **more):
    keras.utils.set_random_seed(2)
    x, y = problem.data(4)
    model.compile(problem.sgd_momentum(), "mse", **more)
    model.fit(x, y, batch_size=problem.BATCH_SIZE, verbose=0)
    return model.get_weights()


def test_with_one_replica_bits_are_those_of_keras():
    keras.utils.set_random_seed(1)
    plain = nested()
    converted = ks.synchronize_batch_normalization(keras.models.clone_model(plain))
    converted.set_weights(plain.get_weights())
    for mine, others in zip(trained(converted), trained(plain)):
        np.testing.assert_array_equal(mine, others)


@pytest.mark.exhaustive("tensorflow")
def test_a_model_that_has_trained_is_traced_anew():
    model = nested()
    before = trained(model)
    ks.synchronize_batch_normalization(model)
    assert model.train_function is None
    x, y = problem.data(1)
    model.fit(x, y, verbose=0)
    assert any((a != b).any() for a, b in zip(before, model.get_weights()))


@pytest.mark.parametrize("mask", [None, np.array([[True, False, True], [False, False, True]])])
def test_a_plain_call_uses_the_rows_that_it_is_given(mask):
    x = np.random.default_rng(3).normal(size=(2, 3, 4)).astype("float32")
    outputs = [
        keras.ops.convert_to_numpy(BatchNormalization(synchronized=synchronized)(x, training=True, mask=mask))
        for synchronized in (False, True)
    ]
    np.testing.assert_array_equal(*outputs)


@pytest.mark.backends("torch")
def test_batch_normalizations_of_torch_stay_as_they_are_with_a_warning():
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    own, inside = keras.layers.BatchNormalization(), keras.layers.TorchModuleWrapper(module, name="inside")
    with pytest.warns(UserWarning, match=r"with a `torch.nn.BatchNorm1d` in the layer `inside`, which normalizes"):
        ks.synchronize_batch_normalization(keras.Sequential([keras.Input((4,)), own, inside]))
    assert own.synchronized and type(module[1]) is torch.nn.BatchNorm1d
