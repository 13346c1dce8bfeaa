"""Finds the optimizers of a model, and the models of a variable."""

import copy
import gc
import threading
import weakref

import keras
import pytest

from keras_shardopt.backends.models import Living, models_with, optimizers_of
from keras_shardopt.backends.patches import install

install("optimizers")


class Pair(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.second = keras.layers.Dense(1), keras.layers.Dense(2)

    def call(self, x):
        return self.second(self.first(x))


def test_a_model_holds_optimizers_as_attributes_and_in_containers():
    sgd, adam, lion, ftrl, nadam = (
        getattr(keras.optimizers, name)() for name in ("SGD", "Adam", "Lion", "Ftrl", "Nadam")
    )
    model = Pair()
    model.compile(sgd, loss="mse")
    model.d_optimizer = adam
    model.more = {"some": [lion, (adam, sgd)]}
    model.first.its_optimizer = ftrl
    assert optimizers_of(model) == [sgd, adam, lion, ftrl]
    assert nadam not in optimizers_of(model)


@pytest.mark.backends("torch")
def test_ranks_compare_the_state_of_the_outermost_model():
    from keras_shardopt.backends.torch.equal_start import model_and_seed_state

    layers = keras.layers
    inner = keras.Sequential([keras.Input((2,)), layers.Dense(2), layers.BatchNormalization()])
    outer = keras.Sequential([keras.Input((2,)), inner, layers.BatchNormalization(), layers.Dense(1)])
    found = model_and_seed_state([v.value for v in outer.trainable_variables])
    assert {id(v.value) for v in outer.non_trainable_variables} <= {id(tensor) for tensor in found}


def test_a_model_without_an_optimizer_holds_none():
    assert optimizers_of(Pair()) == []
    assert optimizers_of(object) == []


def test_larger_models_that_hold_a_variable_come_first():
    inner = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    outer = keras.Sequential([keras.Input((3,)), inner, keras.layers.Dense(1)])
    other = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    found = models_with(inner.trainable_variables)
    # A `Sequential` holds a functional model of the same variables.
    assert outer in found[:2] and inner in found[2:] and other not in found
    assert other in models_with(other.trainable_variables)
    assert models_with([]) == []


def test_models_are_found_however_they_were_made():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    for other in (keras.models.clone_model(model), copy.deepcopy(model)):
        assert other in models_with(other.trainable_variables) and model not in models_with(other.trainable_variables)
    subclassed = Pair()
    subclassed(keras.ops.ones((1, 3)))
    gc.freeze()  # hides what lives from the garbage collector, as one does before `os.fork`
    try:
        assert models_with(subclassed.trainable_variables) == [subclassed]
    finally:
        gc.unfreeze()


def test_models_that_nothing_else_holds_are_let_go():
    model = Pair()
    model(keras.ops.ones((1, 3)))
    variables, alive = model.trainable_variables, weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None and models_with(variables) == []


def test_objects_from_before_and_after_are_known():
    class Thing:
        pass

    class Special(Thing):
        pass

    before = [Thing(), Special()]
    living = Living(Thing)
    Thing.__init__ = living.noting(Thing.__init__)
    Thing.__init__.scan()  # as `install` does
    after = Special()
    assert set(living) == {*before, after}


@pytest.mark.neutral
def test_looking_for_models_leaves_other_threads_alone():
    """With a list of all objects in hand, a tuple that another thread fills has one reference too many."""
    model = Pair()
    model(keras.ops.ones((1, 3)))
    errors, over = [], threading.Event()

    def fill():
        try:
            while not over.is_set():
                tuple(i for i in range(20))
        except SystemError as error:
            errors.append(error)

    thread = threading.Thread(target=fill)
    thread.start()
    for _ in range(100):
        models_with(model.trainable_variables)
    over.set()
    thread.join()
    assert not errors
