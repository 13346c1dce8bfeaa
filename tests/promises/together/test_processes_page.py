"""The commands under "Several processes" start processes that train together, as they stand on the page."""

import os
import pathlib
import re
import sys

import pytest
from support import launch, pages

BLOCKS = pages.blocks(pages.DOCS / "processes.md")
STARTED = {block.value: block for block in BLOCKS if block.mark == "starts"}


CASES = [(name, backend) for name in STARTED for backend in pages.BACKENDS if name in ("launch", backend)]


@pytest.mark.timeout(200)
@pytest.mark.exhaustive
@pytest.mark.parametrize("name, backend", CASES)
def test_commands_start_replicas(name, backend, tmp_path):
    for block in BLOCKS:
        if block.mark == "file":
            (tmp_path / block.value).write_text(block.code)
    command = STARTED[name].code
    for port, free in zip(("12345", "12346"), launch.free_ports(2)):
        command = command.replace(port, str(free))
    kept = {k: v for k, v in os.environ.items() if k not in ("KERAS_BACKEND", "XLA_FLAGS")}
    paths = [str(pathlib.Path(sys.executable).parent), os.environ["PATH"]]
    environment = {**kept, "OMP_NUM_THREADS": "1", "PATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    environment["KERAS_BACKEND"] = backend
    output = launch.run(["sh", "-ec", f"cd '{tmp_path}'\n{command}"], 120, environment)
    assert "2 replicas, 2 processes" in output
    first, last, difference = re.search(r"loss (\S+) to (\S+), largest difference (\S+)", output).groups()
    assert float(last) < float(first) and difference == "0"
    assert (tmp_path / "model.keras").is_file()
    assert len(re.findall("2 replicas", output)) == 1, "rank 0 prints, and nobody else"
