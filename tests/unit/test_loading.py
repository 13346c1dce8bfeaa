"""State that does not fit is an error that names what differs, where Keras alone warns or says nothing."""

import keras
import numpy as np
import pytest
from keras import optimizers as o
from support import catalogue
from support.suites import some

import keras_shardopt as ks


def made(optimizer, names=("hidden", "out"), sizes=(7, 3), build=True, depth=2):
    layers = [keras.layers.Dense(sizes[i % 2], name=name) for i, name in enumerate(names)]
    model = keras.Sequential([keras.Input((5,)), *layers[:depth]])
    model.compile(optimizer, "mse")
    if build:
        model.optimizer.build(model.trainable_variables)
        for i, variable in enumerate(model.optimizer.variables):
            if len(variable.shape):
                variable.assign(np.full(variable.shape, i + 1.0))
        model.optimizer.iterations.assign(3)
    return model


def wrapped(make):
    return ks.CrossShard(ks.LossScaling(make()))


def state(model):
    return catalogue.state_of(model.optimizer)


OTHERS = {
    "fewer": (lambda: o.SGD(0.1, momentum=0.9), "must have 6 arrays.*Received: 10 arrays"),
    "more": (lambda: o.Adam(amsgrad=True), "must have 14 arrays.*Received: 10 arrays"),
    "in another order": (lambda: o.RMSprop(momentum=0.5), r"hidden_bias_velocity` must have shape \(7,\).*\(5, 7\)"),
    "of another name": (o.Adamax, "`hidden/kernel velocity` where this optimizer has `hidden/kernel norm`; "),
}


@pytest.mark.parametrize("build", [True, False], ids=["built", "not yet"])
@pytest.mark.parametrize("what", some(OTHERS, 2, "jax", "tensorflow"))
@pytest.mark.parametrize("name", ["a.keras", "a.weights.h5"])
def test_state_of_another_optimizer(tmp_path, what, build, name):
    saved = made(wrapped(o.Adam))
    (ks.save_weights if name.endswith("h5") else ks.save_model)(saved, tmp_path / name)
    make, words = OTHERS[what]
    model = made(wrapped(make), build=build)
    before = state(model)
    with pytest.raises(ValueError, match=f"(?s){words}"):
        model.load_weights(tmp_path / name)
        model.optimizer.build(model.trainable_variables)  # the first moment to know, where it was not yet built
    if build:
        for one, other in zip(before, state(model)):
            np.testing.assert_array_equal(one, other)


def test_variables_of_another_shape_or_number(tmp_path):
    made(wrapped(o.Adam)).save_weights(tmp_path / "a.weights.h5")
    for other in (made(wrapped(o.Adam), sizes=(8, 3)), made(wrapped(o.Adam), ("hidden", "more", "out"), depth=3)):
        with pytest.raises(ValueError):
            other.load_weights(tmp_path / "a.weights.h5")


def test_layers_of_other_names(tmp_path):
    """Equal shapes, so that nothing else would tell."""
    first = made(wrapped(o.Adam), ("left", "right"), (5, 5))
    ks.save_weights(first, tmp_path / "a.weights.h5")
    other = made(wrapped(o.Adam), ("right", "left"), (5, 5))
    with pytest.raises(ValueError, match="`left/kernel momentum` where this optimizer has `right/kernel momentum`"):
        other.load_weights(tmp_path / "a.weights.h5")
    with pytest.warns(UserWarning, match="could not be loaded"):  # who wants it so can have the rest
        other.load_weights(tmp_path / "a.weights.h5", skip_mismatch=True)
    for one, two in zip(first.get_weights(), other.get_weights()):
        np.testing.assert_array_equal(one, two)


def test_what_keras_counts_up_is_no_other_name(tmp_path):
    """Layers without a name of their own, in a program that has made others before."""

    def unnamed():
        layers = [keras.Input((5,)), keras.layers.Dense(5), keras.layers.Dense(5), keras.layers.Dense(3)]
        model = keras.Sequential(layers)
        model.compile(wrapped(o.Adam), "mse")
        model.optimizer.build(model.trainable_variables)
        return model

    saved = unnamed()
    saved.optimizer.iterations.assign(3)
    ks.save_weights(saved, tmp_path / "a.weights.h5")
    keras.layers.Dense(1)
    model = unnamed()
    assert model.layers[0].name != saved.layers[0].name
    model.load_weights(tmp_path / "a.weights.h5")
    assert int(model.optimizer.iterations) == 3
    made_otherwise = keras.Model(saved.inputs, saved.outputs, name="of_another_name")
    made_otherwise.compile(wrapped(o.Adam), "mse")
    made_otherwise.optimizer.build(made_otherwise.trainable_variables)
    made_otherwise.load_weights(tmp_path / "a.weights.h5")


def chain(*wrappers):
    def make():
        optimizer = o.Adam()
        for wrap in wrappers:
            optimizer = wrap(optimizer)
        return optimizer

    return make


CHAINS = {
    "plain": o.Adam,
    "one": chain(ks.CrossShard),
    "masters": chain(ks.MixedPrecision, ks.CrossShard),
    "clipped": chain(lambda inner: ks.GradientClipping(inner, 1.0), ks.CrossShard),
}


@pytest.mark.parametrize("target", some(CHAINS, 2, "jax", "tensorflow"))
@pytest.mark.parametrize("source", CHAINS)
def test_names_are_those_of_any_chain(tmp_path, source, target):
    saved = made(CHAINS[source]())
    saved.save_weights(tmp_path / "a.weights.h5")
    model = made(CHAINS[target]())
    for variable in model.optimizer.variables:
        variable.assign(keras.ops.zeros(variable.shape, variable.dtype))
    model.load_weights(tmp_path / "a.weights.h5")
    for one, two in zip(state(saved), state(model)):
        np.testing.assert_array_equal(one, two)
