"""The examples run as their texts say, on every backend they are for."""

import os
import pathlib
import re
import sys

import pytest
from support import launch

EXAMPLES = pathlib.Path(__file__).parents[3] / "examples"

pytestmark = pytest.mark.timeout(300)


def run(*command, **environment):
    kept = {k: v for k, v in os.environ.items() if k not in ("KERAS_BACKEND", "XLA_FLAGS")}
    return launch.run(command, 200, {**kept, "OMP_NUM_THREADS": "1", **environment})


def printed(output, label):
    return re.search(rf"^{label} +(\S+)$", output, re.MULTILINE).group(1)


DIGITS = [("jax", 1), ("jax", 4), ("tensorflow", 1), ("tensorflow", 2), ("torch", 1), ("torch", 2)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("backend", "replicas"), DIGITS)
def test_digits(backend, replicas):
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = start if (backend, replicas) == ("torch", 2) else [sys.executable]
    output = run(*command, str(EXAMPLES / "digits.py"), "--replicas", str(replicas), KERAS_BACKEND=backend)
    assert printed(output, "backend") == backend
    assert int(printed(output, "replicas")) == replicas
    assert float(printed(output, "accuracy on held-out digits")) >= 0.95
    assert float(printed(output, "largest weight difference")) == 0
    assert float(printed(output, "steps per second")) > 0
    # Rank 0 prints the progress bar, and nobody else does.
    assert len(re.findall(r"Epoch 1/15", output)) == 1


@pytest.mark.exhaustive
def test_digits_on_jax_by_default():
    output = run(sys.executable, str(EXAMPLES / "digits.py"), "--steps", "2", "--epochs", "1")
    assert printed(output, "backend") == "jax"


@pytest.mark.parametrize("backend", ["jax", "tensorflow", "torch"])
@pytest.mark.exhaustive
def test_bfloat16_digits_need_masters(backend):
    output = run(sys.executable, str(EXAMPLES / "bfloat16_digits.py"), KERAS_BACKEND=backend)
    assert printed(output, "backend") == backend
    in_float32 = float(printed(output, "float32"))
    assert in_float32 > 0.95
    assert float(printed(output, "bfloat16 with masters")) >= in_float32 - 0.005
    assert float(printed(output, "bfloat16")) < in_float32 - 0.02


@pytest.mark.exhaustive
def test_bfloat16_digits_in_two_steps():
    output = run(sys.executable, "-W", "error::UserWarning", str(EXAMPLES / "bfloat16_digits.py"), "--steps", "2")
    assert printed(output, "backend") == "jax" and float(printed(output, "bfloat16 with masters")) > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["jax", "tensorflow", "torch"])
def test_state_that_does_not_fit_is_divided(backend, tmp_path):
    start = [sys.executable]
    if backend == "torch":
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*start, str(EXAMPLES / "sharded_state.py"), "--replicas", "2", "--steps", "20"]
    output = run(*command, "--file", str(tmp_path / "model.keras"), KERAS_BACKEND=backend)
    assert printed(output, "backend") == backend
    assert printed(output, "divided") == "True"
    assert printed(output, "updates") == "40"
    assert 0.97 < float(printed(output, "MiB held")) < 1.0
    whole, ideal = re.search(r"optimizer state: ([\d,]+) bytes, ideally ([\d,]+)", output).groups()
    assert int(whole.replace(",", "")) == 2 * int(ideal.replace(",", ""))
