"""State that does not fit is an error that names what differs, where Keras alone warns or says nothing."""

import warnings

import keras
import numpy as np
import pytest
from conftest import BACKEND
from keras import optimizers as o
from promises.problems import corpus
from support import catalogue, launch
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
    "of another name": (
        o.Adamax,
        "the file has `hidden/kernel velocity`, but this optimizer has `hidden/kernel norm`; ",
    ),
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
    with pytest.raises(ValueError, match="`left/kernel momentum`, but this optimizer has `right/kernel momentum`"):
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


def test_numbers_that_a_user_has_given_are_names(tmp_path):
    saved = made(wrapped(o.Adam), ("tower_1", "tower_2"), (5, 5))
    saved.save_weights(tmp_path / "a.weights.h5")
    made(wrapped(o.Adam), ("tower_1", "tower_2"), (5, 5)).load_weights(tmp_path / "a.weights.h5")
    with pytest.raises(ValueError, match="`tower_1/kernel momentum`, but this optimizer has `tower_2/kernel mom"):
        made(wrapped(o.Adam), ("tower_2", "tower_1"), (5, 5)).load_weights(tmp_path / "a.weights.h5")


class Numbered(keras.layers.Layer):
    """Gives itself a name by a counter of the program's own, as some people's layers do."""

    count = 0

    def __init__(self, units):
        Numbered.count += 1
        super().__init__(name=f"encoder{Numbered.count}")
        self.units = units

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.units), name="kernel")

    def call(self, x):
        return x @ self.kernel

    def get_config(self):
        return {"units": self.units}

    @classmethod
    def from_config(cls, config):
        return cls(**config)


def test_what_a_program_counts_up_itself_is_no_other_name(tmp_path):
    def make():
        model = keras.Sequential([keras.Input((5,)), Numbered(5), Numbered(5)])
        model.compile(wrapped(o.Adam), "mse")
        model.optimizer.build(model.trainable_variables)
        return model

    saved = make()
    saved.optimizer.iterations.assign(3)
    saved.save(tmp_path / "a.keras")
    saved.save_weights(tmp_path / "a.weights.h5")
    loaded, other = keras.saving.load_model(tmp_path / "a.keras", custom_objects={"Numbered": Numbered}), make()
    assert loaded.layers[0].name != saved.layers[0].name
    other.load_weights(tmp_path / "a.weights.h5")
    assert int(loaded.optimizer.iterations) == int(other.optimizer.iterations) == 3


class Other(o.Adam):
    """Of the user's own."""


SAME_NAMES = {
    "momentum": (lambda: o.SGD(0.1, momentum=0.9), o.Lion),
    "derived": (o.Adam, o.AdamW),
    "of the user's own": (o.Adam, Other),
}


@pytest.mark.parametrize("build", [True, False], ids=["built", "not yet"])
@pytest.mark.parametrize("pair", some(SAME_NAMES, ["derived"], "jax", "tensorflow"))
def test_another_class_whose_slots_have_the_same_names(tmp_path, pair, build):
    for make, other in (SAME_NAMES[pair], SAME_NAMES[pair][::-1]):
        saved = made(wrapped(make))
        saved.save_weights(tmp_path / "a.weights.h5")
        names = [type(one()).__name__ for one in (make, other)]
        model = made(wrapped(other), build=build)
        before = state(model)
        words = f"state of `{names[0]}`, but this optimizer is `{names[1]}`"
        with pytest.raises(ValueError, match=words):
            model.load_weights(tmp_path / "a.weights.h5")
            model.optimizer.build(model.trainable_variables)
        if build:
            for one, two in zip(before, state(model)):
                np.testing.assert_array_equal(one, two)
        # Keras reads it, whatever is noted, and what Keras has written has no note.
        plain = made(make())
        plain.load_weights(tmp_path / "a.weights.h5")
        for one, two in zip(state(saved), state(plain)):
            np.testing.assert_array_equal(one, two)
        plain.save_weights(tmp_path / "plain.weights.h5")
        model.load_weights(tmp_path / "plain.weights.h5") if build else None


def test_the_class_of_several_optimizers(tmp_path):
    if not hasattr(o, "MultiOptimizer"):
        pytest.skip("needs a Keras with MultiOptimizer")

    def several(first, second):
        return lambda: o.MultiOptimizer(o.OptimizerMap(first, {"out": second}))

    sgd = lambda: o.SGD(0.1, momentum=0.9)  # noqa: E731
    made(wrapped(several(o.Lion(), sgd()))).save_weights(tmp_path / "a.weights.h5")
    made(wrapped(several(o.Lion(), sgd()))).load_weights(tmp_path / "a.weights.h5")
    with pytest.raises(ValueError, match=r"MultiOptimizer\((\w+), (\w+)\)`, but this optimizer is `Multi.*\(\2, \1\)"):
        made(wrapped(several(sgd(), o.Lion()))).load_weights(tmp_path / "a.weights.h5")


def test_files_without_a_class_still_load(tmp_path):
    """As written before classes were noted, with numbers in names that count within the model."""
    import h5py

    saved = made(wrapped(o.Adam), ("block_3", "block_8"), (5, 5))
    saved.save_weights(tmp_path / "a.weights.h5")
    with h5py.File(tmp_path / "a.weights.h5", "r+") as file:
        arrays = file["optimizer/vars"]
        assert arrays["0"].attrs["optimizer"] == "Adam"
        del arrays["0"].attrs["optimizer"]
        for array in arrays.values():
            if "slot" in array.attrs:
                array.attrs["slot"] = array.attrs["slot"].replace("block_3", "block").replace("block_8", "block_1")
    for make in (o.Adam, o.AdamW):
        model = made(wrapped(make), ("block_3", "block_8"), (5, 5))
        model.load_weights(tmp_path / "a.weights.h5")
        for one, two in zip(state(saved), state(model)):
            np.testing.assert_array_equal(one, two)


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


# -- what Keras loads for the inner optimizer ------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.build... was called on layer")  # the blocks of keras.io have none
@pytest.mark.parametrize("name", some(corpus.MODELS, ["nested", "tied embeddings"][BACKEND == "tensorflow" :]))
def test_files_of_ordinary_models(tmp_path, name):
    make = corpus.MODELS[name]
    plain = corpus.filled(make(), corpus.adam())
    plain.save(tmp_path / "plain.keras")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Skipping variable loading")  # where Keras cannot load the state
        num_arrays = len(keras.saving.load_model(tmp_path / "plain.keras").optimizer.variables)
    saved = corpus.filled(make(), ks.CrossShard(corpus.adam()))
    ks.save_model(saved, tmp_path / "a.keras")
    ks.save_weights(saved, tmp_path / "a.weights.h5")
    loaded = keras.saving.load_model(tmp_path / "a.keras")
    assert corpus.numbers(loaded) == corpus.expected(num_arrays)
    for file in ("a.weights.h5", "plain.keras"):
        other = corpus.filled(make(), ks.CrossShard(corpus.adam()))
        other.optimizer.set_weights([np.zeros(v.shape, v.dtype) for v in other.optimizer.variables])
        other.load_weights(tmp_path / file)
        assert corpus.numbers(other) == corpus.expected(num_arrays), file
    loaded.load_weights(tmp_path / "a.weights.h5")  # names from a file next to names from this program
    assert corpus.numbers(loaded) == corpus.expected(num_arrays)


@pytest.mark.neutral
def test_files_of_ordinary_models_in_another_process(tmp_path):
    keras.layers.Dense(1)  # so that counters are others there
    for i, make in enumerate(corpus.MODELS.values()):
        ks.save_model(corpus.filled(make(), ks.CrossShard(corpus.adam())), tmp_path / f"{i}.keras")
    environments, start = [launch.variables(BACKEND)], launch.fork_with(BACKEND)
    (printed,) = launch.workers(corpus.__file__, environments, tmp_path, *corpus.MODELS, timeout=120, start=start)
    lines = [line for line in printed.splitlines() if line in corpus.MODELS]  # and not warnings of Keras
    assert lines == list(corpus.MODELS), printed
