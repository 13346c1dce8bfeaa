"""JAX: along which axis a variable's state is laid out over the devices, and which variables may be there."""

import keras
import pytest
from keras import ops

import keras_shardopt as ks

pytestmark = pytest.mark.backends("jax")


def test_the_axis_that_divides():
    from keras_shardopt.backends.jax.placement import dividing_axis

    assert dividing_axis((5, 7, 8), 4) == 2
    assert dividing_axis((8, 8), 4) == 0
    assert dividing_axis((5, 7), 2) is None
    assert dividing_axis((), 2) is None
    assert dividing_axis((0, 3), 2) is None
    assert dividing_axis((3,), 1) == 0


def test_a_distribution_of_one_device_trains_variables_from_before():
    weight = keras.Variable([1.0, 2.0])
    optimizer = ks.CrossShard(keras.optimizers.SGD(0.5))
    optimizer.build([weight])
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=["cpu:0"]))
    optimizer.apply([ops.ones(2)], [weight])
    assert weight.value.tolist() == [0.5, 1.5]
