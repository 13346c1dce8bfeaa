"""`StepReport` names the slow process of a job, and its slow phase, on every process."""

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


@pytest.mark.parametrize("phase", some(["input", "forward", "callbacks", "message"], ["input"]))
def test_the_slow_rank_is_named(phase):
    # Times of messages are compared between processes other than process 0, which receives them.
    num_processes, seconds = (3, 0.005) if phase == "message" else (2, 0.02)
    printed = launch.processes(BACKEND, "slow_rank.py", num_processes, phase, seconds, 2, timeout=200)
    text = printed if isinstance(printed, str) else printed[0]
    assert text.count("StepReport, epoch 1: Slow: rank") == 2


@pytest.mark.exhaustive
def test_no_rank_is_named_if_all_are_equal():
    if launch.slowness() > 1.5:
        pytest.skip("other programs share the cores, so a rank can really be slow")
    launch.processes(BACKEND, "slow_rank.py", 2, "none", 0, 3, timeout=200)
