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


def loads(owned):
    return [sum(piece.size for piece in pieces) for pieces in owned]


@each_number
@each_size
@pytest.mark.parametrize("share_whole", [0.0, 0.5, 1.0])
def test_every_element_has_one_owner_who_has_it_in_one_piece(name, num_replicas, share_whole):
    sizes = SIZES[name]
    may_cut = [i >= share_whole * len(sizes) for i in range(len(sizes))]
    owned = partition.divide(sizes, may_cut, num_replicas)
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
    owned = partition.divide(sizes, [True] * len(sizes), num_replicas)
    assert max(loads(owned)) == math.ceil(sum(sizes) / num_replicas)


@pytest.mark.parametrize("num_replicas", [2, 3, 4, 8])
def test_no_replica_holds_two_percent_more_than_its_share(num_replicas):
    for name in ("embedding of 95 %", "transformer"):
        sizes = SIZES[name]
        for whole in ([], [1], [1, 2, 3]):
            owned = partition.divide(sizes, [i not in whole for i in range(len(sizes))], num_replicas)
            if max((sizes[i] for i in whole), default=0) <= sum(sizes) / num_replicas:
                assert max(loads(owned)) * num_replicas <= 1.02 * sum(sizes)


def test_whole_variables_go_to_whom_has_least():
    sizes = [5, 9, 1, 6, 3]
    owned = partition.divide(sizes, [False] * 5, 2)
    assert loads(owned) == [12, 12]  # 9 + 3 and 6 + 5 + 1
    # An embedding that cannot be cut is the limit of what whole variables can be divided into.
    assert max(loads(partition.divide([950, 30, 20], [False] * 3, 4))) == 950
