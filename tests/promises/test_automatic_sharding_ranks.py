"""PyTorch: the same data on every rank trains as in one process; all in rank_sharding.py, on 3 ranks."""

import pathlib

import pytest
from support import checks

pytestmark = [pytest.mark.backends("torch"), pytest.mark.timeout(400)]

SOURCE = pathlib.Path(__file__).parent / "processes" / "rank_sharding.py"
CHECKS = checks.names_in(SOURCE)


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
