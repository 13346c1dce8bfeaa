"""PyTorch: a step makes as many calls on 4 ranks as on 1024, and sends what the formulas say.

The ranks do not exist: a process group of PyTorch's that moves nothing stands in for them.
"""

import json

import pytest
from support import launch

pytestmark = [pytest.mark.backends("torch"), pytest.mark.exhaustive]

FEW, MANY = "4", "1024"
NUM_STEPS = 4
# By mode: bytes per update, in those of the weights.
SENT = {
    "plain": {"allreduce": 1},
    "no overlap": {"allreduce": 1},
    "shard_state": {"reduce_scatter_base": 1, "allgather_base": 1},
    "accumulation": {"allreduce": 0.5},
    "accumulation, shard_state": {"reduce_scatter_base": 0.5, "allgather_base": 0.5},
    "on_nonfinite": {"allreduce": 1},
    "bfloat16": {"allreduce": 0.5},
    "Int8": {"alltoall_base": 0.25, "allgather_base": 0.25},
    "replica_clipnorm": {"allreduce": 1},
    "sync_every": {"allreduce": 0.5},
}


@pytest.fixture(scope="module")
def counts(tmp_path_factory):
    result = tmp_path_factory.mktemp("counts") / "counts.json"
    environments, start = [launch.variables("torch", OMP_NUM_THREADS="1")], launch.fork_with("torch")
    launch.workers("fake_ranks.py", environments, result, FEW, MANY, timeout=240, start=start)
    return json.loads(result.read_text())


@pytest.mark.parametrize("mode", SENT)
def test_calls_do_not_depend_on_the_number_of_ranks(counts, mode):
    few, many = counts[FEW][mode], counts[MANY][mode]
    assert sum(few["calls"].values()) >= NUM_STEPS
    assert many["calls"] == few["calls"]


@pytest.mark.parametrize("mode", SENT)
def test_bytes_are_those_of_the_formula(counts, mode):
    found = counts[FEW][mode]
    for name, share in SENT[mode].items():
        # "plain" gathers only what ranks agree on before each batch.
        control = 0 if name == "allreduce" else counts[FEW]["plain"]["bytes"].get(name, 0)
        expected = share * NUM_STEPS * found["weights"]
        assert expected <= found["bytes"][name] - control <= 1.25 * expected  # with padding and scales
