"""A backend environment in which everything skipped fails."""

import os
import pathlib
import subprocess
import sys

import pytest
from conftest import NEUTRAL_BACKEND

ROOT = pathlib.Path(__file__).parents[3]


def run(folder, *arguments):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    # Which backend it is makes no difference, nor whether there is one.
    anything = "import sys, unittest.mock\nsys.modules[__name__] = unittest.mock.MagicMock()\n"
    for name in ("keras", NEUTRAL_BACKEND):
        (folder / f"{name}.py").write_text(anything)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT), str(ROOT / "tests")])}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.neutral
def test_a_run_in_which_everything_skipped_fails(tmp_path, monkeypatch):
    monkeypatch.delenv("REPORTS", raising=False)  # it would write over that of this run
    suite = tmp_path / "test_none.py"
    suite.write_text(
        "import pytest\n@pytest.mark.backends('another')\ndef test_it(): pass\ndef test_that(): pytest.skip('why')\n"
    )
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    result = run(tmp_path, str(suite), "--rootdir", str(tmp_path), "-c", str(ROOT / "pyproject.toml"))
    assert result.returncode == 1, result.stdout + result.stderr
    assert "everything was skipped" in result.stdout
    assert "about another, not" in result.stdout
