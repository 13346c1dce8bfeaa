"""PyTorch: after `prepare(model)` ranks with uneven parts of a batch train like one process with the whole batch."""

import functools

import numpy as np
import pytest
from promises.problems import own_rows, uneven
from support import checks, launch, problem
from support.suites import some

pytestmark = [pytest.mark.backends("torch"), pytest.mark.timeout(400)]

DIVISIONS = [(name, "divided") for name in uneven.CASES]
DIVISIONS += [
    ("plain", "some_without"),
    ("added loss", "some_without"),
    ("mask", "some_without"),
    ("two outputs", "some_without"),
    ("two losses", "some_without"),
    ("divided by weights", "all_on_the_last"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What rank_prepare.py wrote on 3 ranks."""
    file = tmp_path_factory.mktemp("prepare") / "results.npz"
    launch.torchrun("rank_prepare.py", 3, file)
    return np.load(file)


def weights(results, key):
    return [results[f"{key}/weight{i}"] for i in range(sum(name.startswith(f"{key}/weight") for name in results.files))]


@functools.cache
def alone(case):
    return uneven.run(case, 1)


@pytest.mark.parametrize("case, division", DIVISIONS)
def test_update_and_metrics_are_those_of_one_process(results, case, division):
    key = f"{case}/{division}"
    logs = {name: results[f"{key}/log/{name}"] for name in alone(case)[1]}
    uneven.assert_same((weights(results, key), logs), alone(case), uneven.start_of(case))
    assert results[f"{key}/difference"] == 0
    assert results[f"{key}/same logs"]


def test_replica_clipnorm_is_that_of_numpy(results):
    expected, num_clipped = uneven.clipped_in_numpy(lambda batch: np.split(batch, [4, 8]), 0.9)
    assert 2 <= num_clipped <= 10, "the limit must bite on some ranks only"
    assert problem.relative_difference(weights(results, "clipped"), expected) <= problem.TOLERANCE


# Each option, in windows of micro-batches and with divided state where these do more than one without the other.
BY_DEFAULT = [
    *("plain", "scaled, NaN early", "skips in windows, NaN last", "divided state, scaled in windows, NaN late"),
    *("clipped and scaled in windows, NaN late", "int8 in windows with divided state"),
    *("int8 with divided state, scaled, NaN late", "int4", "powersgd", "apart for 2 windows"),
]


@pytest.mark.parametrize("name", some(own_rows.CASES, BY_DEFAULT))
def test_data_of_their_own_that_end_at_different_times(world, request, name):
    names = [params["name"] for params in checks.selected(request) if params.get("name") in own_rows.CASES]
    found, expected = world.run(own_rows.trained, 3, name, names), own_rows.in_numpy(name)
    assert found["apart"] == 0
    assert found["counts"] == expected["counts"]
    # By how much of the movement what is not sent yet may shift weights.
    # NumPy does PowerSGD alike, but a change of the start in the last bit moves the end up to four times as far.
    unsent = {"int8": 0.01, "int4": 0.1, "powersgd": 4 * problem.TOLERANCE}
    tolerance = unsent.get(name.split()[0], problem.TOLERANCE)
    assert problem.relative_difference(found["weights"], expected["weights"]) <= tolerance
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=max(tolerance, 1e-5))


@pytest.mark.parametrize("name", own_rows.OF_TWO)
def test_so_do_parts_of_such_data(world, name):
    found, expected = world.run(own_rows.trained, 2, name, own_rows.OF_TWO), own_rows.in_numpy(name, 2)
    assert found["apart"] == 0
    assert found["counts"] == expected["counts"]
    assert problem.relative_difference(found["weights"], expected["weights"]) <= problem.TOLERANCE
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)


def test_one_batch_at_a_time(results):
    model = uneven.compiled()
    logs = [
        model.train_on_batch(*uneven.rows_of({}, slice(start, start + uneven.BATCH_SIZE)), return_dict=True)
        for start in range(0, uneven.NUM_ROWS, uneven.BATCH_SIZE)
    ]
    assert problem.relative_difference(weights(results, "on_batch"), model.get_weights()) <= problem.TOLERANCE
    assert results["on_batch/same logs"]
    for name in logs[0]:
        values = [of_batch[name] for of_batch in logs]
        np.testing.assert_allclose(results[f"on_batch/log/{name}"], values, rtol=1e-5, err_msg=name)
    expected = model.evaluate(*uneven.rows_of({}), batch_size=15, verbose=0)
    np.testing.assert_allclose(results["on_batch/evaluated"], expected, rtol=1e-5)


def test_state_that_is_not_trained(results):
    assert results["same statistics"]
    assert results["prints"]


def test_each_rank_predicts_by_itself(results):
    np.testing.assert_array_equal(results["predicted own"][:, 0], results["predicted own"][:, 1])
    assert results["predicted"][1] == uneven.NUM_ROWS
    assert results["after predicting/difference"] == 0
    assert results["after predicting/same weights"]


def test_compiled_anew_without_cross_shard_is_refused(results):
    assert "must be trained with a `CrossShard`" in str(results["without"])
    assert "groups train separately" in str(results["apart"])


def test_ranks_that_want_different_things_all_raise(results):
    trains, model = "trains a prepared model", "of a prepared model"
    assert f"rank 0 ends an epoch {model}, rank 1 {trains}, rank 2 {trains}." in str(results["stopped"])
    assert f"rank 0 {trains}, rank 1 leaves `fit` {model}, rank 2 leaves `fit` {model}." in str(results["epochs"])
    assert results["all raised"]


def test_without_prepare_unequal_numbers_of_batches_are_an_error_everywhere(results):
    assert "this replica continues, and only 1 of 3 replicas continue" in str(results["unprepared"])
    assert results["unprepared all raised"]
    assert results["unprepared updates"] == 2
    assert results["unprepared difference"] == 0
