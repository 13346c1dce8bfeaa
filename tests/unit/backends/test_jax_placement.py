"""JAX: along which axis a variable's state is laid out over the devices."""

import pytest

pytestmark = pytest.mark.backends("jax")


def test_the_axis_that_divides():
    from keras_shardopt.backends.jax.placement import dividing_axis

    assert dividing_axis((5, 7, 8), 4) == 2
    assert dividing_axis((8, 8), 4) == 0
    assert dividing_axis((5, 7), 2) is None
    assert dividing_axis((), 2) is None
    assert dividing_axis((0, 3), 2) is None
    assert dividing_axis((3,), 1) == 0
