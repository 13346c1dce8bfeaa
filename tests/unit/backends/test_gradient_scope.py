"""Each optimizer has the scope of the `CrossShard` around it, and scopes lie in each other as these do."""

import copy

import keras
from support.worlds import FakeWorld

import keras_shardopt as ks
from keras_shardopt.backends.gradient_scope import OUTSIDE, claim_reduction


def made():
    clipping = ks.GradientClipping(keras.optimizers.SGD(), 1.0)
    nearer = ks.CrossShard(clipping, shard_state=True)
    scaling = ks.LossScaling(nearer)
    return ks.CrossShard(scaling), scaling, nearer, clipping


def test_a_scope_is_that_of_the_next_cross_shard_outside():
    outer, scaling, nearer, clipping = made()
    assert scaling._scope is nearer._scope is outer.scope_inside
    assert clipping._scope is nearer.scope_inside
    assert ks.LossScaling("sgd")._scope is OUTSIDE


def test_what_is_reduced_outside_is_so_inside_and_not_the_other_way_round():
    outer, scaling, nearer, clipping = made()
    parts = outer, scaling, nearer, clipping
    for block, expected in (
        (claim_reduction([outer]), [True, True, True, True]),
        (outer.scope_inside.reduced(), [False, True, True, True]),
        (nearer.scope_inside.reduced(), [False, False, False, True]),
    ):
        with block:
            assert [part._scope.is_reduced for part in parts] == expected
        assert not any(part._scope.is_reduced for part in parts)


def test_a_block_within_the_same_block_and_an_error_leave_nothing_behind():
    outer, *_ = made()
    try:
        with outer._scope.reduced(), outer._scope.reduced():
            raise ZeroDivisionError
    except ZeroDivisionError:
        assert not outer._scope.is_reduced


def test_slices_are_seen_inside_of_what_divides_only():
    _, scaling, nearer, clipping = made()
    nearer.scope_inside.holds_slices = True
    assert clipping._scope.holds_slices
    assert not scaling._scope.holds_slices


def test_groups_have_an_axis():
    inside = ks.LossScaling("sgd")
    ks.CrossShard(inside, group_assignment=[[0, 1], [2, 3]], axis_name="data")
    assert inside._scope.group_axis == "data"


def test_a_copy_has_scopes_of_its_own():
    outer = ks.CrossShard(ks.LossScaling("sgd"))
    copied = copy.deepcopy(outer)
    assert copied.inner._scope is copied.scope_inside is not outer.scope_inside
    with copied._scope.reduced():
        assert copied.inner._scope.is_reduced and not outer.inner._scope.is_reduced


def test_groups_of_an_outer_one_are_known_further_in():
    scaling = ks.LossScaling("sgd")
    ks.CrossShard(ks.CrossShard(scaling), group_assignment=[[0], [1]], axis_name="data")
    assert scaling._scope.group_axis == "data"


def test_an_optimizer_inside_follows_the_one_around_it_that_updates(monkeypatch):
    inner = ks.CrossShard(keras.optimizers.SGD(1.0), reduction="sum")
    first = ks.CrossShard(inner)
    ks.CrossShard(inner)  # made later, and never used
    world = FakeWorld(2).hold(monkeypatch)
    weights = [keras.Variable([0.0]) for _ in range(2)]
    first.build([weights[0]])

    def update(replicas):
        if replicas.replica_id == 0:
            first.apply([keras.ops.convert_to_tensor([2.0])], [weights[0]])
        else:
            ks.CrossShard(keras.optimizers.SGD(1.0)).apply([keras.ops.convert_to_tensor([4.0])], [weights[1]])

    world.run(update)
    assert float(keras.ops.convert_to_numpy(weights[0])[0]) == -3.0  # the mean, once
