"""Files written on any backend are read on every backend, with equal state, and training goes on."""

import pytest
from support import launch

BACKENDS = ("jax", "tensorflow", "torch")

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("files between backends")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def outputs(folder):
    """What a process of each backend prints that writes its files, waits for the others', and reads all."""
    environments = [launch.variables(backend, JAX_PLATFORMS="cpu", OMP_NUM_THREADS="1") for backend in BACKENDS]
    return dict(zip(BACKENDS, launch.workers("files_between_backends.py", environments, folder, timeout=240)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_files_of_every_backend_are_read(outputs, folder, backend):
    written = len(list(folder.glob("*.npz")))
    read = [line for line in outputs[backend].splitlines() if line.startswith(("model ", "weights "))]
    assert len(read) == written > 0
