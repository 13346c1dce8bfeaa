"""Accumulation, loss scaling, and custom training loops: what each example is to show, with a few steps."""

import re
import sys

import pytest
from support import launch
from test_examples import EXAMPLES, run

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TOGETHER = str(launch.SCRIPTS / "several_examples.py")


def printed(output, name):
    """What the example `name` printed, by label."""
    (part,) = re.findall(rf"^--- {name}\n(.*?)(?=^---|\Z)", output, re.MULTILINE | re.DOTALL)
    return dict(re.findall(r"^(\S.*?)  +(\S.*)$", part, re.MULTILINE))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("backend", "start", "replicas", "loop"),
    [
        ("jax", [sys.executable], ["--replicas", "4"], "jax_loop.py"),
        pytest.param("tensorflow", [sys.executable], ["--replicas", "2"], None, marks=pytest.mark.exhaustive),
        pytest.param("torch", TORCHRUN, [], "torch_loop.py", marks=pytest.mark.exhaustive),
    ],
)
def test_examples_show_what_they_say(backend, start, replicas, loop):
    words = [str(EXAMPLES / "accumulation.py"), "--steps", "2", *replicas]
    words += ["--", str(EXAMPLES / "loss_scaling.py"), "--epochs", "4", *replicas]
    if loop is not None:
        words += ["--", str(EXAMPLES / loop), "--steps", "2", *replicas]
    output = run(*start, TOGETHER, *words, KERAS_BACKEND=backend)
    number = replicas[-1] if replicas else "2"

    found = printed(output, "accumulation.py")
    assert (found["backend"], found["replicas"]) == (backend, number)
    assert found["updates, whole batches"] == found["updates, in micro-batches"] == "2"
    assert float(found["relative difference"]) <= 1e-5

    found = printed(output, "loss_scaling.py")
    assert (found["backend"], found["replicas"]) == (backend, number)
    assert float(found["accuracy, not scaled"]) < 0.3
    assert float(found["accuracy, scaled"]) > 0.7
    assert int(found["skipped steps"]) >= 4  # one in each epoch
    assert float(found["largest difference"]) == 0

    if loop is not None:
        found = printed(output, loop)
        assert found["replicas"] == number
        assert float(found["relative difference"]) <= 1e-5


BACKENDS = [
    ("torch", TORCHRUN, []),
    ("jax", [sys.executable], ["--replicas", "2"]),
    ("tensorflow", [sys.executable], ["--replicas", "2"]),
]


@pytest.mark.timeout(300)
@pytest.mark.exhaustive
@pytest.mark.parametrize(("backend", "start", "replicas"), BACKENDS)
def test_error_feedback_trains_with_few_elements(backend, start, replicas):
    output = run(*start, str(EXAMPLES / "top_k.py"), *replicas, KERAS_BACKEND=backend)
    found = dict(re.findall(r"^2 replicas, (.+?) +loss (\S+)$", output, re.MULTILINE))
    everything, fed_back, without = map(float, found.values())
    assert everything < 0.5 and fed_back < 0.6, found
    assert without > fed_back + 0.02, found


@pytest.mark.timeout(300)
@pytest.mark.exhaustive
@pytest.mark.parametrize(("backend", "start", "replicas"), BACKENDS)
def test_local_sgd_trains_with_few_communications(backend, start, replicas):
    output = run(*start, str(EXAMPLES / "local_sgd.py"), "--epochs", "9", *replicas, KERAS_BACKEND=backend)
    lines = re.findall(r"^2 replicas, (.+?) +loss (\S+), (\d+) communications$", output, re.MULTILINE)
    assert [(name, int(times)) for name, _, times in lines] == [
        ("synchronous", 198),
        ("mean of the weights", 9),
        ("outer optimizer", 47),
    ]
    losses = [float(loss) for _, loss, _ in lines]
    assert max(losses) < 0.5, losses
