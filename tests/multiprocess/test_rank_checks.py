"""PyTorch: everything in rank_checks.py, on four ranks, in one spawn of workers."""

import ast
import functools
import json
import pathlib

import pytest
from support import launch

pytestmark = [pytest.mark.backends("torch"), pytest.mark.timeout(600)]

SOURCE = pathlib.Path(__file__).with_name("rank_checks.py")
# Read, not imported: the file is for workers.
CHECKS = [
    node.name
    for node in ast.parse(SOURCE.read_text()).body
    if isinstance(node, ast.FunctionDef) and any(getattr(d, "id", "") == "check" for d in node.decorator_list)
]


@functools.cache
def run(folder):
    """The names of the checks that passed, or what the workers printed."""
    file = folder / "passed.json"
    try:
        launch.torchrun(SOURCE.name, 4, file, *CHECKS, timeout=240)
    except launch.WorkersFailed:
        # One check takes the others down with it; so each alone, to say which.
        passed, failures = [], {}
        for name in CHECKS:
            try:
                launch.torchrun(SOURCE.name, 4, file, name, timeout=60)
                passed.append(name)
            except launch.WorkersFailed as failure:
                failures[name] = str(failure)
        return passed, failures
    return json.loads(file.read_text()), {}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    return run(tmp_path_factory.mktemp("ranks"))


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
    assert time.monotonic() - start < 10
