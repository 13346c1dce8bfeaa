"""Who owns what: nothing twice, nothing left out, and nobody much more than the others."""

import math

import numpy as np
import pytest

from keras_shardopt.sharding import partition

pytestmark = pytest.mark.neutral

SIZES = {
    "one": [1],
    "fewer elements than replicas": [2, 1],
    "odd": [35, 7, 21, 3, 0, 1],
    "embedding of 95 %": [950_000, 20_000, 20_000, 100, 9_900],
    "transformer": [512 * 1000, *[512 * 512, 512, 512 * 2048, 2048] * 6],
}
each_size = pytest.mark.parametrize("name", SIZES)
each_number = pytest.mark.parametrize("num_replicas", [1, 2, 3, 4, 8])


def divided(sizes, may_cut, num_replicas, costs=None):
    return partition.divide(sizes, may_cut, costs or [(size, 1) for size in sizes], num_replicas)


def loads(owned):
    return [sum(piece.size for piece in pieces) for pieces in owned]


@each_number
@each_size
@pytest.mark.parametrize("share_whole", [0.0, 0.5, 1.0])
def test_every_element_has_one_owner_who_has_it_in_one_piece(name, num_replicas, share_whole):
    sizes = SIZES[name]
    may_cut = [i >= share_whole * len(sizes) for i in range(len(sizes))]
    owned = divided(sizes, may_cut, num_replicas)
    assert len(owned) == num_replicas
    owners = [np.full(size, -1) for size in sizes]
    for replica, pieces in enumerate(owned):
        assert [p.variable for p in pieces] == sorted({p.variable for p in pieces})
        for piece in pieces:
            assert (owners[piece.variable][piece.start : piece.stop] == -1).all()
            owners[piece.variable][piece.start : piece.stop] = replica
            assert may_cut[piece.variable] or piece.size == sizes[piece.variable]
    for mine in owners:
        assert (mine >= 0).all()
        assert (np.diff(mine) >= 0).all()  # pieces in the order of the replicas join to the variable


@each_number
@each_size
def test_what_may_be_cut_is_balanced_to_the_element(name, num_replicas):
    sizes = SIZES[name]
    owned = divided(sizes, [True] * len(sizes), num_replicas)
    assert max(loads(owned)) == math.ceil(sum(sizes) / num_replicas)


@pytest.mark.parametrize("num_replicas", [2, 3, 4, 8])
def test_no_replica_holds_two_percent_more_than_its_share(num_replicas):
    for name in ("embedding of 95 %", "transformer"):
        sizes = SIZES[name]
        for whole in ([], [1], [1, 2, 3]):
            owned = divided(sizes, [i not in whole for i in range(len(sizes))], num_replicas)
            if max((sizes[i] for i in whole), default=0) <= sum(sizes) / num_replicas:
                assert max(loads(owned)) * num_replicas <= 1.02 * sum(sizes)


def test_whole_variables_go_to_whom_has_least():
    sizes = [5, 9, 1, 6, 3]
    owned = divided(sizes, [False] * 5, 2)
    assert loads(owned) == [12, 12]  # 9 + 3 and 6 + 5 + 1
    # An embedding that cannot be cut is the limit of what whole variables can be divided into.
    assert max(loads(divided([950, 30, 20], [False] * 3, 4))) == 950


def test_work_counts_for_whole_variables_and_size_for_the_others():
    sizes, costs = [100, 10, 10, 10, 70], [(1, 1), (9, 1), (9, 1), (9, 1), (1, 1)]
    owned = divided(sizes, [False] * 4 + [True], 2, costs)
    work = [sum(costs[p.variable][0] for p in pieces if p.variable < 4) for pieces in owned]
    assert sorted(work) == [10, 18]  # by size, one replica would get all three expensive ones
    assert loads(owned) == [100, 100] or sorted(loads(owned)) == [90, 110]


def test_small_variables_are_spread_like_whole_ones():
    """On a GPU hundreds of small updates take as long as a large one: each waits for Python."""
    sizes = [3000, 1000, 1000, *[1] * 12]
    owned = divided(sizes, [True, False, False, *[True] * 12], 2)
    assert [len(pieces) for pieces in owned] == [8, 8]
    assert loads(owned) == [2506, 2506]
    # If all variables may be split, only the level counts.
    assert [len(pieces) for pieces in divided(sizes, [True] * 15, 2)] == [1, 15]
