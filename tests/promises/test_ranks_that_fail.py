"""PyTorch: ranks that train different things, that die or stall, and that are started again."""

import json
import re
import sys

import numpy as np
import pytest
from support import launch
from support.launch import patient
from support.suites import some

pytestmark = [pytest.mark.backends("torch"), pytest.mark.timeout(300)]

NUM_DIFFERENCES = 23
NUM_CALLS = 5


@pytest.fixture(scope="module")
def passed(tmp_path_factory):
    file = tmp_path_factory.mktemp("mismatches") / "passed.json"
    try:
        launch.torchrun("rank_mismatches.py", 3, file, timeout=200)
    except launch.WorkersFailed as failure:
        pytest.fail(str(failure), pytrace=False)
    return json.loads(file.read_text())


def test_every_difference_is_named_on_every_rank_before_the_first_update(passed):
    assert len(passed) == NUM_DIFFERENCES + 3 + NUM_CALLS


@pytest.mark.parametrize(
    "name",
    [
        *("prepare on one rank", "prepare on all but one", "evaluate on one rank", "SyncReplicas on one rank"),
        "prepare on one rank later",
    ],
)
def test_different_calls_are_named_on_every_rank(passed, name):
    assert name in passed


@pytest.mark.parametrize("name", ["right programs", "compared once"])
def test_ranks_that_train_the_same_go_on(passed, name):
    assert name in passed


@pytest.fixture(scope="module")
def rounds():
    """Four rounds, a rank killed before a collective or inside it, and one stopped; by hand it is 50."""
    environment = launch.variables("torch", OMP_NUM_THREADS="1")
    (printed,) = launch.workers("rank_deaths.py", [environment], 4, 2, timeout=200, start=launch.fork_with("torch"))
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def ends(rounds, how):
    """The case, surviving rank and its end, for all rounds of a kind."""
    return [(r["case"], int(rank), end) for r in rounds if r["case"]["how"] == how for rank, end in r["ends"].items()]


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_the_others_end_in_time_and_name_the_rank(rounds, how):
    found = ends(rounds, how)
    assert found
    for case, rank, end in found:
        assert not end["hangs"], (case, rank)
        assert end["class"] == "RuntimeError"
        # 2 s on a quiet machine, which is what the long run is for.
        assert end["seconds"] < case["timeout"] + patient(6), (case, rank, end)
        named = re.search(r"no answer from ranks? ([\d, ]+)", end["message"])
        assert named and case["victim"] in map(int, re.findall(r"\d+", named[1])), (case, rank, end)


def trained(folder, kind, *deaths, by_torchrun=False):
    """The weights and state that two ranks end with, of which rank 1 dies once in each of the steps `deaths`."""
    folder.mkdir()
    environment = launch.variables("torch", OMP_NUM_THREADS="1")
    if by_torchrun:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2"]
        (port,) = launch.free_ports(1)
        command += ["--master-port", str(port), "--monitor-interval", "0.1"]
        command += [str(launch.SCRIPTS / "rank_restart.py"), str(folder), kind, *map(str, deaths)]
        printed = launch.run(command, 200, environment)
    else:
        start = launch.fork_with("torch")
        (printed,) = launch.workers("rank_restart.py", [environment], folder, kind, *deaths, timeout=200, start=start)
    return dict(np.load(folder / "end.npz")), printed


@pytest.fixture(scope="module")
def nobody_killed(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("restart") / "alone", "whole")[0]


# The second is the agent of torchrun in a process that forks, which takes a tenth of the time of importing.
@pytest.mark.parametrize(
    ("kind", "deaths", "begun"),
    some([("whole", (8, 17), "epoch 3"), ("sharded", (13,), "epoch 2")], lambda case: case[0] == "sharded"),
    ids=["whole", "sharded"],
)
def test_a_restarted_job_ends_with_the_weights_of_one_that_nobody_killed(nobody_killed, kind, deaths, begun, tmp_path):
    found, printed = trained(tmp_path / kind, kind, *deaths, by_torchrun=kind == "whole")
    assert printed.count("begins with epoch") == (len(deaths) + 1) * 2, printed
    assert f"begins with {begun}" in printed, printed
    # Two ranks' sums are the same in any order, so that even the bits are, whoever holds which part.
    assert found.keys() == nobody_killed.keys() and len(found) > 10
    for name, array in nobody_killed.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
