"""Divided state, with replicas that are threads: policy without any framework's distribution."""

import keras
import numpy as np
import pytest
from support.suites import some
from support.worlds import FakeWorld

import keras_shardopt as ks
from keras_shardopt.backends.active import placement, processes
from keras_shardopt.backends.communicator import GradientState

SHAPES = [(7, 5), (5,), (5, 3), ()]


def weights():
    random = np.random.default_rng(1)
    return [keras.Variable(random.normal(size=s).astype("float32"), name=f"w{i}") for i, s in enumerate(SHAPES)]


def grads(replica, step):
    """Multiples of 1/64, whose sums are exact."""
    random = np.random.default_rng(100 * step + replica)
    return [(random.integers(-64, 64, size=s) / 64 * (replica + 1)).astype("float32") for s in SHAPES]


@pytest.fixture(params=[2, 3, 8] if keras.config.backend() == "torch" else [2, 3])
def world(request, monkeypatch):
    made = FakeWorld(request.param, is_spmd=False).hold(monkeypatch)
    monkeypatch.setattr(placement, "state_sharding", "slices")
    return made


def trained(make, arrives, world, replicas, num_steps=3):
    mine = weights()
    optimizer = ks.CrossShard(make(), shard_state=True, gradients=arrives.value)
    optimizer.build(mine)
    optimizer.peers.started = replicas
    for step in range(num_steps):
        own = grads(replicas.replica_id, step)
        if arrives is GradientState.LOCAL_PRESCALED:
            own = [g / world.num_replicas for g in own]
        elif arrives is GradientState.GLOBAL:
            own = [sum(g) / world.num_replicas for g in zip(*[grads(r, step) for r in range(world.num_replicas)])]
        optimizer.apply([keras.ops.convert_to_tensor(np.asarray(g, "float32")) for g in own], mine)
    return optimizer, mine


INNER = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.5),
    "clipped": lambda: ks.GradientClipping(keras.optimizers.SGD(0.1), 0.5),
}


# On JAX state is divided by a layout, and updates of slices are not traced.
@pytest.mark.backends("torch", "tensorflow")
@pytest.mark.parametrize(
    ("inner", "arrives"),
    some(
        [
            *[
                ("momentum", arrives)
                for arrives in (GradientState.LOCAL, GradientState.LOCAL_PRESCALED, GradientState.GLOBAL)
            ],
            ("clipnorm", GradientState.LOCAL),
            ("clipped", GradientState.LOCAL),
        ],
        [("momentum", GradientState.LOCAL_PRESCALED), ("clipped", GradientState.LOCAL)],
        "tensorflow",
    ),
)
def test_replicas_update_as_one_does(world, inner, arrives):
    alone, optimizer = weights(), INNER[inner]()
    for step in range(3):
        means = [sum(g) / world.num_replicas for g in zip(*[grads(r, step) for r in range(world.num_replicas)])]
        optimizer.apply([keras.ops.convert_to_tensor(np.asarray(g, "float32")) for g in means], alone)
    results = world.run(lambda replicas: trained(INNER[inner], arrives, world, replicas))
    for _, mine in results:
        for variable, reference in zip(mine, alone):
            np.testing.assert_allclose(np.array(variable), np.array(reference), rtol=0, atol=1e-6)
    held = [sum(int(np.prod(v.shape)) for v in o.variables if len(v.shape)) for o, _ in results]
    assert sum(held) == (0 if inner == "clipped" else sum(int(np.prod(s)) for s in SHAPES))
    if inner == "momentum":
        assert max(held) == -(-sum(held) // world.num_replicas)
        moves = [call[0] for call in world.replicas[0].calls]
        assert moves.count("all_reduce") == (
            0 if arrives is GradientState.GLOBAL else 3
        )  # the fake's reduce-scatter is one


@pytest.mark.neutral
def test_some_variables_in_another_order_are_updated_alone(world):
    order = [2, 0]

    def updated(optimizer, mine, values):
        optimizer.build(mine)
        chosen = [keras.ops.convert_to_tensor(np.asarray(values[i], "float32")) for i in order]
        optimizer.apply(chosen, [mine[i] for i in order])
        return [keras.ops.convert_to_numpy(variable) for variable in mine]

    def of_replica(replicas):
        optimizer = ks.CrossShard(INNER["momentum"](), shard_state=True, fused=False)
        return updated(optimizer, weights(), grads(replicas.replica_id, 0))

    means = [sum(g) / world.num_replicas for g in zip(*[grads(r, 0) for r in range(world.num_replicas)])]
    alone = updated(INNER["momentum"](), weights(), means)
    for mine in world.run(of_replica):
        for value, reference in zip(mine, alone):
            np.testing.assert_allclose(value, reference, rtol=0, atol=1e-6)


@pytest.mark.neutral
@pytest.mark.skipif(not hasattr(keras.optimizers, "ScheduleFreeAdamW"), reason="this Keras has no ScheduleFreeAdamW")
def test_parts_of_the_state_must_belong_to_the_same_update_and_to_the_weights(monkeypatch):
    world = FakeWorld(2, is_spmd=False).hold(monkeypatch)
    monkeypatch.setattr(placement, "state_sharding", "slices")
    prints = np.ones((2, len(SHAPES)))
    prints[1, 2] = 2  # other weights
    monkeypatch.setattr(placement, "fingerprints", lambda variables: prints)

    def check(make, updates):
        def work(replicas):
            optimizer = ks.CrossShard(make(), shard_state=True)
            optimizer.build(weights())
            optimizer._shards.check_start(updates[replicas.replica_id])

        monkeypatch.setattr(processes, "gather_objects", lambda value: updates)
        world.run(work)

    check(keras.optimizers.Adam, [0, 0])  # all take the weights of the first replica
    for make, updates, words in (
        (keras.optimizers.Adam, [0, 1], "updates so far, by replica: .0, 1.. Load"),
        (keras.optimizers.Adam, [1, 1], "by replica: .1, 1., and weights that differ"),
        (keras.optimizers.ScheduleFreeAdamW, [0, 0], "by replica: .0, 0., and weights that differ"),
    ):
        with pytest.raises(ValueError, match=words):
            check(make, updates)


def test_arguments():
    with pytest.raises(ValueError, match="Remove one of the two"):
        ks.CrossShard("sgd", group_assignment=[[0], [1]], shard_state=True)
    with pytest.raises(TypeError, match="shard_state"):
        ks.CrossShard("sgd", shard_state="yes")
    with pytest.raises(ValueError, match="before the build"):
        ks.CrossShard("sgd", shard_state=True).memory_report()
    optimizer = ks.CrossShard("sgd", shard_state=True)
    assert ks.CrossShard.from_config(optimizer.get_config()).shard_state
    assert "shard_state=True" in repr(optimizer)
