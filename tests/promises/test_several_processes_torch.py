"""PyTorch: everything in rank_checks.py, on four ranks, in one spawn of workers."""

import pytest
from support import checks, launch
from support.launch import patient

pytestmark = [pytest.mark.backends("torch"), pytest.mark.timeout(600)]

SOURCE = launch.SCRIPTS / "rank_checks.py"
CHECKS = checks.names_in(SOURCE)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    file = tmp_path_factory.mktemp("ranks") / "passed.json"
    return checks.passed_and_failures(SOURCE, 4, file, CHECKS, timeout_alone=60)


@pytest.mark.parametrize("name", CHECKS)
def test_on_four_ranks(outcome, name):
    passed, failures = outcome
    if name in failures:
        pytest.fail(failures[name], pytrace=False)
    assert name in passed


def test_a_worker_that_fails_or_hangs_is_reported_in_time():
    """The launcher itself: a traceback of the worker, and a limit that holds."""
    import time

    with pytest.raises(launch.WorkersFailed, match="no_such_check"):
        launch.torchrun(SOURCE.name, 1, "unused", "no_such_check")
    start = time.monotonic()
    with pytest.raises(launch.WorkersFailed, match="not finished after 1"):
        launch.run(["sleep", "60"], 1.0, {})
    assert time.monotonic() - start < patient(10)
