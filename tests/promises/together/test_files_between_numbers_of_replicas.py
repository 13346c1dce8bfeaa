"""Saved on 1, 2 or 4 replicas of any backend, loaded on 1, 2 or 4 of any: equal state, and training goes on."""

import os

import pytest
from support import launch

BACKENDS = ("jax", "tensorflow", "torch")
COUNTS = (1, 2, 4)

pytestmark = [pytest.mark.timeout(600), pytest.mark.exhaustive, pytest.mark.xdist_group("files between replicas")]


def run(backend, *arguments):
    script = "files_between_replicas.py"
    if backend == "torch":
        return launch.torchrun(script, max(COUNTS), *arguments, timeout=240)
    environment = launch.variables(
        backend,
        JAX_PLATFORMS="cpu",
        XLA_FLAGS=f"--xla_force_host_platform_device_count={max(COUNTS)} {launch.QUICKLY_COMPILED}",
    )
    return launch.workers(script, [environment], *arguments, timeout=240)[0]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replicas")
    for backend in BACKENDS:
        run(backend, "write", str(folder))
    names = {f"{b} {n}{suffix}" for b in BACKENDS for n in COUNTS for suffix in (".keras", ".weights.h5")}
    assert {name for name in os.listdir(folder) if not name.endswith((".npz", ".sharded"))} == names
    return folder


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_number_of_replicas_goes_on_from_any_other(written, backend):
    output = run(backend, "read", str(written))
    found = {line.split(":")[0] for line in output.splitlines() if line.startswith("read ")}
    assert found == {f"read {origin} {n} on {m}" for origin in BACKENDS for n in COUNTS for m in COUNTS}
