"""`save_model(..., portable=True)`: files that Keras loads in a process without this package."""

import json
import zipfile

import keras
import numpy as np
import pytest
from conftest import BACKEND
from support import launch, problem

import keras_shardopt as ks

# A finder that raises if something imports the package, as where it is not installed.
WITHOUT = """
import sys
import warnings

assert "keras_shardopt" not in sys.modules
warnings.simplefilter("error", UserWarning)

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "keras_shardopt":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
"""
RESUMES = """
import keras
import numpy as np

model = keras.saving.load_model(sys.argv[1])
x, y = (np.load(sys.argv[1] + f".{name}.npy") for name in "xy")
model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
np.savez(sys.argv[1] + ".npz", *model.get_weights(), model.predict(x, verbose=0))
print(type(model.optimizer).__name__, model.layers[0].get_config()["synchronized"])
"""


def deep_model(optimizer, synchronized=True):
    with ks.data_parallel(1):
        layers = [keras.Input((problem.NUM_FEATURES,)), keras.layers.BatchNormalization(synchronized=synchronized)]
        layers += [keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(problem.NUM_OUTPUTS)]
        model = keras.Sequential(layers)
        model.compile(optimizer, "mse")
    return model


@pytest.mark.exhaustive("jax", "tensorflow")
def test_keras_alone_continues_with_the_inner_optimizer(tmp_path):
    optimizer = ks.CrossShard(ks.LossScaling(ks.GradientClipping(keras.optimizers.Adam(0.01), 100.0)))
    model = deep_model(optimizer)
    x, y = problem.data(4)
    model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    file = str(tmp_path / "model.keras")
    ks.save_model(model, file, portable=True)
    assert model.optimizer is optimizer and model.layers[0].synchronized
    for name, array in zip("xy", (x, y)):
        np.save(f"{file}.{name}", array)
    environment = launch.variables(BACKEND, OMP_NUM_THREADS="1")
    printed = launch.program(BACKEND, WITHOUT + RESUMES, file, environment=environment)
    assert printed.splitlines()[-1] == "Adam False"

    model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    with np.load(f"{file}.npz") as found:
        for mine, other in zip([*model.get_weights(), model.predict(x, verbose=0)], found.values()):
            np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.neutral
def test_only_the_configuration_differs_from_other_files(tmp_path):
    model = problem.model()
    model.compile(ks.CrossShard("adam"), "mse")
    for portable in (False, True):
        ks.save_model(model, tmp_path / f"{portable}.keras", portable=portable)
    with zipfile.ZipFile(tmp_path / "False.keras") as usual, zipfile.ZipFile(tmp_path / "True.keras") as portable:
        assert usual.namelist() == portable.namelist()
        before, after = (json.loads(archive.read("config.json")) for archive in (usual, portable))
        before["compile_config"]["optimizer"] = before["compile_config"]["optimizer"]["config"]["inner_optimizer"]
        assert before == after
        assert "keras_shardopt" not in portable.read("config.json").decode()
    assert {file.name for file in tmp_path.iterdir()} == {"False.keras", "True.keras"}


@pytest.mark.neutral
def test_other_classes_of_the_package_are_an_error(tmp_path):
    model = problem.model()
    schedule = ks.schedules.PolyDecay(0.1, decay_steps=10)
    model.compile(ks.CrossShard(keras.optimizers.SGD(schedule)), "mse")
    with pytest.raises(ValueError, match=r"must be made of Keras' classes. Received: 'PolyDecay'"):
        ks.save_model(model, tmp_path / "model.keras", portable=True)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="must end in '.keras'. Received"):
        ks.save_model(model, tmp_path / "model.h5", portable=True)
