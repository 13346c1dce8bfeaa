"""JAX: two processes equal one process with the whole batch. Unless a test gives a number, each has two devices."""

import pickle
import re

import keras
import numpy as np
import pytest
from promises.problems import uneven
from support import launch, problem
from support.launch import patient

import keras_shardopt as ks

pytestmark = [pytest.mark.backends("jax"), pytest.mark.timeout(300), pytest.mark.xdist_group("processes")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("jax")
    try:
        launch.jax_processes("jax_process.py", 2, made, timeout=200)
    except launch.WorkersFailed as failure:
        pytest.fail(str(failure), pytrace=False)
    return made


@pytest.fixture(scope="module")
def results(folder):
    return np.load(folder / "results.npz")


def trained(optimizer):
    """A model of one process with the whole batches."""
    model = problem.model()
    model.compile(optimizer, "mse", metrics=["mae"])
    x, y = problem.data()
    model.fit(x, y, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
    return model


@pytest.fixture(scope="module")
def reference():
    return trained(problem.sgd_momentum())


def test_divided_state_trains_as_one_process(folder):
    found = np.load(folder / "divided.npz")
    weights = [found[f"arr_{i}"] for i in range(4)]
    expected = trained(keras.optimizers.Adam(0.01)).get_weights()
    assert problem.relative_difference(weights, expected) <= problem.TOLERANCE


def test_weights_and_slots_equal_one_process(results, reference):
    found = [results[f"variable{i}"] for i in range(10)]
    assert problem.relative_difference(found[:4], reference.get_weights()) <= problem.TOLERANCE
    slots = [keras.ops.convert_to_numpy(v) for v in reference.optimizer.variables]
    assert found[4] == slots[0] == problem.NUM_STEPS  # the update counter, then the rate
    start = [np.zeros_like(slot) for slot in slots[2:]]
    assert problem.relative_difference(found[6:], slots[2:], start) <= problem.TOLERANCE


def test_metrics_are_those_of_the_whole_data(results, reference):
    x, y = problem.data()
    metrics = reference.evaluate(x, y, batch_size=problem.BATCH_SIZE, verbose=0, return_dict=True)
    for name, value in metrics.items():
        np.testing.assert_allclose(results[name], value, rtol=1e-5)
    np.testing.assert_allclose(results["history"], reference.history.history["loss"], rtol=1e-5)


def test_what_the_chief_saved_loads_elsewhere(folder, results):
    model = keras.saving.load_model(folder / "model.keras")
    assert isinstance(model.optimizer, ks.CrossShard)
    for i, variable in enumerate([*model.trainable_variables, *model.optimizer.variables]):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), results[f"variable{i}"])
    plain = problem.model()
    plain.load_weights(folder / "parts.weights.h5")  # of an equal training, in another way
    for i, weight in enumerate(plain.get_weights()):
        np.testing.assert_array_equal(weight, results[f"variable{i}"])
    plain.load_weights(folder / "model.weights.h5")
    for i, weight in enumerate(plain.get_weights()):
        np.testing.assert_array_equal(weight, results[f"variable{i}"])


def test_a_local_copy_predicts(folder):
    predicted = np.load(folder / "predicted.npz")
    model = problem.model()
    model.set_weights([predicted[f"arr_{i}"] for i in range(4)])
    rows = problem.rows_of_replica(problem.data()[0], 0, 2)[:5]
    np.testing.assert_allclose(predicted["predicted"], model.predict(rows, verbose=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("division", ["divided", "some_without", "all_on_the_last"])
def test_unequal_parts_after_prepare(folder, division):
    found = np.load(folder / "uneven.npz")
    alone = uneven.run("divided by weights", 1)
    weights = [found[f"{division}/weight{i}"] for i in range(4)]
    uneven.assert_same((weights, {name: found[f"{division}/log/{name}"] for name in alone[1]}), alone)


@pytest.mark.exhaustive
def test_before_the_first_step_state_is_read_saved_and_restored(tmp_path):
    launch.jax_processes("jax_before_training.py", 2, tmp_path, num_devices=1, timeout=200)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A folder of a training in which process 1 was killed, and what was printed."""
    made = tmp_path_factory.mktemp("interrupted")
    with pytest.raises(launch.WorkersFailed) as failure:
        launch.jax_processes("jax_restart.py", 2, made, 8, timeout=200, grace=60)
    return made, str(failure.value)


def test_who_is_left_ends_with_an_error_in_time(interrupted):
    printed = interrupted[1]
    assert "worker 1, exit status -9" in printed
    # JAX ends the process itself when the limit that it was given is over.
    assert re.search(r"worker 0, exit status -?[1-9]\d*$", printed, re.MULTILINE), printed
    (seconds,) = re.findall(r"^after ([\d.]+) s: RuntimeError$", printed, re.MULTILINE)
    assert float(seconds) < patient(2 + 4), printed  # 2 s on a quiet machine
    words = r"^RuntimeError: All processes must .* exchange of process 0 with process 1\. .* JAX's error is: .*Gloo"
    assert re.search(words, printed, re.MULTILINE), printed


@pytest.mark.exhaustive
def test_processes_that_are_started_again_end_with_the_weights_of_some_that_nobody_killed(interrupted):
    folder, _ = interrupted
    printed = launch.jax_processes("jax_restart.py", 2, folder, timeout=150)
    assert all("begins with epoch 1" in each for each in printed), printed
    expected, found = np.load(folder / "alone.npz"), np.load(folder / "end.npz")
    assert found.files == expected.files and len(found.files) > 20
    for name in expected.files:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


@pytest.mark.exhaustive
def test_compressed_gradients_lose_nothing(tmp_path):
    """Two processes with two devices each: what was sent and what was not add up, also after a restart."""
    found = {}
    for job, names in (("trained", ["int4 in windows that skips", "int8 and uneven rows"]), ("restarted", ["int4"])):
        file = tmp_path / f"{job}.pickle"
        launch.jax_processes("rank_job.py", 2, file, f"promises.problems.compressing:{job}", *names, timeout=150)
        found |= pickle.loads(file.read_bytes())
    straight, again = found.pop("int4")
    for arrays, others in zip(straight[:2], again[:2]):
        assert arrays and all(np.array_equal(array, other) for array, other in zip(arrays, others))
    for name, each in found.items():
        assert (each["skipped"], each["apart"]) == (int("skips" in name), 0)
        for moved, left, expected in zip(each["moved"], each["left"], each["expected"]):
            np.testing.assert_allclose(moved + left, expected, rtol=0, atol=3e-6 * np.max(np.abs(expected)))
            assert np.max(np.abs(moved - expected)) > 1e-4 * np.max(np.abs(expected))
