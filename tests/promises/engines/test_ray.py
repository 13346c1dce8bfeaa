"""The example for Ray Train: its workers train as one process of plain Keras, also if one of them is killed."""

import importlib.util
import os
import pathlib
import re
import sys

import numpy as np
import pytest
from support import launch, pages, problem

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)

pytestmark = pytest.mark.timeout(600)
EXAMPLES = pages.ROOT / "examples"
WEIGHTS = """
import sys
import keras, numpy as np
import ray_train

model = ray_train.make_model()
start = model.get_weights()
model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
model.fit(*ray_train.make_data(), **ray_train.FIT)
trained = keras.saving.load_model(sys.argv[1], compile=False).get_weights()
np.savez(sys.argv[2], *start, *model.get_weights(), *trained)
"""


def environment(backend):
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "RAY_ADDRESS")}
    paths = os.pathsep.join([str(EXAMPLES), str(pages.ROOT), os.environ.get("PYTHONPATH", "")])
    return {**kept, "KERAS_BACKEND": backend, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize("is_shared", [False, True], ids=["storage", "shared"])
@pytest.mark.parametrize("backend", pages.BACKENDS)
def test_a_job_continues_after_the_death_of_a_worker(backend, is_shared, tmp_path):
    command = [sys.executable, str(EXAMPLES / "ray_train.py"), "--fail", "--storage", str(tmp_path / "storage")]
    command += ["--shared", str(tmp_path / "shared")] if is_shared else []
    output = launch.run(command, 250, environment(backend))
    found = dict(re.findall(r"^(backend|replicas|first epoch|checkpoint) +(\S+)$", output, re.MULTILINE))
    assert (found["backend"], found["replicas"], found["first epoch"]) == (backend, "2", "2"), output
    file, weights = pathlib.Path(found["checkpoint"]) / "model.keras", tmp_path / "weights.npz"
    saved = [len(list(each.parent.glob("*.safetensors"))) for each in tmp_path.rglob("manifest.json")]
    assert set(saved) == ({2} if is_shared else set())
    launch.run([sys.executable, "-c", WEIGHTS, str(file), str(weights)], 100, environment(backend))
    with np.load(weights) as stored:
        arrays = [stored[name] for name in stored.files]
    start, alone, trained = (arrays[i * len(arrays) // 3 :][: len(arrays) // 3] for i in range(3))
    assert problem.relative_difference(trained, alone, start) <= problem.TOLERANCE
