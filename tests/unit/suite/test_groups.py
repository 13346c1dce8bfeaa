"""Tests that look at the same runs are given to the same worker: else each worker makes these runs anew."""

import subprocess
import sys

import pytest
from packaging.version import Version

TESTS = """
import os
import pytest

@pytest.mark.parametrize("number", range(8))
def test_one_of_a_group(number, tmp_path_factory):
    print("made by", os.environ["PYTEST_XDIST_WORKER"])
"""

CONFTEST = """
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.xdist_group("group"))
"""


@pytest.mark.xfail(
    Version(pytest.__version__) >= Version("9.2"),
    reason="xdist 3.8 writes groups into the name of a test, which pytest 9.2 makes anew (pytest-xdist issue 1386)",
    strict=True,
)
@pytest.mark.neutral
def test_a_group_stays_on_one_worker(tmp_path):
    (tmp_path / "test_group.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadgroup", "-rP", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    workers = [line for line in run.stdout.splitlines() if line.startswith("made by")]
    assert len(workers) == 8, run.stdout + run.stderr
    assert len(set(workers)) == 1
