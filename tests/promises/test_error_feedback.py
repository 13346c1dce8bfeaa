"""Compressed gradients on the replicas of each backend: nothing is lost, and few bytes are sent."""

import re

import keras
import numpy as np
import pytest
from conftest import BACKEND
from promises.problems import compressing
from support import problem
from support.suites import some

import keras_shardopt as ks

pytestmark = pytest.mark.timeout(400)

USUAL = [
    "int8",
    "int4 in windows that skips",
    "int8 with divided state",
    "int8 and uneven rows",
    "int8 in windows with divided state and a scaled loss that skips",
]


# On TensorFlow one program reduces for all devices: each option runs with at least one codec, and all run together.
TWICE = ["int8 in windows", "int8 that skips", "int8 with divided state"] if BACKEND == "tensorflow" else []
CASES = [name for name in compressing.CASES if name not in TWICE]
RESTARTS = [name for name in compressing.RESTARTS if not (BACKEND == "tensorflow" and name == "int4")]


def with_it(name, usual, every):
    """Which cases run in one spawn, where replicas are processes: the usual ones, or the others."""
    return [each for each in every if (each in usual) == (name in usual)]


@pytest.mark.parametrize("name", some(CASES, USUAL if BACKEND != "tensorflow" else ["int8"]))
def test_what_was_sent_and_what_was_not_add_up_to_all_gradients(world, name):
    """Over 20 updates, in windows, around skipped updates, with uneven rows and divided state; bits are equal."""
    found = world.run(compressing.trained, 4, name, with_it(name, USUAL, compressing.CASES))
    assert found["skipped"] == int("skips" in name)
    assert found["apart"] == 0
    for moved, left, expected in zip(found["moved"], found["left"], found["expected"]):
        np.testing.assert_allclose(moved + left, expected, rtol=0, atol=3e-6 * np.max(np.abs(expected)))
        # So the promise is not that of a sum that was sent as it is.
        assert np.max(np.abs(moved - expected)) > 1e-4 * np.max(np.abs(expected)) or "bfloat16" in name


@pytest.mark.parametrize("num_replicas", some([2, 4], [4] if BACKEND == "torch" else [2]))
@pytest.mark.exhaustive("tensorflow")
def test_a_codec_of_a_user_is_that_of_numpy(world, num_replicas):
    """That of `examples/top_k.py`, which uses public names only."""
    names = ["whole state", "divided state"] if keras.config.backend() == "torch" else ["whole state"]
    for name in names:
        weights, left = world.run(compressing.sparsified, num_replicas, name, names)
        for found, expected in zip(
            [*weights, *left], [each for part in compressing.sparsified_in_numpy(num_replicas) for each in part]
        ):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * np.max(np.abs(expected)))


BITS = {"nothing": 32, "bfloat16": 16, "bfloat16 fed back": 16, "int8": 8 + 16 / 256, "int4": 4 + 16 / 64}


SENT = ["int8", "int4", "powersgd"]


@pytest.mark.parametrize("name", some(compressing.SENT, SENT if BACKEND != "tensorflow" else ["powersgd"]))
def test_the_bytes_are_those_of_theory(world, name):
    if name == "nothing" and keras.config.backend() == "jax":
        pytest.skip("XLA reduces gradients that nobody needs to see")
    found = world.run(compressing.sent, 4, name, with_it(name, SENT, compressing.SENT))
    sent, in_float32, collectives, words, counted = found
    num_weights = compressing.WIDTH * (compressing.WIDTH + 1)
    assert in_float32 == 2 * 3 / 4 * 4 * num_weights
    bits = BITS.get(name)
    rank = 4
    # The matrix as two thin ones, and the bias, in float32.
    thin = 32 * (2 * rank * compressing.WIDTH + compressing.WIDTH)
    theory = 2 * 3 / 4 * (thin if bits is None else bits * num_weights) / 8
    assert theory <= sent <= 1.05 * theory, (sent, theory)
    assert f"{sent / in_float32:.3f} of the bytes in float32" in words
    assert counted is None or counted == sent + 2 * 3 / 4 * 8  # `fit` adds up rows, in one number
    if name == "int8":
        assert [c for c in collectives if "int8" in c[1]] == [
            ("all_to_all", ("int8", "bfloat16")),
            ("all_gather", ("int8", "bfloat16")),
        ]


@pytest.mark.exhaustive("torch", "tensorflow")
def test_with_divided_state_matrices_of_low_rank_are_the_same(world):
    whole, divided = world.run(compressing.divided, 4, "")
    assert problem.relative_difference(divided, whole) <= problem.TOLERANCE


@pytest.mark.parametrize("name", some(RESTARTS, RESTARTS[:1]))
@pytest.mark.exhaustive("jax", "tensorflow")
def test_after_a_restart_nothing_is_lost(world, name):
    straight, again = world.run(compressing.restarted, 2, name, with_it(name, ["int4"], compressing.RESTARTS))
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
            left = [np.max(np.abs(compressing.everyones(v))) for v in model.optimizer.pipeline.carried]
        replicas.close()
        assert max(left) > 0 if num_replicas == 4 else max(left) == 0


WIDTHS = {"f32": 4, "bf16": 2, "f16": 2, "u16": 2, "s32": 4, "u8": 1, "s8": 1, "pred": 1}
RING = {"all-reduce": 2 * 3 / 4, "all-to-all": 3 / 4, "all-gather": 3 / 4}
"""What a replica of four sends, in units of what comes of the operation."""


@pytest.mark.backends("jax")
@pytest.mark.parametrize("name", some(compressing.SENT, ["int8"]))
def test_what_the_report_says_is_in_the_compiled_step(name):
    import jax

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("batch",))
    optimizer = ks.CrossShard(keras.optimizers.SGD(1.0), compression=compressing.SENT[name])
    mine = [keras.Variable(np.zeros((300, 40), "float32"))]
    optimizer.build(mine)
    whole = jax.sharding.PartitionSpec()

    def step(state, own):
        return optimizer.stateless_apply(state, [own[0]], [v.value for v in mine])[0]

    specs = {"in_specs": (whole, jax.sharding.PartitionSpec("batch")), "out_specs": whole}
    run = jax.shard_map(step, mesh=mesh, check_vma=False, **specs)
    own = np.random.default_rng(0).normal(size=(4, 300, 40)).astype("float32")
    compiled = jax.jit(run).lower([v.value for v in optimizer.variables], own).compile()
    sent = re.findall(r"= (\S.*?) (all-\w+(?:-all)?)(?:-start)?\(", compiled.as_text())
    sizes = [(dtype, np.prod([int(n) for n in shape.split(",") if n]), kind) for found, kind in sent
             for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", found)]  # fmt: skip
    report = optimizer.communication_report()
    in_half = 1 if name != "bfloat16" else 2  # which XLA widens where it adds up, on CPUs
    num_bytes = sum(WIDTHS[dtype] * size * RING[kind] for dtype, size, kind in sizes) / in_half
    assert num_bytes == report.bytes_per_update > 0, (sent, report)
    if name == "int8":
        kinds = {(dtype, kind) for dtype, _, kind in sizes}
        assert kinds == {(dtype, kind) for dtype in ("s8", "u16") for kind in ("all-to-all", "all-gather")}, kinds
    (moved,) = compiled([v.value for v in optimizer.variables], own)
    error = np.linalg.norm(np.asarray(moved) + own.mean(0)) / np.linalg.norm(own.mean(0))
    assert error < (0.02 if "int4" not in name and "powersgd" not in name else 1) and (
        error > 1e-4 or name == "nothing"
    )


@pytest.mark.backends("tensorflow")
def test_what_tensorflow_cannot_do_is_refused():
    with ks.data_parallel(2):
        model = problem.model()
        model.compile(ks.CrossShard("sgd", compression="powersgd"), "mse")
        with pytest.raises(ValueError, match=r"`PowerSGD` on TensorFlow must have `warmup_steps=0`"):
            model.fit(*problem.data(1), batch_size=16, verbose=0)
