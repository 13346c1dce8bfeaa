"""JAX: with virtual replicas the bits of a training run do not depend on the number of devices."""

import json

import jax
import keras
import numpy as np
import pytest
from promises.problems import same_bits
from promises.problems.same_bits import trained_on
from support import launch
from support.suites import some

import keras_shardopt as ks

pytestmark = pytest.mark.backends("jax")

# Several parts on each device (2, 4), or one (8): each model (but `paired`) and each option with both, mostly in
# different pairs.
ON_FOUR = ["normalizing-SGD-plain", "attending-SGD-plain"]
ON_TWO = ["masked-Adam-plain", "normalizing-Adam-divided", "normalizing-SGD-clipped", "recurrent-SGD-weighted"]
ON_EIGHT = ["recurrent-Adam-plain", "masked-SGD-clipped", "paired-SGD-weighted", "normalizing-SGD-divided"]
ON_BOTH = ["attending-Adam-plain", "constrained-SGD-plain"]
ON_BOTH += [f"normalizing-SGD-{options}" for options in ("accumulated", "summed", "skipped")]
CASES = [(number, case) for number, cases in ((2, ON_TWO), (8, ON_EIGHT)) for case in [*cases, *ON_BOTH]]
CASES += [(4, case) for case in ON_FOUR]
BY_DEFAULT = [(2, "attending-Adam-plain"), (8, "attending-Adam-plain")]


@pytest.mark.parametrize(("num_devices", "case"), some(CASES, BY_DEFAULT))
def test_one_sha256_for_any_number_of_devices(num_devices, case):
    assert trained_on(num_devices, case) == trained_on(1, case)


@pytest.mark.exhaustive
def test_another_number_of_parts_would_change_the_bits():
    case = "recurrent-SGD-weighted"
    with ks.data_parallel(2) as replicas:
        model = same_bits.model_of(case, virtual_replicas=4)
    same_bits.fit(model, case, validation_data=None)
    replicas.close()
    assert same_bits.digest(*model.weights) != trained_on(2, case)["weights"]


def test_moving_statistics_change_by_the_mean_over_parts_that_have_rows():
    with ks.data_parallel(2) as replicas:
        found, expected = same_bits.moving_statistics()
    replicas.close()
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


VALUES = ["recurrent-SGD-plain", "normalizing-SGD-accumulated", "masked-SGD-plain", "paired-SGD-weighted"]


@pytest.mark.parametrize("case", some(VALUES, ("paired-SGD-weighted", "normalizing-SGD-accumulated")))
def test_values_are_those_of_the_optimizer_without_parts(case):
    num_parts = 2 if case.startswith("normalizing") else same_bits.NUM_PARTS  # parts normalize by their own rows
    same_bits.assert_values_are_those_without_parts(case, num_devices=2, num_parts=num_parts)


@pytest.mark.exhaustive
def test_a_run_that_stops_on_four_devices_goes_on_with_two_and_then_one(tmp_path):
    case = "dropping-Adam-plain"
    whole = same_bits.restarted_on(2, case, tmp_path / "whole")
    assert same_bits.restarted_on(4, case, tmp_path / "stopped", 5) is None
    assert same_bits.restarted_on(2, case, tmp_path / "stopped", 4) is None
    assert same_bits.restarted_on(1, case, tmp_path / "stopped") == whole
    assert ks.callbacks.first_difference(tmp_path / "whole" / "prints", tmp_path / "stopped" / "prints") is None


@pytest.mark.exhaustive
@pytest.mark.timeout(500)
@pytest.mark.xdist_group("processes")
def test_one_sha256_for_processes_with_any_number_of_devices(tmp_path):
    found = []
    for num_processes, num_devices in ((1, 2), (2, 1), (2, 2)):
        file = tmp_path / f"{num_processes}x{num_devices}.json"
        launch.jax_processes(
            "jax_same_bits.py", num_processes, file, "normalizing-SGD-clipped", num_devices=num_devices, timeout=200
        )
        found.append(json.loads(file.read_text())["weights"])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("how", ["a distribution of one", "the last one"])
@pytest.mark.exhaustive
def test_a_single_device_may_be_any(how):
    case = "normalizing-SGD-clipped"
    last = jax.devices()[-1]
    before = keras.distribution.distribution()
    with jax.default_device(last if how == "the last one" else None):
        if how == "a distribution of one":
            keras.distribution.set_distribution(keras.distribution.DataParallel(devices=["cpu:0"]))
        model = ks.prepare(same_bits.model_of(case))
        same_bits.fit(model, case, validation_data=None)
        keras.distribution.set_distribution(before)
    if how == "the last one":
        assert all(weight.value.devices() == {last} for weight in model.weights)
    assert same_bits.digest(*model.weights) == trained_on(2, case)["weights"]
