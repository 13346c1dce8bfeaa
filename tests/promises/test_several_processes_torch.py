"""PyTorch: everything in rank_checks.py, on four ranks, in one spawn of workers."""

import pytest
from support import checks, launch
from support.launch import patient
from support.suites import some

pytestmark = [pytest.mark.backends("torch"), pytest.mark.timeout(600)]

SOURCE = launch.SCRIPTS / "rank_checks.py"
CHECKS = checks.names_in(SOURCE)


# What test_every_argument.py shows of replicas in threads by default.
OTHERS = ["every_argument_does_what_the_docstring_says"]


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    return checks.Runs(request, SOURCE, tmp_path_factory.mktemp("ranks"), 4)


@pytest.mark.parametrize("name", some(CHECKS, lambda name: name not in OTHERS))
def test_on_four_ranks(runs, name):
    runs.verify(name)


def test_a_worker_that_fails_or_hangs_is_reported_in_time():
    """The launcher itself: a traceback of the worker, and a limit that holds."""
    import time

    with pytest.raises(launch.WorkersFailed, match="no_such_check"):
        launch.torchrun(SOURCE.name, 1, "unused", "no_such_check")
    start = time.monotonic()
    with pytest.raises(launch.WorkersFailed, match="not finished after 1"):
        launch.run(["sleep", "60"], 1.0, {})
    assert time.monotonic() - start < patient(10)
