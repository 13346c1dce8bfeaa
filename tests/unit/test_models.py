"""Which optimizers a model holds, and which models hold a variable."""

import keras

from keras_shardopt.models import models_with, optimizers_of


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
