"""PyTorch: on a GPU a step of `fit` waits for the device no more often than the docs say, in each mode.

There is no GPU: fake tensors stand in for its tensors, and a process group that moves nothing for other ranks.
"""

import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from support import launch

pytestmark = [
    pytest.mark.backends("torch"),
    pytest.mark.exhaustive,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
]

NUM_STEPS = 4
# By number of ranks and mode: how often `NUM_STEPS` steps read from the GPU, and how many more blocking copies to it
# they make than Keras. Fewer than Keras, because Keras' Adam copies its constants in each update.
MODES = {
    (4, "plain"): (0, -12),
    (4, "no overlap"): (0, -8),
    (4, "shard_state"): (0, 0),
    (4, "accumulation"): (0, -10),
    (4, "accumulation, shard_state"): (0, -4),
    (4, "on_nonfinite"): (4, -12),
    (4, "bfloat16"): (0, -12),
    (4, "Int8"): (0, 0),
    (4, "replica_clipnorm"): (0, -4),
    (4, "replica_transform"): (0, -8),
    (4, "sync_every"): (2, -6),
    (4, "virtual_replicas"): (4, 4),
    (4, "fused=False"): (0, 0),
    (4, "LossScaling"): (4, -4),
    (4, "GradientClipping"): (0, -8),
    (4, "MixedPrecision"): (0, -12),
    (1, "plain"): (0, -12),
    (1, "shard_state"): (0, -12),
    (1, "accumulation"): (0, -10),
    (1, "on_nonfinite"): (4, -12),
    (1, "replica_clipnorm"): (0, -8),
    (1, "fused=False"): (0, 0),
    (1, "LossScaling"): (4, -4),
    (1, "GradientClipping"): (0, -8),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the program wrote, by number of ranks."""
    folder = tmp_path_factory.mktemp("fake_gpu")
    library = folder / "guard.so"
    torch = folder_of("torch")
    command = ["g++", "-shared", "-fPIC", "-std=c++20", f"-I{torch / 'include'}", launch.SCRIPTS / "fake_cuda.cpp"]
    command += ["-o", library, f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
    subprocess.run(command, check=True)
    written = {}
    for ranks in (1, 4):
        result = folder / f"{ranks}.json"
        script = [sys.executable, str(launch.SCRIPTS / "fake_cuda.py"), str(library), str(result), str(ranks)]
        launch.run(script, 240.0, dict(os.environ))
        written[ranks] = json.loads(result.read_text())
    return written


@pytest.mark.parametrize(("ranks", "mode"), MODES)
def test_a_step_waits_for_the_gpu_as_often_as_it_says(found, ranks, mode):
    keras, step = found[ranks]["Keras"], found[ranks][mode]
    assert "error" not in step, step["trace"]
    waits, copies = MODES[ranks, mode]
    assert sum(step["waits"].values()) == waits, step["waits"]
    assert sum(step["copies"].values()) <= sum(keras["copies"].values()) + copies, step["copies"]
    assert step["devices"] == ["cuda"]


@pytest.mark.parametrize(("ranks", "mode"), MODES)
def test_every_operator_has_a_kernel_for_gpus(found, ranks, mode):
    operators = [name for name in found[ranks][mode]["operators"] if name.startswith("aten::")]
    assert operators
    assert [name for name in operators if not has_gpu_kernel(name)] == []


def test_keras_itself_waits_for_nothing(found):
    assert found[1]["Keras"]["waits"] == found[4]["Keras"]["waits"] == {}


def test_a_number_that_is_read_is_found(found):
    assert sum(found[4]["fault: reads a number"]["waits"].values()) >= NUM_STEPS


def test_mixed_devices_are_found(found):
    assert "FakeTensorDeviceMismatchError" in found[4]["fault: mixes devices"]["error"]


def test_an_operator_for_cpus_only_is_found():
    assert has_gpu_kernel("aten::mm")
    assert not has_gpu_kernel("aten::mkldnn_linear")


def test_fused_kernels_of_pytorch_take_no_fake_tensors(found):
    """So the steps above skip them, and check the devices of their arguments. If this fails, they need not."""
    assert found[4]["stops in fused"] is not None


def has_gpu_kernel(name):
    """Whether PyTorch's list of operators has a kernel for CUDA, or one for all devices."""
    text = (folder_of("torchgen") / "packaged/ATen/native/native_functions.yaml").read_text()
    entry = re.search(rf"- func: {re.escape(name.removeprefix('aten::'))}\(.*?(?=\n- func|\Z)", text, re.DOTALL)
    if entry is None:
        return True  # made in C++, as `prim::device` is
    other = re.search(r"^  structured_delegate: (\S+)", entry[0], re.MULTILINE)
    if other is not None:
        return has_gpu_kernel(other[1])
    kernels = re.findall(r"^    ([\w, ]+):", entry[0], re.MULTILINE)
    return not kernels or any("CUDA" in kernel or "Composite" in kernel for kernel in kernels)


def folder_of(package):
    return pathlib.Path(importlib.util.find_spec(package).submodule_search_locations[0])
