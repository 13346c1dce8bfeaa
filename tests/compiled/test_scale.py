"""The command for hundreds of devices: the same collectives and bytes, compiled and not extrapolated."""

import json
import os
import subprocess
import sys

import pytest
from compiled.test_modes import MISSING

pytestmark = [
    pytest.mark.backends("jax"),
    pytest.mark.skipif(bool(MISSING), reason=f"needs libtpu and JAX's CUDA plugin; missing: {', '.join(MISSING)}"),
]

PROGRAM = """
import keras, numpy as np, keras_shardopt as ks

with ks.data_parallel() as replicas:
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
    model.compile(ks.CrossShard(keras.optimizers.Adam()), "mse")
x = np.zeros((2 * replicas.num_replicas, 64), "float32")
model.fit(x, x, batch_size=len(x), verbose=0)
"""


def command(folder, *arguments):
    (folder / "train.py").write_text(PROGRAM)
    line = [sys.executable, "-m", "keras_shardopt.compile_for", *arguments, "train.py"]
    environment = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=400)


@pytest.mark.exhaustive
def test_collectives_do_not_depend_on_the_number_of_devices(tmp_path):
    done = command(tmp_path, "--json", "--plot", "scale.png", "h100:8,h100:512,tpu:v5p:4x4x8")
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout)
    assert [each["num_devices"] for each in found] == [8, 512, 128]
    assert {len(each["collectives"]) for each in found} == {1}
    assert {each["collectives"][0]["num_bytes"] - each["weights_bytes"] for each in found} <= {0, 4}
    assert [each["collectives"][0]["group_size"] for each in found] == [8, 512, 128]
    assert (tmp_path / "scale.png").stat().st_size > 10_000


def test_a_plot_needs_several_targets(tmp_path):
    done = command(tmp_path, "--plot", "scale.png", "h100:8")
    assert done.returncode == 2
    assert "`--plot` needs several targets and matplotlib. Received: 1 target." in done.stderr
