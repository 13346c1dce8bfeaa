import keras
import numpy as np
import pytest
from support.reducing import global_gradients
from support.worlds import FakeWorld

from keras_shardopt.backends.communicator import GradientState, SingleReplica
from keras_shardopt.backends.side_channel import marks

SHAPES = [(3, 2), (5,), ()]


class Weight:
    """As much of a variable as the policy looks at."""

    def __init__(self, shape, overwrite_with_gradient=False):
        self.shape = shape
        self.dtype = "float32"
        self.overwrite_with_gradient = overwrite_with_gradient


WEIGHTS = [Weight(shape) for shape in SHAPES]


def local_gradients(num_replicas):
    """`[replica][variable]`: the gradient of each replica's own mean loss, all different."""
    random = np.random.default_rng(3)
    return [[random.normal(size=shape).astype("float32") for shape in SHAPES] for _ in range(num_replicas)]


def as_they_arrive(local, gradient_state):
    """What each replica holds when gradients arrive in that way."""
    n = len(local)
    total = [np.sum([g[i] for g in local], axis=0) for i in range(len(SHAPES))]
    return {
        GradientState.LOCAL: local,
        GradientState.LOCAL_PRESCALED: [[g / n for g in grads] for grads in local],
        GradientState.SUMMED: [total] * n,
        GradientState.GLOBAL: [[t / n for t in total]] * n,
    }[gradient_state]


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("gradient_state", GradientState)
@pytest.mark.parametrize("told", [True, False])
def test_every_gradient_state_leads_to_the_same_global_gradient(num_replicas, reduction, gradient_state, told):
    local = local_gradients(num_replicas)
    arrived = as_they_arrive(local, gradient_state)
    world = FakeWorld(num_replicas, arrives=GradientState.GLOBAL if told else gradient_state)

    def reduce(replicas):
        grads = [keras.ops.convert_to_tensor(g) for g in arrived[replicas.replica_id]]
        return global_gradients(grads, WEIGHTS, replicas, reduction, gradient_state if told else None)

    results = world.run(reduce)
    for i in range(len(SHAPES)):
        expected = getattr(np, reduction)([g[i] for g in local], axis=0)
        for grads in results:
            np.testing.assert_allclose(keras.ops.convert_to_numpy(grads[i]), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gradient_state", [GradientState.LOCAL, GradientState.LOCAL_PRESCALED])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_collective_per_update(gradient_state, reduction):
    world = FakeWorld(2, arrives=gradient_state)
    local = local_gradients(2)
    world.run(lambda r: global_gradients([keras.ops.array(g) for g in local[r.replica_id]], WEIGHTS, r, reduction))
    for replicas in world.replicas:
        assert [call[0] for call in replicas.calls if call[2]] == ["all_reduce"]


def test_gradients_that_are_global_are_handed_on_untouched():
    grads = [object(), None, object()]
    assert global_gradients(grads, WEIGHTS, SingleReplica()) == grads
    assert global_gradients(grads, WEIGHTS, SingleReplica(), "sum") == grads


def test_none_everywhere_stays_none():
    world = FakeWorld(2)
    results = world.run(lambda r: global_gradients([None, keras.ops.ones((5,)), None], WEIGHTS, r))
    for grads in results:
        assert grads[0] is None and grads[2] is None
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(grads[1]), np.ones(5))


def test_none_on_some_replicas_counts_as_zero_on_all():
    world = FakeWorld(3, is_spmd=False)

    def reduce(replicas):
        mine = 1.0 + replicas.replica_id
        grads = [mine * keras.ops.ones((3, 2)), None if replicas.replica_id else mine * keras.ops.ones((5,)), None]
        return global_gradients(grads, WEIGHTS, replicas)

    for grads in world.run(reduce):
        np.testing.assert_allclose(keras.ops.convert_to_numpy(grads[0]), np.full((3, 2), 2.0))
        np.testing.assert_allclose(keras.ops.convert_to_numpy(grads[1]), np.full(5, 1 / 3), rtol=1e-6)
        assert grads[2] is None
    assert all(len([c for c in replicas.calls if c[2]]) == 1 for replicas in world.replicas)


@pytest.mark.parametrize("is_spmd", [True, False])
def test_next_values_take_the_largest_and_are_never_averaged(is_spmd):
    weights = [Weight((2,)), Weight((3,), overwrite_with_gradient=True)]
    world = FakeWorld(2, arrives=GradientState.LOCAL_PRESCALED, is_spmd=is_spmd)

    def reduce(replicas):
        value = keras.ops.array([[1.0, 5.0, 0.0], [4.0, 2.0, 0.0]][replicas.replica_id])
        return global_gradients([keras.ops.ones((2,)), value], weights, replicas)

    for grads in world.run(reduce):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(grads[0]), [2.0, 2.0])
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(grads[1]), [4.0, 5.0, 0.0])


@pytest.mark.parametrize("gradient_state", [GradientState.SUMMED, GradientState.GLOBAL])
def test_next_values_that_are_global_stay_as_they_are(gradient_state):
    weights = [Weight((2,), overwrite_with_gradient=True)]
    world = FakeWorld(2, arrives=gradient_state)
    for grads in world.run(lambda r: global_gradients([keras.ops.array([3.0, 4.0])], weights, r, "sum")):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(grads[0]), [3.0, 4.0])


FROZEN = {
    "on one": [[True] * 3, [True] * 3, [True, False, True]],
    "on all but one": [[False, True, True], [True] * 3, [False, True, True]],
    "others on each": [[True, True, False], [True, False, True], [False, True, True]],
    "all of them": [[True] * 3, [False] * 3, [True] * 3],
}


def reduced_with_frozen(trained, reduction="mean"):
    """What each replica gets, or the message of its error, if it trains what `trained` says and gives the rest None."""

    def reduce(replicas):
        mine = trained[replicas.replica_id]
        grads = [keras.ops.ones(shape) if given else None for shape, given in zip(SHAPES, mine)]
        try:
            return global_gradients(grads, WEIGHTS, replicas, reduction, GradientState.LOCAL, mine)
        except ValueError as error:
            return str(error)

    return FakeWorld(len(trained), is_spmd=False).run(reduce)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("case", FROZEN)
def test_what_some_replicas_have_frozen_is_named_on_all(monkeypatch, case, reduction):
    for i, weight in enumerate(WEIGHTS):
        monkeypatch.setattr(weight, "path", f"w{i}", raising=False)
    for message in reduced_with_frozen(FROZEN[case], reduction):
        assert "must train the same variables" in message
        for replica, trained in enumerate(FROZEN[case]):
            names = ", ".join(f"`w{i}`" for i, given in enumerate(trained) if not given)
            words = f"{names} not trained" if names else "all trained"
            assert f"{words} on replica {replica}" in message


def test_what_all_replicas_have_frozen_has_no_gradient():
    for grads in reduced_with_frozen([[True, False, True]] * 5):
        assert grads[1] is None
        np.testing.assert_allclose(keras.ops.convert_to_numpy(grads[0]), np.ones(SHAPES[0]))


def test_marks_of_different_sets_of_variables_differ():
    sets = [tuple(bool(i >> k & 1) for k in range(7)) for i in range(128)]
    found = [tuple(marks(each)) for each in sets]
    assert len(set(found)) == 128 and {sum(each) for each in found} == {10}
    assert marks(None) == marks([True] * 300)
