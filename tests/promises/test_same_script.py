"""The text of a user's script, unchanged on every backend, does on 2 and 4 replicas what it does on one."""

import csv
import importlib.util
import json

import keras
import numpy as np
import pytest
from conftest import BACKEND
from support import launch
from support.suites import some

import keras_shardopt as ks

pytestmark = pytest.mark.timeout(400)

SCRIPT = "same_script.py"
CASES = [("arrays", 2), ("PyDataset", 4), ("generator", 2), ("DataLoader", 4), ("tf.data", 2), ("tf.data", 4)]
if BACKEND == "tensorflow":  # where two workers, below, have others
    CASES = [("arrays", 2), ("PyDataset", 4), ("DataLoader", 2), ("tf.data", 2)]
OF = {"DataLoader": "torch", "tf.data": "tensorflow"}

# Of the largest movement of a weight, and of the largest element of each slot. A moving variance near 1 is rounded to
# 1.2e-7, which may be more: one such rounding is allowed.
OF_WEIGHTS, OF_SLOTS, ROUNDING = 1e-6, 1e-5, float(np.finfo("float32").eps)


def run(num_replicas, folder, kind, num_workers=1):
    """What the script leaves in the folder."""
    arguments = num_replicas, folder, kind
    if num_workers > 1:
        launch.tensorflow_workers(SCRIPT, num_workers, *arguments, timeout=200)
    elif BACKEND == "torch":
        launch.torchrun(SCRIPT, num_replicas, *arguments, timeout=200)
    else:
        environments, start = [launch.variables(BACKEND)], launch.fork_with(BACKEND)
        launch.workers(SCRIPT, environments, *arguments, timeout=200, start=start)
    return Outcome(folder)


class Outcome:
    def __init__(self, folder):
        self.folder = folder
        self._arrays = np.load(folder / "results.npz")
        self.histories = json.loads((folder / "histories.json").read_text())

    def values(self, name):
        names = [key for key in self._arrays if key.startswith(f"{name}/")]
        return [self._arrays[f"{name}/{i}"] for i in range(len(names))]


@pytest.fixture(scope="module")
def on_one(tmp_path_factory):
    found = {}

    def outcome(kind):
        if kind not in found:
            found[kind] = run(1, tmp_path_factory.mktemp("one"), kind)
        return found[kind]

    return outcome


@pytest.mark.parametrize("kind, num_replicas", some(CASES, [("arrays", 2)]))
def test_it_does_what_one_process_does(kind, num_replicas, tmp_path, on_one):
    framework = OF.get(kind, BACKEND)
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"a {kind} is of {framework}, which this environment does not have")
    check_same(run(num_replicas, tmp_path, kind), on_one(kind))


@pytest.mark.backends("tensorflow")
@pytest.mark.exhaustive("tensorflow")
@pytest.mark.parametrize(("kind", "num_replicas"), [("arrays", 4), ("generator", 2), ("tf.data", 2)])
def test_it_does_so_on_two_workers(kind, num_replicas, tmp_path, on_one):
    if importlib.util.find_spec(OF.get(kind, BACKEND)) is None:
        pytest.skip(f"a {kind} is of {OF[kind]}, which this environment does not have")
    check_same(run(num_replicas, tmp_path, kind, num_workers=2), on_one(kind))


def check_same(found, expected):
    assert found.values("differs") == [0]
    start = expected.values("start")
    for mine, whole in zip(found.values("start"), start):
        np.testing.assert_array_equal(mine, whole)
    for name in ("fitted", "best", "continued", "scheduled"):
        movement = max(np.max(np.abs(whole - before)) for whole, before in zip(expected.values(name), start))
        for mine, whole in zip(found.values(name), expected.values(name), strict=True):
            np.testing.assert_allclose(mine, whole, rtol=ROUNDING, atol=OF_WEIGHTS * movement, err_msg=name)
    for name in ("slots", "slots scheduled"):
        for mine, whole in zip(found.values(name), expected.values(name), strict=True):
            np.testing.assert_allclose(mine, whole, rtol=0, atol=OF_SLOTS * np.max(np.abs(whole)), err_msg=name)
    assert len(expected.histories[0]["loss"]) < 6, "it never stopped early"
    assert expected.values("rate")[0] < 0.02, "the rate was never reduced"
    for mine, whole in zip(found.histories, expected.histories):
        assert mine.keys() == whole.keys()
        for name, values in whole.items():
            np.testing.assert_allclose(mine[name], values, rtol=1e-5, err_msg=name)
    for name in ("rate", "evaluated", "predicted"):
        for mine, whole in zip(found.values(name), expected.values(name), strict=True):
            np.testing.assert_allclose(mine, whole, rtol=1e-5, atol=1e-6, err_msg=name)
    check_files(found.folder, expected.folder)


def check_files(mine, whole):
    """One file of each, with the same in it."""
    assert sorted(path.name for path in mine.iterdir()) == sorted(path.name for path in whole.iterdir())
    rows = [list(csv.reader((folder / "log.csv").read_text().splitlines())) for folder in (mine, whole)]
    assert rows[0][0] == rows[1][0]
    np.testing.assert_allclose(np.array(rows[0][1:], float), np.array(rows[1][1:], float), rtol=1e-5)
    events = [sorted(path.parent.name for path in folder.rglob("events.*")) for folder in (mine, whole)]
    assert events[0] == events[1]
    for name in ("best.keras", "model.keras"):
        with ks.data_parallel(1):  # Keras reads files of synchronized layers on TensorFlow alone
            weights = [keras.saving.load_model(folder / name, compile=False).get_weights() for folder in (mine, whole)]
        for one, other in zip(*weights):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
