"""The rates of schedules: what the originals gave, at all steps, in all forms a step comes in."""

import doctest
import json
import math
import pathlib

import keras
import numpy as np
import pytest
from keras import ops
from support import references
from support.catalogue import EXAMPLES, SCHEDULES, each_schedule, rates
from support.suites import some

import keras_shardopt as ks
from keras_shardopt import schedules
from keras_shardopt.schedules import composition, policies
from keras_shardopt.schedules import schedule as schedule_module

BACKEND = keras.config.backend()
GOLDEN = pathlib.Path(__file__).parents[2] / "golden"
DOCS = pathlib.Path(__file__).parents[3] / "docs"

# float32 has 24 bits, 6e-8. A rate is a handful of operations, up to 31 of them in ExpDecay, one per bit of the
# exponent, and InvPolyDecay takes exponentials of up to -16.
FLOAT32 = 2e-6
FLOAT64 = 1e-12

REFUSED = {
    "poly_decay/power0": "`power` must be a finite number, greater than 0",
    "poly_decay/decay_steps_0/np_float64_lr": "`decay_steps` must be a finite number, at least 1",
    "cosine_decay/decay_steps_0": "`decay_steps` must be a finite number, at least 1",
    "inv_poly_decay/p1_ignored_args": "`begin_decay_at` has no effect",
    "inv_poly_decay/p0.5_ignored_args": "`begin_decay_at` has no effect",
}
"""Cases that worked in the originals, to no good, and here raise at construction."""

# In float16 arithmetic warmup_steps ** -1.5 is a subnormal with 5 bits, and steps from 65504 on are infinite, where
# the rate became 0. Ours is computed in float32 and then rounded.
FLOAT16_CASE = "transformer_policy/float16_w8000"


def golden(key):
    return list(_golden(key))


def _golden(key):
    for path in sorted(GOLDEN.glob("lr_*.json")):
        with open(path, encoding="utf-8") as file:
            for case in json.load(file)[key]:
                yield pytest.param(path.stem.removeprefix("lr_"), case, id=case["id"])


def make(policy, case):
    arguments = dict(case["params"])
    if case["learning_rate_as"] == "numpy.float64":
        arguments["learning_rate"] = np.float64(arguments["learning_rate"])
    return schedules.get(policy, **arguments)


@pytest.fixture
def float64():
    """Keras in float64, and JAX as well."""
    keras.config.set_floatx("float64")
    if BACKEND == "jax":
        import jax

        with jax.enable_x64(True):
            yield
    else:
        yield
    keras.config.set_floatx("float32")


@pytest.mark.parametrize(("policy", "case"), golden("cases"))
@pytest.mark.exhaustive("jax", "tensorflow")
def test_golden(policy, case):
    if case["id"] in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[case["id"]]):
            make(policy, case)
        return
    if case["params"].get("dtype") == "float64" and BACKEND == "jax":
        pytest.skip("JAX has no float64 unless x64 is on: test_golden_in_float64 runs this case")
    expected = np.array(case["outputs"], "float64")
    rtol, atol = 1e-5, 1e-7
    if case["id"] == FLOAT16_CASE:
        expected[np.array(case["steps"]) >= 65504] = 2.0 * (1024 * 70001) ** -0.5
        rtol, atol = 2.5e-2, 1e-7  # 1e-7: the two smallest float16
    np.testing.assert_allclose(rates(make(policy, case), case["steps"]), expected, rtol, atol)


@pytest.mark.parametrize(("policy", "case"), golden("cases"))
@pytest.mark.exhaustive("jax", "tensorflow")
def test_golden_in_float64(policy, case, float64):
    if case["id"] in REFUSED or case["id"] == FLOAT16_CASE:
        pytest.skip("test_golden says what is different in this case")
    schedule = make(policy, case)
    assert keras.backend.standardize_dtype(schedule(0).dtype) == "float64"
    got = rates(schedule, case["steps"])
    arguments = {name: value for name, value in case["params"].items() if name != "dtype"}
    reference = getattr(references, policy)
    # Mostly the originals only have float32, so the reference in between is held to both.
    expected = [reference(step, **arguments) for step in case["steps"]]
    np.testing.assert_allclose(expected, np.array(case["outputs"], "float64"), 1e-5, 1e-7)
    np.testing.assert_allclose(got, expected, FLOAT64, 1e-15)
    if case["out_dtype"] in ("float64", "python"):
        np.testing.assert_allclose(got, case["outputs"], FLOAT64)


# What raised in the originals only for TensorFlow 1's static types, or for lists that had to be lists, works here.
WORKS_HERE = {
    "piecewise_constant/tuple_decay_rates",
    "transformer_policy/float64_max",
    "transformer_policy/int_max_lr",
}


@pytest.mark.parametrize(("policy", "case"), golden("error_cases"))
@pytest.mark.neutral
def test_golden_errors(policy, case):
    if case["id"].endswith("global_step_None"):
        with pytest.raises(ValueError, match="`step` must be an int or an integer tensor"):
            schedules.get(policy, **case["params"])(None)
    elif "artifact" in case or case["id"] in WORKS_HERE:
        arguments = {name: value for name, value in case["params"].items() if name != "dtype"}
        if case["id"] == "piecewise_constant/tuple_decay_rates":
            arguments["decay_rates"] = tuple(arguments["decay_rates"])
        reference = getattr(references, policy)
        expected = [reference(step, **arguments) for step in case["steps"]]
        schedule = schedules.get(policy, **arguments | {"learning_rate": np.float64(arguments["learning_rate"])})
        np.testing.assert_allclose(rates(schedule, case["steps"]), expected, 1e-5, 1e-7)
    else:
        with pytest.raises(ValueError):  # an IndexError in the original for empty lists
            schedules.get(policy, **case["params"])


# -- every schedule, over every form of a step ------------------------------------------------------------------------

each_policy = pytest.mark.parametrize("policy", EXAMPLES)


@each_policy
@pytest.mark.exhaustive("jax", "tensorflow")
def test_reference(policy):
    expected = [references.POLICIES[policy](step, **EXAMPLES[policy]) for step in range(30)]
    np.testing.assert_allclose(rates(SCHEDULES[policy](), range(30)), expected, FLOAT32)


STEP_FORMS = {
    "numpy": np.int64,
    "int32": lambda step: ops.convert_to_tensor(step, dtype="int32"),
    "int64": lambda step: ops.convert_to_tensor(step, dtype="int64"),
    "uint8": lambda step: ops.convert_to_tensor(step, dtype="uint8"),
    "variable": lambda step: keras.Variable(step, dtype="int32", trainable=False),
    "iterations": lambda step: _iterations(step),
}


def _iterations(step):
    optimizer = keras.optimizers.SGD()
    optimizer.iterations.assign(step)
    return optimizer.iterations


@each_schedule
@pytest.mark.parametrize("form", STEP_FORMS)
@pytest.mark.exhaustive("tensorflow")
def test_forms_of_a_step(schedule, form):
    if form == "int64" and BACKEND == "jax":
        pytest.skip("JAX has no int64 unless x64 is on")
    if form == "variable" and BACKEND == "torch":
        pytest.skip("Keras on torch gives integer variables a gradient, which torch forbids; `iterations` is tested")
    expected = rates(schedule, range(12))
    for step in range(12):
        rate = schedule(STEP_FORMS[form](step))
        assert tuple(rate.shape) == ()
        assert keras.backend.standardize_dtype(rate.dtype) == "float32"
        assert float(rate) == expected[step]


@each_schedule
@pytest.mark.exhaustive("jax", "tensorflow")
def test_many_steps_at_once(schedule):
    steps = np.arange(12).reshape(3, 4)
    many = ops.convert_to_numpy(schedule(steps))
    assert many.shape == steps.shape
    # Vectorized powers of TensorFlow differ from scalar ones in the last bit.
    np.testing.assert_allclose(many, rates(schedule, range(12)).reshape(3, 4), 3e-7)


@pytest.mark.parametrize("floatx", ["float16", "bfloat16"])
@each_policy
@pytest.mark.exhaustive("jax", "tensorflow")
def test_half_precision_rounds_only_the_result(policy, floatx):
    schedule = SCHEDULES[policy]()
    expected = [ops.cast(schedule(step), floatx) for step in (0, 5, 8)]
    keras.config.set_floatx(floatx)
    try:
        got = [schedule(step) for step in (0, 5, 8)]
    finally:
        keras.config.set_floatx("float32")
    assert [keras.backend.standardize_dtype(rate.dtype) for rate in got] == [floatx] * 3
    assert [float(ops.cast(rate, "float32")) for rate in got] == [float(ops.cast(r, "float32")) for r in expected]


def compiled(function):
    """`function` as the backend compiles it, and a list that grows each time that happens."""
    traces = []
    if BACKEND == "torch":
        import torch

        def count(graph, inputs):
            traces.append(graph)
            return graph.forward

        return torch.compile(function, backend=count, fullgraph=True), traces

    def traced(step):
        traces.append(step)
        return function(step)

    if BACKEND == "jax":
        import jax

        return jax.jit(traced), traces
    import tensorflow as tf

    return tf.function(traced), traces


# Compiling takes up to a second each.
@pytest.mark.parametrize("name", some(SCHEDULES, ["Join", "of Keras' own"] if BACKEND == "jax" else ["of Keras' own"]))
def test_compiled_once_for_all_steps(name):
    schedule = SCHEDULES[name]()
    function, traces = compiled(schedule)
    steps = [ops.convert_to_tensor(step, dtype="int32") for step in (*range(12), 2**31 - 1)]
    np.testing.assert_allclose(
        [float(function(step)) for step in steps], [float(schedule(step)) for step in steps], FLOAT32, 1e-12
    )
    # Keras' own ExponentialDecay alone is compiled twice on torch.
    of_keras = isinstance(getattr(schedule, "schedule", None), keras.optimizers.schedules.ExponentialDecay)
    assert len(traces) == (2 if of_keras and BACKEND == "torch" else 1)


# -- large steps ------------------------------------------------------------------------------------------------------

LARGE_STEPS = [0, 1, 9_999_999, *(2**24 + i for i in range(-2, 4)), 2**30, *(2**31 + i for i in range(-3, 2))]
AT_2_24 = {
    "PiecewiseConstant": [{"learning_rate": 0.1, "boundaries": [2**24], "decay_rates": [0.1]}],
    "ExpDecay": [
        # 2**24 + 1 is a multiple of 97 and of 257.
        {"learning_rate": 0.1, "decay_steps": 2**24 + 1, "decay_rate": 0.5, "use_staircase_decay": True},
        {"learning_rate": 0.1, "decay_steps": 97 * 257, "decay_rate": 0.999, "use_staircase_decay": True},
        {"learning_rate": 0.1, "decay_steps": 100_000, "decay_rate": 0.96, "use_staircase_decay": False},
        {
            "learning_rate": 0.1,
            "decay_steps": 2.5,
            "decay_rate": 0.5,
            "use_staircase_decay": False,
            "begin_decay_at": 2**24,
        },
    ],
    "PolyDecay": [
        {"learning_rate": 0.1, "decay_steps": 10, "begin_decay_at": 2**24},
        {"learning_rate": 0.1, "decay_steps": 2**24 + 1},
        {"learning_rate": 0.1, "decay_steps": 2**24 + 10, "power": 2.0},
        {"learning_rate": 0.1, "decay_steps": 10, "begin_decay_at": 2**25, "warmup_steps": 2**24 + 1},
    ],
    "CosineDecay": [
        {"learning_rate": 0.1, "decay_steps": 10, "begin_decay_at": 2**24},
        {"learning_rate": 0.1, "decay_steps": 2**24 + 5},
        {"learning_rate": 0.1, "decay_steps": 5, "begin_decay_at": 2**24 - 1, "warmup_steps": 2**24 + 1},
    ],
    "TransformerPolicy": [{"learning_rate": 1.2, "d_model": 8, "warmup_steps": 2**24 + 2}],
}


@pytest.mark.parametrize(("policy", "arguments"), [(name, a) for name, many in AT_2_24.items() for a in many])
@pytest.mark.exhaustive("jax", "tensorflow")
def test_neighbouring_steps_that_float32_cannot_tell_apart(policy, arguments):
    schedule = getattr(schedules, policy)(**arguments)
    reference = [references.POLICIES[policy](2**24 + i, **arguments) for i in range(2)]
    got = rates(schedule, [2**24, 2**24 + 1])
    assert np.float32(reference[0]) != np.float32(reference[1])
    assert np.sign(got[1] - got[0]) == np.sign(reference[1] - reference[0])
    np.testing.assert_allclose(got, reference, 2e-7, 1e-16)  # of the reference's cosine


@pytest.mark.parametrize("decay_steps", [2**31 - 1, 2**31, 2**31 + 0.5, 2**33])
@pytest.mark.exhaustive("jax", "tensorflow")
def test_spans_longer_than_a_step_can_count(decay_steps):
    for steps in (LARGE_STEPS, [ops.convert_to_tensor(s, dtype="int32") for s in LARGE_STEPS if s < 2**31]):
        got = rates(schedules.PolyDecay(0.1, decay_steps, warmup_steps=math.ceil(decay_steps)), steps)
        expected = [references.poly_decay(int(s), 0.1, decay_steps, warmup_steps=math.ceil(decay_steps)) for s in steps]
        np.testing.assert_allclose(got, expected, FLOAT32, 1e-17)
    assert rates(schedules.PolyDecay(0.1, 5, begin_decay_at=2**33), LARGE_STEPS[-1:]) == np.float32(0.1)
    assert rates(schedules.PiecewiseConstant(0.1, [2**33], [0.0]), LARGE_STEPS[-1:]) == np.float32(0.1)
    assert rates(schedules.ExpDecay(0.1, 2**33, 0.5, True), LARGE_STEPS[-1:]) == np.float32(0.1)


def random_arguments(policy, random):
    """Arguments whose spans are anything between a few steps and 2**31."""

    def span():
        return int(2 ** random.uniform(0, 31))

    rate = float(10 ** random.uniform(-5, 0))
    decay = {"learning_rate": rate, "decay_steps": span()}
    curve = decay | {"begin_decay_at": span(), "min_lr": rate * float(random.uniform()), "warmup_steps": span()}
    return {
        "FixedLR": {"learning_rate": rate},
        "PiecewiseConstant": {
            "learning_rate": rate,
            "boundaries": sorted([span(), span(), span()]),
            "decay_rates": [float(factor) for factor in random.uniform(0, 2, size=3)],
        },
        "ExpDecay": decay
        | {
            "decay_rate": float(1 - 10 ** random.uniform(-6, -0.1)),
            "use_staircase_decay": bool(random.integers(2)),
            "begin_decay_at": span(),
        },
        "PolyDecay": curve | {"power": float(random.uniform(0.3, 3))},
        "CosineDecay": curve,
        "InvPolyDecay": decay
        | {"min_lr": rate * float(random.uniform(0, 0.1)), "power": float(random.uniform(0.5, 3))},
        "TransformerPolicy": {"learning_rate": rate, "d_model": 512, "warmup_steps": span()},
    }[policy]


@each_policy
@pytest.mark.exhaustive("jax", "tensorflow")
def test_any_span_at_any_step(policy):
    random = np.random.default_rng(3)
    for _ in range(25):
        arguments = random_arguments(policy, random)
        around = [value + i for value in arguments.values() if isinstance(value, int) for i in (-1, 0, 1)]
        steps = [step for step in (*LARGE_STEPS, *around, int(2 ** random.uniform(0, 31))) if 0 <= step <= 2**31]
        steps += [7] * (32 - len(steps))  # JAX compiles for each length
        got = ops.convert_to_numpy(getattr(schedules, policy)(**arguments)(np.array(steps)))
        expected = [references.POLICIES[policy](step, **arguments) for step in steps]
        # Near 0, PolyDecay has the digits of its floor, and the reference those of a cosine.
        atol = 1e-7 * arguments["min_lr"] if policy == "PolyDecay" else 1e-12 * arguments["learning_rate"]
        np.testing.assert_allclose(got, expected, FLOAT32, atol, err_msg=f"{arguments} at {steps}")


def test_no_drift_of_a_decay_rate_that_float32_rounds():
    # float32(0.9999) ** 50000 is 8e-4 off, and so are Keras' ExponentialDecay and the original.
    got = rates(schedules.ExpDecay(1.0, 1, 0.9999, use_staircase_decay=False), [50_000])
    np.testing.assert_allclose(got, 0.9999**50_000, FLOAT32)


def test_growing_rate_saturates_and_a_zero_decay_rate_does_not_divide():
    assert rates(schedules.ExpDecay(1.0, 1, 2.0, True), [0, 100, 2**31 - 1]).tolist() == [1.0, 2.0**100, math.inf]
    assert rates(schedules.ExpDecay(1.0, 4, 0.0, True), [0, 3, 4, 5]).tolist() == [1.0, 1.0, 0.0, 0.0]
    assert rates(schedules.ExpDecay(1.0, 4, 0.0, False), [0, 1, 4]).tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("decay_steps", [2.5, 3.75, 390.625])
def test_stairs_of_fractional_length_are_at_exact_steps(decay_steps):
    steps = [*range(30), 390, 391, 2**30 - 1, 2**30]
    got = ops.convert_to_numpy(schedules.ExpDecay(1.0, decay_steps, 0.99, True)(np.array(steps)))
    np.testing.assert_allclose(got, [0.99 ** (step // decay_steps) for step in steps], FLOAT32, 1e-30)


def test_cosine_keeps_its_digits_at_the_end():
    got = rates(schedules.CosineDecay(1.0, 1_000_000), [999_999])
    np.testing.assert_allclose(got, (math.pi / 2 / 1e6) ** 2, FLOAT32)


# -- floors -----------------------------------------------------------------------------------------------------------


def test_min_lr_of_cosine_is_a_fraction_and_absolute_min_lr_a_rate():
    steps = range(12)
    fraction = schedules.CosineDecay(0.5, 8, min_lr=0.1, begin_decay_at=2)
    absolute = schedules.CosineDecay(0.5, 8, absolute_min_lr=0.05, begin_decay_at=2)
    np.testing.assert_allclose(rates(fraction, steps), rates(absolute, steps), FLOAT32)
    assert rates(fraction, [100]) == np.float32(0.05)
    assert rates(schedules.CosineDecay(0.5, 8, absolute_min_lr=0.0), [100]) == 0
    # The rate at the end does not depend on how far the warm-up is.
    assert rates(schedules.CosineDecay(0.5, 8, absolute_min_lr=0.05, warmup_steps=16), [8]) == np.float32(0.05)


def test_power_of_cosine_is_ignored_aloud():
    with pytest.warns(UserWarning, match="`power` has no effect on CosineDecay"):
        schedule = schedules.CosineDecay(0.1, 7, power=2.0)
    np.testing.assert_array_equal(rates(schedule, range(9)), rates(schedules.CosineDecay(0.1, 7), range(9)))


# -- composition ------------------------------------------------------------------------------------------------------


def test_warmup_delays_the_schedule():
    inner = schedules.PolyDecay(0.1, 10)
    got = rates(schedules.Warmup(inner, 4, start_factor=0.25), range(20))
    expected = [0.1 * (0.25 + 0.75 * step / 4) if step < 4 else float(inner(step - 4)) for step in range(20)]
    np.testing.assert_allclose(got, expected, FLOAT32)


@pytest.mark.parametrize("policy", [schedules.PolyDecay, schedules.CosineDecay])
def test_warmup_at_once_is_the_originals_warm_up(policy):
    original = policy(0.1, 10, begin_decay_at=3, warmup_steps=6)
    ours = schedules.Warmup(policy(0.1, 10, begin_decay_at=3), 6, delay_schedule=False)
    np.testing.assert_allclose(rates(ours, range(20)), rates(original, range(20)), FLOAT32)


def test_join_starts_each_piece_at_its_boundary_from_its_step_0():
    pieces = [SCHEDULES["PolyDecay"](), keras.optimizers.schedules.CosineDecay(0.3, 5), SCHEDULES["InvPolyDecay"]()]
    got = rates(schedules.Join(pieces, [4, 7]), range(14))
    expected = [float(pieces[(s >= 4) + (s >= 7)](s - (4 if 4 <= s < 7 else 7 if s >= 7 else 0))) for s in range(14)]
    np.testing.assert_allclose(got, expected, FLOAT32)
    # Of equal boundaries the later piece wins, also at 0 in unsigned integers.
    assert rates(schedules.Join([1.0, 2.0, 3.0], [0, 0]), [0, 1, 2**31]).tolist() == [3.0] * 3
    large = schedules.Join([1.0, schedules.ExpDecay(8.0, 1, 0.5, True)], [2**24 + 1])
    assert rates(large, [2**24, 2**24 + 1, 2**24 + 2]).tolist() == [1.0, 8.0, 4.0]


@pytest.mark.parametrize(("rule", "factor"), [("linear", 6.0), ("sqrt", 6**0.5)])
def test_scaled_by_replicas_rises_from_the_rate_of_one_replica(rule, factor):
    inner = schedules.PiecewiseConstant(0.1, [2, 8], [0.5, 0.1])
    one = rates(inner, range(12))
    np.testing.assert_allclose(rates(schedules.ScaledByReplicas(inner, 6, rule), range(12)), one * factor, FLOAT32)
    warm = rates(schedules.ScaledByReplicas(inner, 6, rule, warmup_steps=5), range(12))
    np.testing.assert_allclose(warm, one * (1 + (factor - 1) * np.minimum(np.arange(12) / 5, 1)), FLOAT32)
    assert warm[0] == one[0]
    np.testing.assert_array_equal(rates(schedules.ScaledByReplicas(inner, 1, rule, 3), range(12)), one)


# -- the length of the run --------------------------------------------------------------------------------------------


def test_from_run_fills_in_the_decay():
    schedule = schedules.PolyDecay.from_run(total_steps=100_000, learning_rate=0.001, power=2.0, warmup_steps=8_000)
    assert (schedule.begin_decay_at, schedule.decay_steps) == (8_000, 92_000)
    schedule = schedules.CosineDecay.from_run(
        num_epochs=10, steps_per_epoch=100, learning_rate=0.1, warmup_steps=50, begin_decay_at=200
    )
    assert (schedule.begin_decay_at, schedule.decay_steps) == (200, 800)
    assert rates(schedule, [999, 1000])[1] == 0 < rates(schedule, [999, 1000])[0]
    exp = schedules.ExpDecay.from_run(
        total_steps=90, learning_rate=0.1, decay_rate=0.1, use_staircase_decay=False, begin_decay_at=30
    )
    assert exp.decay_steps == 60
    assert schedules.InvPolyDecay.from_run(total_steps=90, learning_rate=0.1, min_lr=0.01).decay_steps == 90


def test_from_run_leaves_an_explicit_decay_steps_alone():
    schedule = schedules.PolyDecay.from_run(total_steps=100, learning_rate=0.1, decay_steps=50, warmup_steps=20)
    assert (schedule.decay_steps, schedule.begin_decay_at, schedule.warmup_steps) == (50, 0, 20)


def test_from_run_gives_epochs_to_those_who_count_in_them():
    pieces = {"learning_rate": 0.1, "boundaries": [3], "decay_rates": [0.1]}
    assert schedules.PiecewiseConstant.from_run(num_epochs=5, steps_per_epoch=7, **pieces).steps_per_epoch == 7
    assert schedules.PiecewiseConstant.from_run(total_steps=35, **pieces).steps_per_epoch is None
    assert schedules.FixedLR.from_run(num_epochs=5, steps_per_epoch=7, learning_rate=0.1).learning_rate == 0.1
    policy = schedules.TransformerPolicy.from_run(total_steps=35, learning_rate=1.0, d_model=8, warmup_steps=4)
    assert policy.warmup_steps == 4


@pytest.mark.parametrize(
    "length",
    [
        {},
        {"num_epochs": 3},
        {"steps_per_epoch": 3},
        {"total_steps": 9, "num_epochs": 3, "steps_per_epoch": 3},
        {"total_steps": 9, "num_epochs": 3},
    ],
)
def test_from_run_needs_the_length_once(length):
    with pytest.raises(ValueError, match=r"The length of the run must be given once.*Received: total_steps="):
        schedules.PolyDecay.from_run(learning_rate=0.1, **length)


@pytest.mark.parametrize("begin", [{"warmup_steps": 100}, {"begin_decay_at": 101}])
def test_from_run_refuses_a_decay_after_the_run(begin):
    with pytest.raises(ValueError, match=r"Decay must begin before the run ends\. Received: a run of 100 updates"):
        schedules.PolyDecay.from_run(total_steps=100, learning_rate=0.1, **begin)


# -- lookup -----------------------------------------------------------------------------------------------------------


@each_policy
def test_get_by_name_and_by_config(policy):
    expected = repr(SCHEDULES[policy]())
    original_name = references.POLICIES[policy].__name__
    assert repr(schedules.get(policy, **EXAMPLES[policy])) == expected
    assert repr(schedules.get(original_name, **EXAMPLES[policy])) == expected
    assert repr(schedules.get({"class_name": policy, "config": EXAMPLES[policy]})) == expected
    config = keras.optimizers.schedules.serialize(SCHEDULES[policy]())
    assert repr(schedules.get(config)) == expected
    assert type(schedules.get(config)) is getattr(schedules, policy)


def test_get_of_schedules_and_numbers():
    schedule = schedules.FixedLR(0.1)
    assert schedules.get(schedule) is schedule
    assert repr(schedules.get(np.float32(0.5))) == "FixedLR(learning_rate=0.5)"
    kerass = keras.optimizers.schedules.CosineDecay(0.1, 5)
    assert schedules.get(kerass) is kerass
    # Keras' own CosineDecay stays Keras' own.
    assert type(schedules.get(keras.optimizers.schedules.serialize(kerass))) is type(kerass)
    assert schedules.get("InverseTimeDecay", initial_learning_rate=0.1, decay_steps=3, decay_rate=1).decay_steps == 3


@pytest.mark.parametrize(
    ("identifier", "arguments", "error", "message"),
    [
        ("polly_decay", {}, ValueError, r"one of \['CosineDecay', 'ExpDecay', .*Received: 'polly_decay'"),
        ("Policy", {}, ValueError, "Received: 'Policy'"),
        ("serialize", {}, ValueError, "Received: 'serialize'"),
        (0.1, {"decay_steps": 3}, ValueError, r"with the name of a schedule.*\['decay_steps'\]"),
        (None, {}, TypeError, "Received: None of type NoneType"),
        (True, {}, TypeError, "Received: True of type bool"),
        ({"config": {}}, {}, TypeError, "of type dict"),
        (lambda: 0.1, {}, TypeError, "of type function"),
    ],
)
@pytest.mark.neutral
def test_get_refuses(identifier, arguments, error, message):
    with pytest.raises(error, match=message):
        schedules.get(identifier, **arguments)


# -- errors -----------------------------------------------------------------------------------------------------------

NAN, INF = math.nan, math.inf
POLY = {"learning_rate": 0.1, "decay_steps": 10}
EXP = POLY | {"decay_rate": 0.5, "use_staircase_decay": True}
INV = POLY | {"min_lr": 0.01}
PIECES = {"learning_rate": 0.1, "boundaries": [1, 3], "decay_rates": [0.1, 0.01]}
NOAM = {"learning_rate": 1.0, "d_model": 8, "warmup_steps": 4}
ERRORS = [
    *(("FixedLR", {}, "learning_rate", value, ValueError) for value in (-0.1, NAN, INF)),
    *(("FixedLR", {}, "learning_rate", value, TypeError) for value in ("0.1", None, True, [0.1])),
    *(
        (name, arguments, "decay_steps", value, ValueError)
        for name, arguments in [("ExpDecay", EXP), ("PolyDecay", POLY), ("CosineDecay", POLY), ("InvPolyDecay", INV)]
        for value in (0, -1, 0.0, NAN, INF)
    ),
    *((n, a, "power", v, ValueError) for n, a in [("PolyDecay", POLY), ("InvPolyDecay", INV)] for v in (0, -1.0, NAN)),
    ("CosineDecay", POLY, "power", NAN, ValueError),
    *((n, POLY, "begin_decay_at", v, ValueError) for n in ("PolyDecay", "CosineDecay") for v in (-1, 1.5, NAN)),
    *((n, POLY, "warmup_steps", v, ValueError) for n in ("PolyDecay", "CosineDecay") for v in (-1, 1.5, NAN, INF)),
    *((n, POLY, "min_lr", v, ValueError) for n in ("PolyDecay", "CosineDecay") for v in (-0.1, NAN)),
    ("CosineDecay", POLY, "absolute_min_lr", NAN, ValueError),
    ("CosineDecay", POLY | {"min_lr": 0.1}, "absolute_min_lr", 0.1, ValueError),
    ("ExpDecay", EXP, "decay_steps", 1000 / 3, ValueError),
    ("ExpDecay", EXP, "decay_rate", -0.5, ValueError),
    ("ExpDecay", EXP, "decay_rate", NAN, ValueError),
    ("ExpDecay", EXP, "use_staircase_decay", 1, TypeError),
    ("InvPolyDecay", INV, "learning_rate", 0.0, ValueError),
    ("InvPolyDecay", INV, "begin_decay_at", 5, ValueError),
    ("InvPolyDecay", INV, "warmup_steps", 3, ValueError),
    ("InvPolyDecay", INV, "power", 0.01, ValueError),
    ("InvPolyDecay", INV, "power", 1e-320, ValueError),
    ("PiecewiseConstant", PIECES, "boundaries", [3, 1], ValueError),
    ("PiecewiseConstant", PIECES, "boundaries", [1], ValueError),
    ("PiecewiseConstant", PIECES, "boundaries", [-1, 3], ValueError),
    ("PiecewiseConstant", PIECES, "boundaries", [1, NAN], ValueError),
    ("PiecewiseConstant", PIECES, "boundaries", [0.5, 3], ValueError),
    ("PiecewiseConstant", PIECES, "boundaries", 3, TypeError),
    ("PiecewiseConstant", PIECES, "boundaries", "13", TypeError),
    ("PiecewiseConstant", PIECES, "decay_rates", [0.1, NAN], ValueError),
    ("PiecewiseConstant", PIECES, "decay_rates", [0.1], ValueError),
    ("PiecewiseConstant", PIECES, "decay_rates", [], ValueError),
    ("PiecewiseConstant", PIECES, "steps_per_epoch", -1, ValueError),
    ("PiecewiseConstant", PIECES, "steps_per_epoch", 2.5, ValueError),
    ("TransformerPolicy", NOAM, "d_model", 0, ValueError),
    ("TransformerPolicy", NOAM, "warmup_steps", 0, ValueError),
    ("TransformerPolicy", NOAM, "max_lr", NAN, ValueError),
    ("TransformerPolicy", NOAM, "coefficient", NAN, ValueError),
    ("TransformerPolicy", NOAM, "dtype", "int32", ValueError),
    ("Warmup", {"schedule": 0.1}, "warmup_steps", 0, ValueError),
    ("Warmup", {"schedule": 0.1, "warmup_steps": 3}, "start_factor", NAN, ValueError),
    ("Warmup", {"schedule": 0.1, "warmup_steps": 3}, "delay_schedule", 1, TypeError),
    ("Join", {"schedules": [0.1, 0.2, 0.3]}, "boundaries", [5, 3], ValueError),
    ("Join", {"schedules": [0.1, 0.2, 0.3]}, "boundaries", [5], ValueError),
    ("ScaledByReplicas", {"schedule": 0.1}, "num_replicas", 0, ValueError),
    ("ScaledByReplicas", {"schedule": 0.1, "num_replicas": 2}, "rule", "cubic", ValueError),
    ("ScaledByReplicas", {"schedule": 0.1, "num_replicas": 2}, "warmup_steps", -1, ValueError),
]


@pytest.mark.parametrize(("name", "arguments", "wrong", "value", "error"), ERRORS)
@pytest.mark.neutral
def test_errors_name_the_argument_and_its_value(name, arguments, wrong, value, error):
    with pytest.raises(error) as raised:
        getattr(schedules, name)(**arguments | {wrong: value})
    message = str(raised.value)
    assert f"`{wrong}`" in message
    assert f"{wrong}={value!r}" in message or (isinstance(value, list) and "Received: " in message)


@pytest.mark.neutral
def test_errors_read_well():
    with pytest.raises(ValueError) as raised:
        schedules.PolyDecay(0.1, 0)
    assert str(raised.value) == (
        "`decay_steps` must be a finite number, at least 1. Received: decay_steps=0. "
        "Give the number of updates that the decay takes."
    )


@pytest.mark.parametrize("step", [2.0, np.float32(2), np.array([0.5]), True])
def test_steps_that_are_not_integers_are_refused(step):
    with pytest.raises(TypeError, match="`step` counts updates and must be made of integers"):
        schedules.FixedLR(0.1)(step)
    with pytest.raises(TypeError, match="`step` counts updates"):
        schedules.FixedLR(0.1)(ops.convert_to_tensor(step))


def test_negative_steps_are_refused():
    with pytest.raises(ValueError, match=r"`step` must not be negative\. Received: step=-1"):
        schedules.FixedLR(0.1)(-1)


# -- docs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [policies, composition, schedule_module])
@pytest.mark.neutral
def test_examples_in_docstrings(module):
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert result.attempted and not result.failed


@pytest.mark.neutral
def test_examples_in_the_docs():
    result = doctest.testfile(str(DOCS / "schedules.md"), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert result.attempted and not result.failed


@pytest.mark.neutral
def test_every_public_name_is_in_the_docs_and_documented():
    text = (DOCS / "schedules.md").read_text(encoding="utf-8")
    for name in schedules.__all__:
        assert f"`{name}" in text, name
        docstring = getattr(schedules, name).__doc__
        for section in ("Args:", "Returns", "Raises:", "Example:"):
            assert section in docstring, (name, section)
        assert name == "get" or "References:" in docstring, name
    assert ks.schedules is schedules
