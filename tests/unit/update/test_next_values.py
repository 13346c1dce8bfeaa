"""Variables with `overwrite_with_gradient`: what comes as the gradient of one of them is its next value.

Keras' layers that are quantized to float8 keep their scales so. Nothing may average, unscale or decay such a value.
"""

import itertools

import keras
import numpy as np
import pytest
from conftest import BACKEND
from keras import ops
from support.suites import some
from support.worlds import FakeWorld

import keras_shardopt as ks
from keras_shardopt.backends.communicator import GradientState

NUM_UPDATES = 3
LOSS_SCALE = 8.0

# By the name: the arguments of `CrossShard`, what is put around the inner optimizer, and by what the loss is scaled.
CASES = {
    "plain": ({}, lambda inner: inner, 1.0),
    "window": ({"gradient_accumulation_steps": 2}, lambda inner: inner, 1.0),
    "summed": ({"reduction": "sum"}, lambda inner: inner, 1.0),
    "static scale": ({}, lambda inner: ks.LossScaling(inner, LOSS_SCALE), LOSS_SCALE),
    "dynamic scale": ({}, lambda inner: ks.LossScaling(inner, "Backoff", {"scale_max": LOSS_SCALE}), LOSS_SCALE),
    "scaled window": ({"gradient_accumulation_steps": 2}, lambda inner: ks.LossScaling(inner, LOSS_SCALE), LOSS_SCALE),
    "masters": ({}, lambda inner: ks.MixedPrecision(inner, LOSS_SCALE), LOSS_SCALE),
    "skips": ({"on_nonfinite": "skip", "compression": "bfloat16"}, lambda inner: inner, 1.0),
}
DIVIDED = {f"{name}, divided state": ({**CASES[name][0], "shard_state": True}, *CASES[name][1:]) for name in CASES}


def pairs(replica_id, call):
    """A gradient whose means are exact also in bfloat16, and a next value."""
    random = np.random.default_rng(10 * call + replica_id)
    return random.integers(-8, 8, size=5) / 4, random.uniform(1, 2, size=3) / (1 + call)


def expected(num_replicas, num_calls, num_micro_batches, reduction):
    """After each call, in float64: the weight, and the scale."""
    weight, scale, after = np.ones(5), np.zeros(3), []
    for call in range(num_calls):
        if (call + 1) % num_micro_batches == 0:
            window = range(call + 1 - num_micro_batches, call + 1)
            given = [pairs(r, c) for r in range(num_replicas) for c in window]
            total = np.sum([grad for grad, _ in given], axis=0) / num_micro_batches
            weight = weight - 0.5 * total / (num_replicas if reduction == "mean" else 1)
            scale = np.max([value for _, value in given], axis=0)
        after.append((weight, scale))
    return after


def check(case, num_replicas, gradient_state, monkeypatch):
    arguments, around, factor = {**CASES, **DIVIDED}[case]
    num_micro_batches = arguments.get("gradient_accumulation_steps", 1)
    num_calls = NUM_UPDATES * num_micro_batches
    world = FakeWorld(num_replicas, gradient_state, is_spmd=False).hold(monkeypatch)

    def trained(replicas):
        weight, scale = keras.Variable(np.ones(5), name="kernel"), keras.Variable(np.zeros(3), name="scale")
        scale.overwrite_with_gradient = True
        optimizer = ks.CrossShard(around(keras.optimizers.SGD(0.5)), fused=False, **arguments)
        optimizer.build([weight, scale])
        after = []
        for call in range(num_calls):
            grad, value = pairs(replicas.replica_id, call)
            grad = grad * factor / (num_replicas if gradient_state is GradientState.LOCAL_PRESCALED else 1)
            optimizer.apply([ops.convert_to_tensor(a, "float32") for a in (grad, value)], [weight, scale])
            after.append([ops.convert_to_numpy(v).copy() for v in (weight, scale)])
        return after

    wanted = expected(num_replicas, num_calls, num_micro_batches, arguments.get("reduction", "mean"))
    for after in world.run(trained):
        for call, ((weight, scale), (weight_wanted, scale_wanted)) in enumerate(zip(after, wanted)):
            np.testing.assert_allclose(weight, weight_wanted, rtol=1e-6, atol=1e-6, err_msg=f"call {call}")
            np.testing.assert_array_equal(scale, scale_wanted.astype("float32"), err_msg=f"call {call}")


ARRIVING = list(itertools.product(CASES, [GradientState.LOCAL, GradientState.LOCAL_PRESCALED]))
FEW = [("scaled window", GradientState.LOCAL), ("masters", GradientState.LOCAL_PRESCALED)]


@pytest.mark.parametrize(("case", "gradient_state"), some(ARRIVING, FEW, "jax", "tensorflow"))
def test_next_values_are_the_largest_of_all_replicas_and_of_the_window(case, gradient_state, monkeypatch):
    check(case, 4 if gradient_state is GradientState.LOCAL else 2, gradient_state, monkeypatch)


@pytest.mark.parametrize("case", ["plain", "scaled window", "static scale", "masters"])
def test_one_replica_takes_them_as_they_are(case, monkeypatch):
    check(case, 1, GradientState.GLOBAL, monkeypatch)


@pytest.mark.backends("torch")
@pytest.mark.parametrize("case", DIVIDED)
def test_next_values_beside_divided_state(case, monkeypatch):
    check(case, 2, GradientState.LOCAL, monkeypatch)


@pytest.mark.backends("torch")
def test_next_values_that_arrive_global_are_not_cut_as_gradients_are(monkeypatch):
    def trained(replicas):
        weight, scale = keras.Variable(np.ones(5), name="kernel"), keras.Variable(np.zeros(3), name="scale")
        scale.overwrite_with_gradient = True
        optimizer = ks.CrossShard(keras.optimizers.SGD(0.5), gradients="global", shard_state=True)
        optimizer.build([weight, scale])
        optimizer.apply([0.5 * ops.ones(5), ops.arange(3, dtype="float32")], [weight, scale])
        return [ops.convert_to_numpy(v).tolist() for v in (weight, scale)]

    world = FakeWorld(2, GradientState.GLOBAL, is_spmd=False).hold(monkeypatch)
    assert world.run(trained) == [[[0.75] * 5, [0, 1, 2]]] * 2


@pytest.mark.filterwarnings("ignore:.*accumulates gradients that are already averaged")
@pytest.mark.backends("jax")
@pytest.mark.parametrize(
    "case", some([name for name in DIVIDED if "skips" not in name], ["scaled window, divided state"])
)
def test_next_values_beside_state_that_is_laid_out(case):
    arguments, around, factor = DIVIDED[case]
    num_micro_batches = arguments.get("gradient_accumulation_steps", 1)
    with ks.data_parallel(2) as replicas:
        weight, scale = keras.Variable(np.ones((4, 5)), name="kernel"), keras.Variable(np.zeros(4), name="scale")
        scale.overwrite_with_gradient = True
        optimizer = ks.CrossShard(around(keras.optimizers.SGD(0.5, momentum=0.5)), **arguments)
        optimizer.build([weight, scale])
        last = np.zeros(4, "float32")
        for update in range(NUM_UPDATES):
            values = [pairs(0, 2 * update + i)[1] for i in range(num_micro_batches)]
            for value in values:
                np.testing.assert_array_equal(ops.convert_to_numpy(scale)[:3], last[:3])
                grads = [ops.full((4, 5), factor), ops.convert_to_tensor(np.append(value, 0), "float32")]
                optimizer.apply(grads, [weight, scale])
            last = np.append(np.max(values, axis=0), 0).astype("float32")
        np.testing.assert_array_equal(ops.convert_to_numpy(scale), last)
        assert not optimizer.get_slot(weight, "momentum").value.sharding.is_fully_replicated
    replicas.close()


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_window_forgets_those_of_the_one_before(num_replicas, compiled, monkeypatch):
    """Also one whose first micro-batch has none; and one that has none at all leaves the variable as it is."""
    if compiled and (BACKEND == "torch" or num_replicas > 1):
        pytest.skip("nothing else is compiled here")
    windows = [(5.0, 4.0), (None, 2.0), (3.0, None), (None, None), (1.0, 2.0), (None, None), (None, 1.0)]
    wanted = [5.0, 2.0, 3.0, 3.0, 2.0, 2.0, 1.0]
    world = FakeWorld(num_replicas, GradientState.LOCAL, is_spmd=False)
    if num_replicas > 1:
        world.hold(monkeypatch)

    def trained(replicas):
        weight, scale = keras.Variable(np.ones(5), name="kernel"), keras.Variable(np.zeros(3), name="scale")
        scale.overwrite_with_gradient = True
        optimizer = ks.CrossShard(keras.optimizers.SGD(0.5), gradient_accumulation_steps=2, on_nonfinite="skip")
        optimizer.build([weight, scale])
        step = compiled_step(optimizer, [weight, scale]) if compiled else optimizer.apply
        after = []
        for window in windows:
            for value in window:
                grads = [ops.ones(5), None if value is None else ops.full((3,), value)]
                step(grads, [weight, scale])
            after.append(float(ops.convert_to_numpy(scale)[0]))
        assert int(ops.convert_to_numpy(optimizer.skipped_steps)) == 0
        np.testing.assert_array_equal(ops.convert_to_numpy(weight), 1 - 0.5 * len(windows))
        return after

    for after in world.run(trained) if num_replicas > 1 else [trained(None)]:
        assert after == wanted


def compiled_step(optimizer, variables):
    """Compiled once with a next value, and once without."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(lambda grads, _: optimizer.apply(grads, variables), autograph=False)
    import jax

    apply = jax.jit(optimizer.stateless_apply)

    def step(grads, _):
        state = optimizer.variables
        values, new_state = apply([v.value for v in state], grads, [v.value for v in variables])
        for variable, value in zip([*variables, *state], [*values, *new_state]):
            variable.assign(value)

    return step
