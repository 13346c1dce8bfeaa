"""Compressed gradients on the replicas of each backend: nothing is lost, and few bytes are sent."""

import re

import keras
import numpy as np
import pytest
from promises.problems import compressing
from support import problem
from support.suites import some

import keras_shardopt as ks

pytestmark = pytest.mark.timeout(400)

USUAL = ["int8", "int4 in windows that skips", "int8 with divided state", "int8 and uneven rows"]
# Ranks run them all in one spawn; where each compiles a program, by default some do.
CASES = some(compressing.CASES, lambda case: keras.config.backend() == "torch" or case in USUAL)


@pytest.mark.parametrize("name", CASES)
def test_what_was_sent_and_what_was_not_add_up_to_all_gradients(world, name):
    """Over 100 updates, in windows, around skipped updates, with uneven rows and divided state; bits are equal."""
    found = world.run(compressing.trained, 4, name, compressing.CASES)
    assert found["skipped"] == int("skips" in name)
    assert found["apart"] == 0
    for moved, left, expected in zip(found["moved"], found["left"], found["expected"]):
        np.testing.assert_allclose(moved + left, expected, rtol=0, atol=3e-6 * np.max(np.abs(expected)))
        # So the promise is not that of a sum that was sent as it is.
        assert np.max(np.abs(moved - expected)) > 1e-4 * np.max(np.abs(expected)) or "bfloat16" in name


BITS = {"nothing": 32, "bfloat16": 16, "bfloat16 fed back": 16, "int8": 8 + 16 / 256, "int4": 4 + 16 / 64}


@pytest.mark.parametrize("name", some(compressing.SENT, ["int8", "int4", "powersgd"]))
def test_the_bytes_are_those_of_theory(world, name):
    if name == "nothing" and keras.config.backend() == "jax":
        pytest.skip("XLA reduces gradients that nobody needs to see")
    sent, in_float32, collectives, words = world.run(compressing.sent, 4, name, compressing.SENT)
    num_weights = compressing.WIDTH * (compressing.WIDTH + 1)
    assert in_float32 == 2 * 3 / 4 * 4 * num_weights
    bits = BITS.get(name)
    rank = 4
    # The matrix as two thin ones, and the bias, in float32.
    thin = 32 * (2 * rank * compressing.WIDTH + compressing.WIDTH)
    theory = 2 * 3 / 4 * (thin if bits is None else bits * num_weights) / 8
    assert theory <= sent <= 1.05 * theory, (sent, theory)
    assert f"{sent / in_float32:.3f} of float32's" in words
    if name == "int8":
        assert [c for c in collectives if "int8" in c[1]] == [
            ("all_to_all", ("int8", "bfloat16")),
            ("all_gather", ("int8", "bfloat16")),
        ]


@pytest.mark.parametrize("name", some(compressing.RESTARTS, ["int4"]))
def test_after_a_restart_nothing_is_lost(world, name):
    straight, again = world.run(compressing.restarted, 4, name, compressing.RESTARTS)
    assert straight[2] == again[2] == 4 * problem.NUM_STEPS
    for arrays, others in zip(straight[:2], again[:2]):
        assert arrays and len(arrays) == len(others)
        for array, other in zip(arrays, others):
            np.testing.assert_array_equal(array, other)


@pytest.mark.backends("tensorflow", "jax")
@pytest.mark.exhaustive
def test_on_another_number_of_replicas_what_was_not_sent_is_dropped(tmp_path):
    for num_replicas, epochs in ((4, 1), (2, 1)):
        with ks.data_parallel(num_replicas) as replicas:
            model = problem.model()
            model.compile(ks.CrossShard("sgd", compression="int4"), "mse")
            backup = ks.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)
            model.fit(*problem.data(), batch_size=16, epochs=epochs, verbose=0, callbacks=[backup])
            left = [np.max(np.abs(compressing.everyones(v))) for v in model.optimizer.pipeline.residuals]
        replicas.close()
        assert max(left) > 0 if num_replicas == 4 else max(left) == 0


@pytest.mark.backends("jax")
def test_int8_is_what_is_sent_in_both_legs():
    import jax

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("batch",))
    optimizer = ks.CrossShard(keras.optimizers.SGD(1.0), compression="int8")
    mine = [keras.Variable(np.zeros((300, 40), "float32"))]
    optimizer.build(mine)
    whole = jax.sharding.PartitionSpec()

    def step(state, own):
        return optimizer.stateless_apply(state, [own[0]], [v.value for v in mine])[0]

    specs = {"in_specs": (whole, jax.sharding.PartitionSpec("batch")), "out_specs": whole}
    run = jax.shard_map(step, mesh=mesh, check_vma=False, **specs)
    own = np.random.default_rng(0).normal(size=(4, 300, 40)).astype("float32")
    compiled = jax.jit(run).lower([v.value for v in optimizer.variables], own).compile()
    sent = re.findall(r"= \(?(\w+)\[.* (all-to-all|all-gather|all-reduce)(?:-start)?\(", compiled.as_text())
    assert {("s8", "all-to-all"), ("s8", "all-gather")} <= set(sent) and "all-reduce" not in dict(sent).values(), sent
    assert not [kind for dtype, kind in sent if dtype in ("f32", "f64")], sent
    (moved,) = compiled([v.value for v in optimizer.variables], own)
    error = np.asarray(moved) + own.mean(0)
    assert 0 < np.linalg.norm(error) < 0.02 * np.linalg.norm(own.mean(0))


@pytest.mark.backends("tensorflow")
def test_what_tensorflow_cannot_do_is_refused():
    with ks.data_parallel(2):
        model = problem.model()
        model.compile(ks.CrossShard("sgd", compression="powersgd"), "mse")
        with pytest.raises(ValueError, match=r"`PowerSGD` on TensorFlow must have `warmup_steps=0`"):
            model.fit(*problem.data(1), batch_size=16, verbose=0)
