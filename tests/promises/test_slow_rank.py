"""`StepReport` names the slow process of a job, and its slow phase, on every process. It summarizes a trace of each."""

import json

import keras
import pytest
from support import launch
from support.suites import some

BACKEND = keras.backend.backend()

pytestmark = [
    pytest.mark.exhaustive("jax", "tensorflow"),
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("processes"),
]

PHASES = ["input", "forward", "callbacks", "message"]
if BACKEND == "torch":  # elsewhere a forward pass of this model is too short to become 1 ms slower
    PHASES.append("throttled")


@pytest.mark.parametrize("phase", some(PHASES, ["input"]))
def test_the_slow_rank_is_named(phase):
    # Times of messages are compared between processes other than process 0, which receives them.
    num_processes, seconds = {"message": (3, 0.005), "throttled": (2, 0.0005)}.get(phase, (2, 0.02))
    printed = launch.processes(BACKEND, "slow_rank.py", num_processes, phase, seconds, 2, timeout=200)
    text = printed if isinstance(printed, str) else printed[0]
    assert text.count("StepReport, epoch 1: Slow: rank") == 2


def test_the_trace_of_each_rank_is_summarized(tmp_path):
    printed = launch.processes(BACKEND, "traced_step.py", 2, tmp_path / "steps.jsonl", timeout=200)
    text = printed if isinstance(printed, str) else printed[0]
    ranks = json.loads((tmp_path / "steps.jsonl.trace" / "summary.json").read_text())["ranks"]
    assert len(ranks) == 2
    for rank, each in enumerate(ranks):
        assert f"StepReport, epoch 1: Traced step 6, rank {rank}: {each['ms']:.3g} ms: computing" in text
        assert each["exchange"] > 0 and each["computing"] > 0
        assert any("reduce" in operation["name"].lower() for operation in each["operations"])


@pytest.mark.exhaustive
def test_no_rank_is_named_if_all_are_equal():
    if launch.slowness() > 1.5:
        pytest.skip("other programs share the cores, so a rank can really be slow")
    launch.processes(BACKEND, "slow_rank.py", 2, "none", 0, 3, timeout=200)
