"""All arguments of `CrossShard` with each other, on replicas in threads, against NumPy."""

import inspect
import itertools

import keras
import numpy as np
import pytest
from promises.problems import every_argument, pairwise
from support import suites
from support.worlds import FakeWorld

import keras_shardopt as ks
from keras_shardopt.backends.active import placement, runtime
from keras_shardopt.backends.communicator import GradientState
from keras_shardopt.update.old_arguments import KINDS

# Updates in threads are not traced, as JAX would have it.
# Replicas in threads: TensorFlow's own operations fail there now and then ("Error while creating shape").
eager = pytest.mark.backends("torch")
pytestmark = pytest.mark.neutral
ROWS = every_argument.rows()
THREESOMES = every_argument.threesomes()


@pytest.fixture
def world_of(monkeypatch):
    """Makes the replicas that a row needs, each with a copy of all variables."""

    def made(row):
        world = FakeWorld(
            every_argument.NUM_REPLICAS, GradientState(row["gradients"][1]), is_spmd=row["program"] == "one"
        )
        if row["gradients"][0] != "auto":  # what is said counts, and not what is found
            local, reduced = (
                (GradientState.LOCAL, GradientState.LOCAL_PRESCALED),
                (GradientState.SUMMED, GradientState.GLOBAL),
            )
            (world.arrives,) = {*(local if world.arrives in local else reduced)} - {world.arrives}
        factors = every_argument.first_weights(row) or [1.0] * world.num_replicas
        monkeypatch.setattr(placement, "broadcast_state", lambda *given: factors[given[2].world.replica_id])
        asked = world.asked = []

        def replicas(axis_name):
            asked.append(axis_name)
            return world._running.replicas

        monkeypatch.setattr(runtime, "communicator", replicas)
        monkeypatch.setattr(placement, "state_sharding", "slices" if row["program"] == "several" else "copies")
        monkeypatch.setattr(placement, "replica_values", lambda v: [np.array(v)] * world.num_replicas)
        monkeypatch.setattr(
            placement, "assign_replica_values", lambda v, arrays: v.assign(arrays[world._running.replicas.replica_id])
        )
        return world

    return made


def run(row, world):
    def work(replicas):
        mine = every_argument.variables(row)
        optimizer = every_argument.cross_shard(row)
        optimizer.build(mine)
        return mine, optimizer, every_argument.train(row, replicas, mine, optimizer, replicas.replica_id)

    return world.run(work)


@eager
@pytest.mark.filterwarnings("ignore")  # of gradients that do not exist
@pytest.mark.parametrize("row", suites.some(ROWS + THREESOMES, ROWS), ids=every_argument.told)
def test_replicas_do_what_the_docstring_says(row, world_of):
    world = world_of(row)
    for replica, (mine, optimizer, errors) in enumerate(run(row, world)):
        weights = [keras.ops.convert_to_numpy(v) for v in mine]
        every_argument.check(row, replica, weights, optimizer, errors)
        assert (optimizer._shards is not None) == row["shard_state"]
        assert optimizer.name == (row["name"] or optimizer.name)
    assert world.asked[0] == row["axis_name"]


@eager
@pytest.mark.parametrize(
    ("when", "words", "pair"),
    [
        (when, words, dict(zip(rule, levels)))
        for when, words, rule in every_argument.REFUSED
        for levels in itertools.product(*rule.values())
    ],
    ids=str,
)
def test_what_is_left_out_is_refused(when, words, pair, world_of):
    # Several programs: only there is an update of parts refused for nothing but what `pair` says.
    row = {**every_argument.DEFAULTS, "program": "several", **pair}
    if when == "made":
        with pytest.raises(ValueError, match=words):
            every_argument.cross_shard(row)
        return
    every_argument.cross_shard(row)
    with pytest.raises(ValueError, match=words):
        run(row, world_of(row))


def test_every_pair_is_there():
    levels, rules = every_argument.LEVELS, every_argument.RULES
    wanted = set()
    for a, b in itertools.combinations(levels, 2):
        for pair in itertools.product(levels[a], levels[b]):
            if not any(
                set(rule) <= {a, b} and all(dict(zip((a, b), pair))[f] in rule[f] for f in rule) for rule in rules
            ):
                wanted.add(frozenset(zip((a, b), pair)))
    found = {frozenset(pair) for row in ROWS for pair in itertools.combinations(row.items(), 2)}
    assert wanted - found == set()
    assert all(row.keys() == levels.keys() for row in ROWS)
    for row in ROWS:
        assert not any(all(row[f] in rule[f] for f in rule) for rule in rules), row
    largest = sorted(map(len, levels.values()))[-2:]
    assert len(ROWS) <= 1.6 * largest[0] * largest[1], len(ROWS)


def test_every_argument_is_there():
    parameters = inspect.signature(ks.CrossShard).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    assert {kind.spelling.partition("=")[0] for kind in KINDS} == {"extensions", "torch"}
    for name in ("extensions", "torch", "old"):  # those of the objects, in their old spelling
        del defaults[name]
    for kind in KINDS:
        defaults.update(kind.old_arguments)
    arguments = defaults.keys() - every_argument.OF_TRAINERS
    assert arguments == every_argument.LEVELS.keys() - every_argument.NOT_ARGUMENTS
    for name in arguments - {"inner_optimizer", "gradients"}:
        assert defaults[name] in every_argument.LEVELS[name], name
        assert len(every_argument.LEVELS[name]) > 1, name


def test_a_pair_that_is_missing_is_found_and_a_rule_is_kept():
    levels = {"a": [0, 1], "b": [0, 1], "c": [0, 1, 2]}
    rules = [{"a": [1], "b": [1]}]
    rows = pairwise.covering_rows(levels, rules)
    assert set.union(*map(pairwise.pairs_of, rows)) == pairwise.possible_pairs(levels, rules)
    assert len(pairwise.possible_pairs(levels, rules)) == 4 - 1 + 6 + 6
    assert not any(pairwise.is_forbidden(row, rules) for row in rows)
    with pytest.raises(ValueError, match="No row"):  # no level of b is left next to these
        pairwise.covering_rows(levels, [{"a": [1], "b": [0]}, {"c": [1], "b": [1]}, {"c": [0, 2], "b": [1], "a": [1]}])
