import keras
import pytest
from keras import ops

import keras_shardopt as ks

WRAPPERS = {
    "CrossShard": ks.CrossShard,
    "GradientClipping": lambda inner: ks.GradientClipping(inner, 1.0),
    "two": lambda inner: ks.CrossShard(ks.LARC(inner, 0.1)),
    "around LossScaleOptimizer": lambda inner: ks.CrossShard(keras.optimizers.LossScaleOptimizer(inner)),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_slots_are_the_inner_optimizers_state(wrapper):
    inner = keras.optimizers.Adam(0.1)
    optimizer = WRAPPERS[wrapper](inner)
    # Names of which one starts with the other, and two variables of one path.
    weights = [keras.Variable([1.0], name=name) for name in ("a", "a_b", "same", "same")]
    assert optimizer.get_slot_names() == []
    assert optimizer.get_slot(weights[0], "momentum") is None
    optimizer.build(weights)
    assert optimizer.get_slot_names() == ["momentum", "velocity"]
    for i, weight in enumerate(weights):
        assert optimizer.get_slot(weight, "momentum") is inner._momentums[i]
        assert optimizer.get_slot(weight, "velocity") is inner._velocities[i]
    assert optimizer.get_slot(weights[0], "nonsense") is None
    assert optimizer.get_slot(keras.Variable([1.0]), "momentum") is None


def test_slots_of_several_optimizers():
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("needs a Keras with MultiOptimizer")
    weights = [keras.Variable([1.0], name="a"), keras.Variable([1.0], name="b")]
    rules = keras.optimizers.OptimizerMap(keras.optimizers.Adam(), {"b": keras.optimizers.SGD(momentum=0.9)})
    optimizer = ks.CrossShard(keras.optimizers.MultiOptimizer(rules))
    optimizer.build(weights)
    assert optimizer.get_slot_names() == ["momentum", "velocity"]
    assert optimizer.get_slot(weights[1], "velocity") is None
    optimizer.apply([ops.ones(1), ops.ones(1)], weights)
    assert float(optimizer.get_slot(weights[0], "velocity")[0]) > 0
    assert float(optimizer.get_slot(weights[1], "momentum")[0]) < 0


def test_slots_of_an_optimizer_that_is_not_wrapped():
    optimizer = ks.NovoGrad(0.1, name="mine")
    weights = [keras.Variable([1.0], name=name) for name in ("a", "a_b", "same", "same")]
    assert optimizer.get_name() == "mine"
    assert optimizer.get_slot_names() == []
    assert optimizer.get_slot(weights[0], "momentum") is None
    optimizer.build(weights)
    assert optimizer.get_slot_names() == ["momentum", "second_moment"]
    for i, weight in enumerate(weights):
        assert optimizer.get_slot(weight, "momentum") is optimizer._momentums[i]
        assert optimizer.get_slot(weight, "second_moment") is optimizer._second_moments[i]
    assert ks.CrossShard(ks.NovoGrad(0.1)).get_name() == "cross_shard"


def test_optimizers_without_state_have_no_slots():
    optimizer = ks.CrossShard(keras.optimizers.SGD())
    optimizer.build([keras.Variable([1.0])])
    assert optimizer.get_slot_names() == []


def test_name():
    assert ks.CrossShard("sgd").get_name() == "cross_shard"
    assert ks.CrossShard("sgd", name="mine").get_name() == "mine"
