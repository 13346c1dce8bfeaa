"""A rank that hangs in its second step: `Heartbeat` and the launcher's `--watch` show where each rank waits."""

import json
import sys

import keras
import pytest
from support import launch

BACKEND = keras.backend.backend()
# The call of the package in which the other rank waits: for gradients, or for the comparison of the next batch.
WAITS_IN = {"torch": "in wait_for", "jax": "in _gather", "tensorflow": "in _gathered"}[BACKEND]

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("processes")]


@pytest.mark.exhaustive("jax", "tensorflow")
def test_each_rank_writes_where_it_waits(tmp_path):
    printed = launch.processes(BACKEND, "hung_rank.py", 2, tmp_path, launch.patient(4), timeout=100)
    assert "trained to the end" in str(printed)
    waits, hangs = [(tmp_path / f"rank-{rank}.stacks").read_text() for rank in range(2)]
    assert "in hangs_here" in hangs and "in hangs_here" not in waits
    assert WAITS_IN in waits, waits
    beats = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert [(beat["rank"], beat["step"], beat["phase"]) for beat in beats] == [(0, 3, "ended"), (1, 3, "ended")]


@pytest.mark.exhaustive
def test_the_launcher_ends_the_job_and_prints_where_each_rank_waits(tmp_path):
    options = ["--nproc", "2", "--watch", str(launch.patient(5)), "--log-dir", str(tmp_path / "logs")]
    command = [
        sys.executable,
        "-m",
        "keras_shardopt.launch",
        *options,
        launch.SCRIPTS / "hung_rank.py",
        "watched",
        "600",
    ]
    environment = launch.variables(BACKEND, OMP_NUM_THREADS="1", XLA_FLAGS="")
    with pytest.raises(launch.WorkersFailed, match="exit status 134: ") as failed:
        launch.run([str(word) for word in command], 200, environment)
    printed = str(failed.value).splitlines()
    assert "keras_shardopt.launch: no step for" in printed[-1] and "step 2 (training). Exit status: 134." in printed[-1]
    waits, hangs = [(tmp_path / "logs" / f"rank-{rank}.log").read_text() for rank in range(2)]
    assert "in hangs_here" in hangs and "in hangs_here" not in waits and WAITS_IN in waits
    assert {f"[0] {line}" for line in waits.splitlines()} <= set(printed)
