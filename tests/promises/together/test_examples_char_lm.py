"""The language model learns, in each of the ways that its text names."""

import pathlib
import re
import sys

import pytest
from support import events
from test_examples import EXAMPLES, run

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

pytestmark = [pytest.mark.timeout(300), pytest.mark.exhaustive]


@pytest.mark.parametrize(
    ("backend", "command", "extra"),
    [
        ("jax", [sys.executable], ["--replicas", "2", "--larc"]),
        ("tensorflow", [sys.executable], ["--replicas", "2", "--with-fit"]),
        ("torch", TORCHRUN, []),
    ],
)
def test_bits_per_character_fall(backend, command, extra, tmp_path):
    small = ["--steps", "16", "--batch-size", "16", "--log-dir", str(tmp_path), "--every", "8"]
    output = run(*command, str(EXAMPLES / "char_lm.py"), *small, *extra, KERAS_BACKEND=backend)
    bits = [float(number) for number in re.findall(r"updates: (\d+\.\d+) bits per character", output)]
    assert bits[0] == pytest.approx(7.0, abs=0.2)  # of 128 characters, all alike
    assert bits[-1] < bits[0] - 0.7
    assert re.search(r"between 2 replicas: 0$", output, re.MULTILINE)
    assert len(list(pathlib.Path(tmp_path).iterdir())) == 1
    found = events.read(tmp_path)
    assert [step for step, _ in found["Loss_Optimization/global_gradient_norm"]] == [8, 16]
