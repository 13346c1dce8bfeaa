"""Gradients that are added up in half precision."""

import keras
import numpy as np
import pytest
from support import problem
from support.suites import some
from support.worlds import FakeReplicas, FakeWorld

import keras_shardopt as ks
from keras_shardopt.backends.communicator import GradientState

SHAPES = [(7, 5), (5,), ()]
UNITS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


def weights():
    return [keras.Variable(np.zeros(s, "float32"), name=f"w{i}") for i, s in enumerate(SHAPES)]


def grads(replica, scale=1.0):
    random = np.random.default_rng(replica)
    return [(scale * random.normal(size=s)).astype("float32") for s in SHAPES]


@pytest.fixture
def sent(monkeypatch):
    """The dtypes in which replicas send."""
    found = []
    real = FakeReplicas.all_reduce

    def all_reduce(self, tensors, op):
        found.extend(keras.backend.standardize_dtype(t.dtype) for t in tensors)
        with np.errstate(all="ignore"):
            totals = real(self, [keras.ops.cast(t, "float32") for t in tensors], op)
        return [keras.ops.cast(total, t.dtype) for total, t in zip(totals, tensors)]

    monkeypatch.setattr(FakeReplicas, "all_reduce", all_reduce)
    return found


def updated(world, gradient_state, scales=None, offset=0.0, **arguments):
    """What each replica's weights are moved by, and its optimizer."""

    def work(replicas):
        mine, own = weights(), grads(replicas.replica_id, 1.0 if scales is None else scales[replicas.replica_id])
        own = [g + np.float32(offset) for g in own]
        if gradient_state is GradientState.LOCAL_PRESCALED:
            own = [g / world.num_replicas for g in own]
        optimizer = ks.CrossShard(keras.optimizers.SGD(1.0), gradients=gradient_state.value, **arguments)
        optimizer.build(mine)
        optimizer.peers.started = replicas
        optimizer.apply([keras.ops.convert_to_tensor(np.asarray(g, "float32")) for g in own], mine)
        return [-np.array(v) for v in mine], optimizer

    return world.run(work)


# Updates in threads are not traced under JAX; its collectives are below.
@pytest.mark.backends("torch", "tensorflow")
@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("gradient_state", [GradientState.LOCAL, GradientState.LOCAL_PRESCALED])
def test_the_error_is_bounded(monkeypatch, sent, dtype, reduction, gradient_state):
    world = FakeWorld(3, arrives=gradient_state, is_spmd=False).hold(monkeypatch)
    everyones = list(zip(*[grads(r) for r in range(3)]))
    factor = 3 if reduction == "sum" else 1
    for moved, _ in updated(world, gradient_state, reduction=reduction, compression=dtype):
        for found, local in zip(moved, everyones):
            error = np.abs(found / factor - np.mean(local, axis=0))
            assert (error <= 4 * UNITS[dtype] * np.mean(np.abs(local), axis=0) + 1e-7).all()
            assert np.max(error) > 0
    assert set(sent) == {dtype}


@pytest.mark.backends("torch", "tensorflow")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("gradient_state", [GradientState.LOCAL, GradientState.LOCAL_PRESCALED])
def test_within_groups_the_divisor_is_their_size(monkeypatch, sent, reduction, gradient_state):
    groups = [[0, 3], [1, 2]]
    world = FakeWorld(4, arrives=gradient_state, is_spmd=False).hold(monkeypatch)
    arguments = {"reduction": reduction, "compression": "float16", "group_assignment": groups}
    found = updated(world, gradient_state, [1.0, 2.0, 3.0, 4.0], **arguments)
    for group in groups:
        everyones = list(zip(*[grads(r, r + 1.0) for r in group]))
        for moved, _ in (found[r] for r in group):
            for mine, local in zip(moved, everyones):
                expected = getattr(np, reduction)(local, axis=0)
                bound = 3 * UNITS["float16"] * len(group) * np.mean(np.abs(local), axis=0) + 1e-6
                assert (np.abs(mine - expected) <= bound).all()
    assert set(sent) == {"float16"}
    if gradient_state is GradientState.LOCAL and reduction == "mean":
        # As halves they fit into a float16, and so does their sum.
        large = [-moved[0] for moved, _ in updated(world, gradient_state, [0.0] * 4, offset=6e4, **arguments)]
        assert all(np.isfinite(array).all() for array in large)
        np.testing.assert_allclose(np.abs(large), 6e4, rtol=UNITS["float16"])


@pytest.mark.backends("torch", "tensorflow")
def test_what_is_not_finite_is_noticed(monkeypatch, sent):
    world = FakeWorld(3, is_spmd=False).hold(monkeypatch)
    arguments = {"compression": "float16", "on_nonfinite": "skip"}
    # In turn: a NaN on one; what only float16 cannot hold; a sum that would overflow where the mean does not.
    for scales, skipped, nonfinite_source in (
        ([1.0, np.nan, 1.0], 1, (1, "w0")),
        ([1e9, 1e9, 1e9], 1, (None, "w0")),
        ([1e4, 1e4, 1e4], 0, None),
    ):
        for moved, optimizer in updated(world, GradientState.LOCAL, scales, **arguments):
            assert int(optimizer.skipped_steps) == skipped
            assert optimizer.last_nonfinite == nonfinite_source
            assert all(np.any(array) != skipped for array in moved)


def test_a_lone_replica_sends_nothing():
    models = [problem.model(), problem.model()]
    for model, optimizer in zip(
        models, [ks.CrossShard("sgd", compression="float16", fused=False), keras.optimizers.SGD()]
    ):
        model.compile(optimizer, "mse")
        model.fit(*problem.data(3), batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
    for a, b in zip(*[model.get_weights() for model in models]):
        np.testing.assert_array_equal(a, b)


@pytest.mark.backends("torch", "tensorflow")
@pytest.mark.parametrize("gradient_state", [GradientState.GLOBAL, GradientState.SUMMED])
def test_gradients_that_are_reduced_already_are_refused(monkeypatch, gradient_state):
    world = FakeWorld(2, arrives=gradient_state, is_spmd=False).hold(monkeypatch)
    with pytest.raises(ValueError, match="`compression` needs the gradients of each replica"):
        updated(world, gradient_state, compression="bfloat16")


@pytest.mark.backends("jax")
def test_under_fit_it_needs_prepare():
    found = {}
    with ks.data_parallel(2, prepare=False):
        for name in ("None", "unprepared", "prepared"):
            compression = None if name == "None" else "bfloat16"
            model = problem.model()
            model.compile(ks.CrossShard(problem.sgd_momentum(), compression=compression), "mse")
            if name == "prepared":
                ks.prepare(model)
            fit = lambda: model.fit(*problem.data(), batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)  # noqa: B023, E731
            if name == "unprepared":
                with pytest.raises(ValueError, match=r"`compression` needs .* Call `keras_shardopt.prepare\(model\)`"):
                    fit()
            else:
                fit()
                found[name] = model.get_weights()
    assert 1e-5 < problem.relative_difference(found["prepared"], found["None"]) < 2e-2


@pytest.mark.backends("jax")
def test_jax_adds_up_in_that_dtype():
    import re

    import jax
    from jax.sharding import Mesh, PartitionSpec

    optimizer = ks.CrossShard(keras.optimizers.SGD(1.0), compression="bfloat16")
    mine = weights()
    optimizer.build(mine)
    mesh = Mesh(np.array(jax.devices()[:2]), ("batch",))

    def step(own):
        return optimizer.stateless_apply(optimizer.variables, [g[0] for g in own], [v.value for v in mine])[0]

    run = jax.shard_map(step, mesh=mesh, in_specs=PartitionSpec("batch"), out_specs=PartitionSpec(), check_vma=False)
    own = [np.stack(each) for each in zip(grads(0), grads(1))]
    text = jax.jit(run).lower(own).as_text()
    reduced = re.findall(r"all_reduce.*?\}\) : \(tensor<[0-9x]*(\w+)>", text, re.DOTALL)
    assert reduced and set(reduced) == {"bf16"}, reduced
    for found, local in zip(jax.jit(run)(own), own):
        assert np.all(np.abs(-found - local.mean(0)) <= 3 * 2.0**-8 * np.abs(local).mean(0) + 1e-7)


@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize("dtype", some(UNITS, ["bfloat16"]))
def test_under_a_strategy(dtype):
    found = []
    for compression in (None, dtype):
        with ks.data_parallel(2):
            model = problem.model()
            model.compile(ks.CrossShard(problem.sgd_momentum(), compression=compression), "mse")
            model.fit(*problem.data(), batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
            found.append(model.get_weights())
    assert 1e-5 < problem.relative_difference(found[1], found[0]) < 2e-2


def test_bad_arguments_and_the_config():
    for wrong in ("int2", True, 16, ["float16"]):
        with pytest.raises(ValueError, match='`compression` must be None, "float16", .* Received: compression='):
            ks.CrossShard("sgd", compression=wrong)
    optimizer = ks.CrossShard("sgd", compression="float16", overlap=False, bucket_mib=3)
    restored = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert (restored.compression, restored.overlap, restored.bucket_mib) == ("float16", False, 3.0)
    assert "compression='float16'" in repr(restored) and "bucket_mib=3.0" in repr(restored)
    coded = ks.CrossShard("sgd", compression=ks.compression.Int4(block=128))
    restored = keras.optimizers.deserialize(keras.optimizers.serialize(coded))
    assert restored.compression == ks.compression.Int4(block=128) and "compression=Int4(block=128)" in repr(restored)
    with pytest.raises(ValueError, match="`compression`, and some `extensions` and `stages` need"):
        ks.CrossShard(optimizer)
    for wrong, error in ((0, ValueError), (float("nan"), ValueError), ("1", TypeError)):
        with pytest.raises(error, match="`bucket_mib`"):
            ks.CrossShard("sgd", bucket_mib=wrong)
    with pytest.raises(ValueError, match='`overlap` must be "auto" or False'):
        ks.CrossShard("sgd", overlap=True)
