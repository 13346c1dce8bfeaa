"""PyTorch: the same data on every rank trains as in one process; all in rank_sharding.py, on 3 ranks."""

import pathlib

import pytest
from support import checks

pytestmark = [pytest.mark.backends("torch"), pytest.mark.timeout(400)]

SOURCE = pathlib.Path(__file__).parent / "processes" / "rank_sharding.py"
CHECKS = checks.names_in(SOURCE)
ON_ANY_NUMBER = [
    *("arrays", "batches_with_fewer_rows_than_ranks", "class_weights", "a_second_fit_draws_other_orders"),
    *("py_datasets", "data_loaders", "generators", "evaluate_and_predict"),
]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    file = tmp_path_factory.mktemp("sharding") / "passed.json"
    return checks.passed_and_failures(SOURCE, 3, file, CHECKS, timeout_alone=60)


@pytest.mark.parametrize("name", CHECKS)
def test_on_three_ranks(outcome, name):
    passed, failures = outcome
    if name in failures:
        pytest.fail(failures[name], pytrace=False)
    assert name in passed


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.exhaustive
def test_on_other_numbers_of_ranks(tmp_path, num_ranks):
    passed, failures = checks.passed_and_failures(SOURCE, num_ranks, tmp_path / "passed.json", ON_ANY_NUMBER, 90)
    assert passed == ON_ANY_NUMBER, failures
