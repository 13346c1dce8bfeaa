"""Processes that are killed while they save; `python tests/promises/processes/kills.py FOLDER` kills a hundred."""

import json

import pytest
from support import launch

# The backend that can be forked; in one process, as both look at the same kills.
pytestmark = [pytest.mark.backends("torch"), pytest.mark.xdist_group("kills")]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What there was after kills while files were replaced, and while they were written in place."""
    arguments = [tmp_path_factory.mktemp("kills"), "--rounds", 18, "--fault", 12]
    environments = [launch.variables("torch", OMP_NUM_THREADS="1")]
    script, start = "kills.py", launch.fork_with("torch")
    (output,) = launch.workers(script, environments, *arguments, timeout=150, start=start)
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def test_no_kill_tears_a_file(found):
    replaced, _ = found
    assert (replaced["torn"], replaced["lost"]) == (0, 0)
    assert replaced["in_the_middle"] > 0  # or nothing was tried
    assert replaced["left_behind"] == ["model.keras", "model.weights.h5", "sharded"]


def test_files_written_in_place_are_torn(found):
    assert found[1]["torn"] > 0
