"""PyTorch: a killed job that is started again ends with the weights of one that nobody killed."""

import sys

import numpy as np
import pytest
from support import launch
from support.suites import some

pytestmark = [pytest.mark.backends("torch"), pytest.mark.timeout(300)]


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


# Two by the agent of torchrun in a process that forks, which takes a tenth of the time of importing.
@pytest.mark.parametrize(
    ("kind", "deaths", "begun"),
    some(
        [("whole", (8, 17), "epoch 3"), ("sharded", (13,), "epoch 2"), ("pieces", (13,), "epoch 2")],
        lambda case: case[0] == "sharded",
    ),
    ids=["whole", "sharded", "pieces"],
)
def test_a_restarted_job_ends_with_the_weights_of_one_that_nobody_killed(nobody_killed, kind, deaths, begun, tmp_path):
    found, printed = trained(tmp_path / kind, kind, *deaths, by_torchrun=kind == "pieces")
    assert printed.count("begins with epoch") == (len(deaths) + 1) * 2, printed
    assert f"begins with {begun}" in printed, printed
    # Two ranks' sums are the same in any order, so that even the bits are, whoever holds which part.
    assert found.keys() == nobody_killed.keys() and len(found) > 10
    for name, array in nobody_killed.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
