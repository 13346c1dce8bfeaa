"""TensorFlow: with virtual replicas the bits of a training run do not depend on the number of devices."""

import functools
import json

import pytest
import tensorflow as tf
from promises.problems import same_bits
from support import launch
from support.suites import some

import keras_shardopt as ks

pytestmark = pytest.mark.backends("tensorflow")

# Each model with each optimizer, on two devices or on four, and each option on four. Each device traces the steps of
# training and validation anew.
ON = [(2, f"{net}-SGD-plain") for net in ("normalizing", "masked")]
ON += [(2, f"{net}-Adam-plain") for net in ("attending", "recurrent")]
ON += [(4, "attending-SGD-plain"), (4, "masked-Adam-plain"), (4, "normalizing-Adam-divided")]
ON += [(4, f"normalizing-SGD-{options}") for options in ("clipped", "accumulated", "summed", "skipped")]
ON += [(4, "masked-SGD-clipped"), (4, "recurrent-SGD-weighted"), (4, "paired-SGD-weighted")]
BY_DEFAULT = [(2, "attending-Adam-plain"), (4, "normalizing-SGD-clipped")]
# TensorFlow's own optimizer of graphs takes as long as all else: in an exhaustive run it sees these.
OPTIMIZED = ["normalizing-SGD-plain", "masked-SGD-plain", "recurrent-Adam-plain", "attending-SGD-plain"]


@pytest.fixture(autouse=True)
def graphs_as_they_are(request):
    before = tf.config.optimizer.get_experimental_options()
    compares_bits = request.function is test_one_sha256_for_any_number_of_devices
    if not (compares_bits and request.node.callspec.params["case"] in OPTIMIZED):
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options(before)


@functools.cache
def trained_on(num_devices, case):
    return same_bits.trained_on(num_devices, case, **same_bits.validation_of(case))


@pytest.mark.parametrize(("num_devices", "case"), some(ON, BY_DEFAULT))
def test_one_sha256_for_any_number_of_devices(case, num_devices):
    assert trained_on(num_devices, case) == trained_on(1, case)


@pytest.mark.exhaustive
@pytest.mark.timeout(500)
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("case", ["attending-Adam-plain", "normalizing-SGD-clipped"])
def test_eight_devices_have_the_same_bits(case, tmp_path):
    file, environment = tmp_path / "found.json", launch.variables("tensorflow")
    start = launch.fork_with("tensorflow")
    launch.workers("tensorflow_same_bits.py", [environment], file, 8, case, timeout=300, start=start)
    assert json.loads(file.read_text()) == {case: trained_on(1, case)}


@pytest.mark.exhaustive
def test_another_number_of_parts_would_change_the_bits():
    case = "attending-Adam-plain"
    with ks.data_parallel(1) as replicas:
        model = same_bits.model_of(case, virtual_replicas=4)
        same_bits.fit(model, case)
    replicas.close()
    assert same_bits.digest(*model.weights) != trained_on(1, case)["weights"]


# With equal bits on any number of devices, one is enough, unless parts normalize by their own rows.
@pytest.mark.parametrize(
    ("num_devices", "case"),
    [(2, "normalizing-SGD-accumulated"), (2, "masked-SGD-plain"), (1, "recurrent-SGD-weighted")],
)
@pytest.mark.exhaustive
def test_values_are_those_of_the_optimizer_without_parts(num_devices, case):
    same_bits.assert_values_are_those_without_parts(case, num_devices, num_parts=2)


@pytest.mark.exhaustive
def test_a_run_that_stops_on_four_devices_goes_on_with_two_and_then_one(tmp_path):
    case = "dropping-Adam-plain"  # three batches in each of three epochs
    whole = same_bits.restarted_on(1, case, tmp_path / "whole")
    assert same_bits.restarted_on(4, case, tmp_path / "stopped", 5) is None
    assert same_bits.restarted_on(2, case, tmp_path / "stopped", 4) is None
    assert same_bits.restarted_on(1, case, tmp_path / "stopped") == whole
    assert ks.callbacks.first_difference(tmp_path / "whole" / "prints", tmp_path / "stopped" / "prints") is None
