"""The command for hundreds of devices: the same collectives and bytes, compiled and not extrapolated."""

import json
import math
import os
import subprocess
import sys

import pytest
from compiled.test_modes import MISSING
from support.suites import some

pytestmark = [
    pytest.mark.backends("jax"),
    pytest.mark.skipif(bool(MISSING), reason=f"needs libtpu and JAX's CUDA plugin; missing: {', '.join(MISSING)}"),
]

PROGRAM = """
import keras, numpy as np, keras_shardopt as ks

with ks.data_parallel() as replicas:
    model = keras.Sequential([keras.Input(({width},)), *[keras.layers.Dense({width}) for _ in range({layers})]])
    model.compile(ks.CrossShard(keras.optimizers.Adam(), shard_state={shard_state}), "mse")
x = np.zeros((2 * replicas.num_replicas, {width}), "float32")
model.fit(x, x, batch_size=len(x), verbose=0)
"""


MODEL_PARALLEL = """
import keras, numpy as np, keras_shardopt as ks

devices = keras.distribution.list_devices()
layouts = keras.distribution.LayoutMap(keras.distribution.DeviceMesh((4, 4), ["batch", "model"], devices))
layouts[".*up/kernel"], layouts[".*up/bias"], layouts[".*down/kernel"] = (None, "model"), ("model",), ("model", None)
keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch"))
layers = [(4 * {width}, "up"), ({width}, "down")] * {layers}
dense = [keras.layers.Dense(width, name=f"{{i}}_{{name}}") for i, (width, name) in enumerate(layers)]
model = keras.Sequential([keras.Input(({width},)), *dense])
model.compile(ks.CrossShard(keras.optimizers.Adam(), shard_state={shard_state}), "mse")
x = np.zeros((64, {width}), "float32")
model.fit(x, x, batch_size=len(x), verbose=0)
"""


def command(folder, *arguments, program=PROGRAM, width=64, layers=1, shard_state=False):
    (folder / "train.py").write_text(program.format(width=width, layers=layers, shard_state=shard_state))
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


@pytest.mark.exhaustive
@pytest.mark.parametrize(("width", "max_over_ideal"), [(512, 1.02), (64, 1.29)])
def test_each_of_1024_devices_holds_an_equal_share_of_the_state(width, max_over_ideal, tmp_path):
    done = command(tmp_path, "--json", "h100:1024", width=width, layers=5, shard_state=True)
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout)
    weights, rows, loss = found["weights_bytes"], 2 * 2 * 4 * width, 2 * 4
    assert weights == 5 * 4 * (width * width + width)
    held = found["memory_bytes"]["arguments"] - weights - rows - loss
    counters = 2 * 4
    # Adam's two slots of each variable, padded to the next element.
    assert held == counters + 2 * 4 * 5 * (math.ceil(width * width / 1024) + math.ceil(width / 1024))
    # With five Dense(64) an equal share is 20.3 numbers a slot, of which each bias of 64 takes one.
    assert held <= max_over_ideal * (counters + 2 * weights) / 1024


@pytest.mark.parametrize(
    ("target", "width", "shard_state"),
    # A kernel of 516 x 2064 divides among the devices, one of 510 x 2040 does not.
    some(
        [("tpu:v5e:4x4", 512, True), ("tpu:v5e:4x4", 512, False), ("h100:16", 516, True), ("h100:16", 510, True)],
        [("tpu:v5e:4x4", 512, True)],
    ),
)
def test_state_is_divided_over_both_axes_of_a_mesh(target, width, shard_state, tmp_path):
    """Four replicas of four chips each: Adam's slots take a sixteenth of a chip's whole, not a fourth."""
    program = {"program": MODEL_PARALLEL, "width": width, "layers": 2, "shard_state": shard_state}
    done = command(tmp_path, "--json", target, **program)
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout)
    kernels, columns, rows = 4 * 4 * 4 * width * width, 2 * 4 * 4 * width, 2 * 4 * width
    assert found["weights_bytes"] == kernels + columns + rows
    weights, batch = (kernels + columns) / 4 + rows, 2 * 4 * (64 // 4) * width
    held, share = found["memory_bytes"]["arguments"] - weights - batch, 2 * found["weights_bytes"] / 16
    print("held", held, "share", share, held / share)
    assert held == pytest.approx(share if shard_state else 2 * weights, rel=0.02)
    sent = {}
    for each in found["collectives"]:
        assert each["group_size"] in (4, 16)  # of an axis, and of the mesh
        sent[each["kind"]] = sent.get(each["kind"], 0) + (each["num_bytes"] if each["group_size"] == 4 else 0)
    print("sent", {kind: num_bytes / kernels * 4 for kind, num_bytes in sent.items()})
    if width == 512:  # each chip sends the gradients of its part of the weights among replicas
        kinds = ("reduce-scatter", "all-gather") if shard_state else ("all-reduce",)
        for kind in kinds:
            assert sent[kind] == pytest.approx(kernels / 4, rel=0.05)


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["h100:1", "tpu:v5e:1x1"])
def test_one_device_exchanges_nothing(target, tmp_path):
    done = command(tmp_path, "--json", target)
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout)
    assert found["collectives"] == []
    assert found["flops"] > 0
    assert found["memory_bytes"]["arguments"] > 3 * found["weights_bytes"]


def test_a_plot_needs_several_targets(tmp_path):
    done = command(tmp_path, "--plot", "scale.png", "h100:8")
    assert done.returncode == 2
    assert "`--plot` needs several targets and matplotlib. Received: 1 target." in done.stderr


@pytest.mark.exhaustive
def test_a_slice_that_no_tpu_has_is_named(tmp_path):
    done = command(tmp_path, "tpu:v5e:1x2")
    assert done.returncode == 2
    assert "must have the shape of a slice, such as 2x2 or 4x4. Received: 'tpu:v5e:1x2'" in done.stderr
