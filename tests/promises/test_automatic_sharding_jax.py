"""JAX: two processes that are given the same data train, evaluate and predict as one process."""

import pickle

import keras
import numpy as np
import pytest
from promises.problems import whole_data
from promises.problems.whole_data import BATCH, X, Y
from support import launch, problem

pytestmark = [pytest.mark.backends("jax"), pytest.mark.timeout(300), pytest.mark.xdist_group("processes")]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    file = tmp_path_factory.mktemp("jax") / "found.pickle"
    try:
        launch.jax_processes("jax_sharding.py", 2, file, timeout=200)
    except launch.WorkersFailed as failure:
        pytest.fail(str(failure), pytrace=False)
    return pickle.loads(file.read_bytes())


@pytest.fixture(scope="module")
def alone():
    return whole_data.outcomes(whole_data.compiled())


@pytest.mark.parametrize("case", whole_data.CASES)
def test_the_updates_are_those_of_one_process(found, alone, case):
    history, weights, drawn = found[0][case]
    expected, of_one, drawn_by_one = alone[0][case]
    assert problem.relative_difference(weights, of_one) <= problem.TOLERANCE
    assert history.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(history[name], expected[name], rtol=1e-5, err_msg=name)
    assert drawn == drawn_by_one  # process 0 goes on as one process


def test_evaluate_and_predict_tell_of_all_rows(found, alone):
    for name, value in alone[1].items():
        np.testing.assert_allclose(found[1][name], value, rtol=1e-5)
    np.testing.assert_allclose(found[2], alone[2], rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
def test_class_weights_and_data_of_other_frameworks(tmp_path):
    file = tmp_path / "found.pickle"
    try:
        launch.jax_processes("jax_kinds.py", 2, file, timeout=200)
    except launch.WorkersFailed as failure:
        pytest.fail(str(failure), pytrace=False)
    found, *_ = pickle.loads(file.read_bytes())
    alone, *_ = whole_data.outcomes(whole_data.compiled(), others=whole_data.other_cases())
    assert len(found) >= 2
    for name, (expected, of_one, _) in alone.items():
        history, weights, _ = found[name]
        assert problem.relative_difference(weights, of_one) <= problem.TOLERANCE, name
        for log in expected:
            np.testing.assert_allclose(history[log], expected[log], rtol=1e-5, err_msg=f"{name}: {log}")


@pytest.mark.exhaustive
def test_processes_may_have_one_device_each(tmp_path):
    file = tmp_path / "found.pickle"
    try:
        launch.jax_processes("jax_one_device.py", 2, file, num_devices=1, timeout=150)
    except launch.WorkersFailed as failure:
        pytest.fail(str(failure), pytrace=False)
    history, weights, outputs = pickle.loads(file.read_bytes())
    model = whole_data.compiled()
    keras.utils.set_random_seed(3)
    expected = model.fit(X, Y, batch_size=BATCH, epochs=2, validation_split=0.1, verbose=0).history
    model.fit(X, Y, batch_size=BATCH, epochs=1, verbose=0)
    assert problem.relative_difference(weights, model.get_weights()) <= problem.TOLERANCE
    np.testing.assert_allclose(outputs, model.predict(X, batch_size=BATCH, verbose=0), rtol=1e-5, atol=1e-6)
    for name in expected:
        np.testing.assert_allclose(history[name], expected[name], rtol=1e-5, err_msg=name)
