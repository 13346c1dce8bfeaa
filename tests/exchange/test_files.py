"""Files written on any backend are read on every backend, with equal state, and training goes on."""

import os
import pathlib
import sys

import pytest
from support import launch

BACKENDS = ("jax", "tensorflow", "torch")
TESTS = pathlib.Path(__file__).parents[1]

pytestmark = pytest.mark.timeout(600)


def run(backend, what, folder):
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TESTS / "exchange" / "files.py"), what, str(folder)]
    return launch.run(command, 240, environment)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for backend in BACKENDS:
        run(backend, "write", folder)
    return folder


@pytest.mark.parametrize("backend", BACKENDS)
def test_files_of_every_backend_are_read(folder, backend):
    written = len(list(folder.glob("*.npz")))
    output = run(backend, "read", folder)
    read = [line for line in output.splitlines() if line.startswith(("model ", "weights "))]
    assert len(read) == written > 0
