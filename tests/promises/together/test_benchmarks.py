"""Every benchmark runs, on sizes that say nothing, and none is forgotten by the program that runs them all."""

import importlib.util
import os
import sys

import pytest
from support import launch, pages

FOLDER = pages.DOCS.parent / "benchmarks"
SHARED = {"run_all", "tables", "timing", "torch_training"}
BY_HAND = {"fewer_bytes", "fewer_bytes_link", "local_sgd"}
"""Those that train for minutes, and write what a page draws."""


def commands():
    spec = importlib.util.spec_from_file_location("run_all", FOLDER / "run_all.py")
    sys.path.insert(0, str(FOLDER))  # as for a program: it imports `timing`
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.COMMANDS


NAMES = sorted({script.partition(".")[0] for _, script, _ in commands()})


def test_none_is_forgotten():
    assert {file.stem for file in FOLDER.glob("*.py")} == {*NAMES, *SHARED, *BY_HAND}


@pytest.mark.timeout(400)
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_it_runs(name):
    if name == "jax_update":
        pytest.importorskip("optax", reason="it is what this one compares with")
    kept = {key: value for key, value in os.environ.items() if key not in ("KERAS_BACKEND", "XLA_FLAGS")}
    command = [sys.executable, str(FOLDER / "run_all.py"), "--quick", "--only", name]
    output = launch.run(command, 360, {**kept, "CUDA_VISIBLE_DEVICES": "", "XLA_FLAGS": launch.QUICKLY_COMPILED})
    assert "left out" not in output
    assert "| ms" in output or "rows/s |" in output or "Milliseconds" in output
