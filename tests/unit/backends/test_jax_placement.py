"""JAX: along which axis a variable's state is laid out over the devices, and which variables may be there."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_shardopt as ks

pytestmark = pytest.mark.backends("jax")


MESHES = [
    # shape, the model's axes, mesh, expected axes
    ((5, 7, 8), "", {"batch": 4}, ",,batch"),
    ((8, 8), "", {"batch": 4}, "batch,"),
    ((5, 7), "", {"batch": 2}, ","),
    ((), "", {"batch": 2}, None),
    ((0, 3), "", {"batch": 2}, ","),
    ((3,), "", {"batch": 1}, ""),
    ((16, 24), "", {"batch": 2, "model": 4}, "batch+model,"),  # one dimension is enough
    ((6, 8), "", {"batch": 2, "model": 4}, ",batch+model"),
    ((6, 12), "", {"batch": 2, "model": 4}, "batch,model"),
    ((3, 4), "", {"batch": 2, "model": 4}, ",model"),  # as many parts as possible
    ((16, 24), ",model", {"batch": 2, "model": 4}, "batch,model"),  # the dimension that is whole
    ((16, 24), "model,", {"batch": 2, "model": 4}, "model,batch"),
    ((15, 24), ",model", {"batch": 2, "model": 4}, ",model+batch"),
    ((24,), "model", {"batch": 2, "model": 4}, "model+batch"),
    ((16, 24), "batch,", {"batch": 2, "model": 4}, "batch,model"),
    ((16, 24), "", {"batch": 1, "model": 4}, "model,"),
]


@pytest.mark.parametrize(("shape", "model", "mesh", "expected"), MESHES)
def test_axes_that_the_model_leaves_free_divide_state(shape, model, mesh, expected):
    from keras_shardopt.backends.jax.placement import with_free_axes

    def axes(text):
        return [tuple(filter(None, names.split("+"))) for names in text.split(",")]

    own = axes(model) if model else [()] * len(shape)
    assert with_free_axes(shape, own, mesh) == ([] if expected is None else axes(expected))


def test_a_distribution_of_one_device_trains_variables_from_before():
    weight = keras.Variable([1.0, 2.0])
    optimizer = ks.CrossShard(keras.optimizers.SGD(0.5))
    optimizer.build([weight])
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=["cpu:0"]))
    optimizer.apply([ops.ones(2)], [weight])
    assert weight.value.tolist() == [0.5, 1.5]


def test_values_of_replicas_are_whole_rows_on_a_mesh_of_two_dimensions():
    from keras_shardopt.backends.active import placement

    mesh = keras.distribution.DeviceMesh((2, 4), ["batch", "model"], [f"cpu:{i}" for i in range(8)])
    layouts = keras.distribution.LayoutMap(mesh)
    keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch"))
    variable = keras.Variable(np.zeros((8, 3), "float32"))
    placement.place([variable], "per_replica")
    assert {shard.data.shape for shard in variable.value.addressable_shards} == {(1, 2, 3)}
    rows = [np.arange(24, dtype="float32").reshape(8, 3) + 100 * replica for replica in range(2)]
    placement.assign_replica_values(variable, rows)
    np.testing.assert_array_equal(variable.value, rows)
    np.testing.assert_array_equal(placement.replica_values(variable), rows)
