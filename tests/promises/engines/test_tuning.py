"""The searches on the page of hyperparameters: each trial is a job, and its processes have the same values."""

import collections
import importlib.util
import os
import re
import sys

import pytest
from support import launch, pages

pytestmark = pytest.mark.timeout(400)
PROGRAMS = {block.value: block.code for block in pages.blocks(pages.DOCS / "tuning.md") if block.mark == "file"}
TOOLS = {"search_optuna.py": "optuna", "search_keras_tuner.py": "keras_tuner", "search_ray_tune.py": "ray"}
# Searches do not depend on the backend, and each starts four processes of it.
CASES = [("search_optuna.py", backend) for backend in pages.BACKENDS]
CASES += [("search_keras_tuner.py", "torch"), ("search_ray_tune.py", "torch")]


def test_every_search_is_tried():
    assert {*TOOLS, "trial.py"} == set(PROGRAMS) and {name for name, _ in CASES} == set(TOOLS)


@pytest.mark.parametrize("name, backend", CASES)
def test_a_trial_is_a_job_of_several_processes(name, backend, tmp_path):
    if importlib.util.find_spec(TOOLS[name]) is None:
        pytest.skip(f"{TOOLS[name]} is not installed")
    for file in ("trial.py", name):
        (tmp_path / file).write_text(PROGRAMS[file])
    environment = launch.variables(backend, OMP_NUM_THREADS="1", XLA_FLAGS="", JAX_PLATFORMS="cpu")
    environment |= {"RAY_DEDUP_LOGS": "0", "PYTHONUNBUFFERED": "1"}
    command = ["sh", "-ec", f"cd '{tmp_path}' && '{sys.executable}' {name}"]
    output = launch.run(command, 300, {**os.environ, **environment})
    trials = collections.defaultdict(set)
    for rank, values in re.findall(r"\[([01])\] (\S+ \d+), 2 replicas", output):
        trials[values].add(rank)
    assert len(trials) == 2 and all(ranks == {"0", "1"} for ranks in trials.values()), output
    rate, units = re.search(r"^best [\d.]+ .*learning_rate': ([\d.e-]+), 'units': (\d+)", output, re.MULTILINE).groups()
    assert f"{float(rate):.6f} {units}" in trials
